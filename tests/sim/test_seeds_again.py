"""More new seeds of today: a module of its own, so that two workers share them."""

from __future__ import annotations

import pytest
from tests.sim.seeds import parts, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seeds", parts(1))
def test_more_new_seeds_of_today_keep_every_invariant(seeds: range) -> None:
    """I1 to I12."""
    total = run_all(seeds)
    assert total["seeds"] == len(seeds)
    assert total["aborted"] > 0, "not everything may be whole"
