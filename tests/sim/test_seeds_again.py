"""More new seeds of today: a module of its own, so that two workers share them."""

from __future__ import annotations

import pytest
from tests.sim.seeds import COUNT, fresh_seeds, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_more_new_seeds_of_today_keep_every_invariant() -> None:
    """I1 to I12."""
    total = run_all(fresh_seeds(COUNT, series=1))
    assert total["seeds"] == COUNT
    assert total["aborted"] > 0, "not everything may be whole"
