"""The save by which a seed is judged in the end is the last incarnation's, and no other's."""

from __future__ import annotations

from tests.sim.plans import Plan
from tests.sim.simulation import PHASE_S, run_seed
from tests.sim.trainers import Action

HOURS = Action("wait", "4000")


def late_plan(seed: int) -> Plan:
    """Two jobs, the first of which lasts until after the faults have ended."""
    count = int(PHASE_S / float(HOURS.name)) + 1
    return Plan(
        seed=seed,
        profile="calm",
        hosts=2,
        skews_s=(0.0, 0.0),
        jobs=((HOURS,) * count, (Action("save", "step-1", "explicit"),)),
        members=((0, 1), (0, 1)),
        is_careless=(False, False),
        starts_s=(0.0, None),
        has_reader=False,
    )


def test_jobs_that_begin_after_the_faults_have_ended_are_played_before_the_last_one() -> None:
    """I12: a job that began after the last one would rightly fence it off."""
    outcomes = [run_seed(seed, plan=late_plan(seed)) for seed in range(8)]
    assert all(outcome.pointers == {"latest": "step-99"} for outcome in outcomes)
    assert any("step-1" in outcome.committed for outcome in outcomes), "the late job was played"
