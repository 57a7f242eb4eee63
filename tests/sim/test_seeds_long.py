"""Tens of thousands of seeds, profile by profile."""

from __future__ import annotations

import os

import pytest
from tests.sim.faults import PROFILES
from tests.sim.seeds import fresh_seeds
from tests.sim.simulation import run_seed

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(3600)]

EACH = int(os.environ.get("CKPTGATE_SEEDS_LONG", "1500"))


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_many_seeds_of_each_kind_of_fault_keep_every_invariant(profile: str) -> None:
    """I1 to I12."""
    series = 2 + sorted(PROFILES).index(profile) % 8
    committed = 0
    for seed in fresh_seeds(EACH, series=series):
        committed += len(run_seed(seed, profile=profile).committed)
    assert committed >= EACH
