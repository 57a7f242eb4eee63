"""I10: with publishers killed at any call a save comes to what it comes to without."""

from __future__ import annotations

import dataclasses

import pytest
from tests.sim.plans import Plan
from tests.sim.simulation import run_seed
from tests.sim.trainers import KINDS, Action

pytestmark = pytest.mark.slow
SEEDS = range(5000, 5040)
EVENTS = [kind for kind in KINDS if kind != "all"]
"""A commit for all takes those who are registered by then (DESIGN, rule 2): who is depends on when
the publishers ran, killed or not."""


def simple_plan(seed: int, profile: str) -> Plan:
    """One job on two machines that saves three checkpoints."""
    names = ("step-1", "step-2", "step-3")
    kinds = [EVENTS[(seed + at) % len(EVENTS)] for at in range(3)]
    saves = tuple(Action("save", name, kind) for name, kind in zip(names, kinds, strict=True))
    return Plan(
        seed=seed,
        profile=profile,
        hosts=2,
        skews_s=(0.0, 86_400.0),
        jobs=(saves,),
        members=((0, 1),),
        is_careless=(False,),
        starts_s=(0.0,),
        has_reader=False,
    )


def test_publishers_killed_at_random_calls_reach_the_same_checkpoints() -> None:
    """I10."""
    kills = 0
    for seed in SEEDS:
        plain = run_seed(seed, plan=simple_plan(seed, "quiet"))
        killed = run_seed(seed, plan=simple_plan(seed, "publishers"))
        kills += killed.faults
        assert killed.committed == plain.committed, seed
        assert killed.pointers == plain.pointers, seed
    assert kills > len(SEEDS)


def test_the_plans_differ_only_in_what_goes_wrong() -> None:
    one, other = simple_plan(1, "quiet"), simple_plan(1, "publishers")
    assert dataclasses.replace(one, profile="publishers") == other
