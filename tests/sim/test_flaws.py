"""The checker can fail: engines with one rule broken are caught, each within so many seeds."""

from __future__ import annotations

import os

import pytest
from tests.sim.flaws import FLAWS
from tests.sim.simulation import SeedFailedError, run_seed

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS_MAX = int(os.environ.get("CKPTGATE_FLAW_SEEDS", "1500"))


@pytest.mark.parametrize("flaw", FLAWS)
def test_an_engine_with_this_flaw_is_caught(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant that it breaks is named."""
    patch, said = FLAWS[flaw]
    patch(monkeypatch)
    with pytest.raises(SeedFailedError, match=said) as caught:
        for seed in range(SEEDS_MAX):
            run_seed(seed)
    print(f"{flaw}: {str(caught.value).splitlines()[0][:200]}")
