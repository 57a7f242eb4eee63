"""The real engine under the deterministic scheduler: I1 to I12 after every step, seed by seed.

A failing seed is run again by the command that it prints (`CKPTGATE_SEED=<seed>
CKPTGATE_PROFILE=<its faults> pytest tests/sim/test_seeds.py -k one_seed`), history and all.
"""

from __future__ import annotations

import os

import pytest
from tests.sim.seeds import REGRESSIONS, parts, run_all
from tests.sim.simulation import run_seed


@pytest.mark.parametrize(
    ("seed", "profile"), [pytest.param(*key, id=f"seed-{key[0]}") for key in REGRESSIONS]
)
def test_a_seed_that_once_found_something_keeps_every_invariant(seed: int, profile: str) -> None:
    """I1 to I12."""
    outcome = run_seed(seed, profile=profile)
    assert "step-99" in outcome.committed


def test_one_seed_that_is_named_in_the_environment_keeps_every_invariant() -> None:
    """I1 to I12; on a failure the notes of the error are the whole history."""
    seed = int(os.environ.get("CKPTGATE_SEED", "1"))
    outcome = run_seed(seed, profile=os.environ.get("CKPTGATE_PROFILE", ""))
    print(outcome)
    assert outcome.pointers["latest"] == "step-99"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", parts(0))
def test_new_seeds_of_today_keep_every_invariant(seeds: range) -> None:
    """I1 to I12."""
    total = run_all(seeds)
    assert total["seeds"] == len(seeds)
    assert total["faults"] > len(seeds), "faults were injected"
    assert total["committed"] > len(seeds), "each seed commits at least its last save"
