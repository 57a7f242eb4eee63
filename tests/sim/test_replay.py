"""One seed is one history: what makes a failing seed worth anything."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.sim.checker import Checker
from tests.sim.plans import CLOSE_DELAYS_S, plan_of
from tests.sim.simulation import SeedFailedError, run_seed

from ckptgate_adapters.sqlite_spool.noted import NotedCloses

SEEDS = (3, 5, 7, 21, 28, 34)
_PRINT = (
    "import sys; from tests.sim.simulation import run_seed\n"
    "print(*(run_seed(int(seed)).digest for seed in sys.argv[1:]))"
)


def test_the_same_seed_gives_the_same_history_whatever_python_hashes() -> None:
    found = set()
    path = os.pathsep.join(sys.path)
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT, *map(str, SEEDS)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == len(SEEDS)


def test_a_seed_whose_own_faults_are_named_is_the_same() -> None:
    """What a failure prints names both, and faults may also be others than the seed's own."""
    assert plan_of(7, profile=plan_of(7).profile) == plan_of(7)
    assert run_seed(7, profile=plan_of(7).profile).digest == run_seed(7).digest
    assert plan_of(7, profile="calm") == replace(plan_of(7), profile="calm")


def test_seeds_differ_in_faults_machines_jobs_and_clocks() -> None:
    plans = [plan_of(seed) for seed in range(300)]
    assert len({plan.profile for plan in plans}) == 9
    assert {plan.hosts for plan in plans} == {1, 2, 3}
    assert {len(plan.jobs) for plan in plans} == {1, 2, 3}
    assert any(86_400.0 in plan.skews_s and -86_400.0 in plan.skews_s for plan in plans)
    assert {delay for plan in plans for delay in plan.close_delays_s} == set(CLOSE_DELAYS_S)
    verbs = {action.verb for plan in plans for job in plan.jobs for action in job}
    assert verbs == {"save", "revise", "point", "delete", "abort", "wait", "read"}


def test_closes_are_taken_over_later_where_a_plan_says_so(monkeypatch) -> None:
    noted: list[int] = []
    note = NotedCloses.note

    def counted(self: NotedCloses, fh: int, *, is_released: bool) -> bool:
        noted.append(fh)
        return note(self, fh, is_released=is_released)

    monkeypatch.setattr(NotedCloses, "note", counted)
    for delay_s in (0.0, 5.0):
        assert not noted
        run_seed(7, plan=replace(plan_of(7), close_delays_s=(delay_s,)))
    assert noted


def test_a_failure_names_its_seed_its_command_and_every_step(monkeypatch) -> None:
    def broken(self: Checker, entry: object, index: int) -> None:
        self._fail(f"I1 a test breaks record {index}")

    monkeypatch.setattr(Checker, "_take_commit", broken)
    with pytest.raises(SeedFailedError) as failed:
        run_seed(7)
    assert "seed 7 (lossy): I1 a test breaks record" in str(failed.value)
    command = "CKPTGATE_SEED=7 CKPTGATE_PROFILE=lossy pytest tests/sim/test_seeds.py -k one_seed"
    assert command in str(failed.value)
    history = "\n".join(failed.value.__notes__)
    assert "Plan(seed=7" in history
    assert "create run/.ckptgate/log/0000000000.json" in history
    assert "!!! I1 a test breaks record" in history


def test_a_seed_leaves_nothing_open() -> None:
    """Tens of thousands of them are run in one process."""
    run_seed(SEEDS[0])
    before = os.listdir("/proc/self/fd")
    for seed in SEEDS:
        run_seed(seed, profile="dying")
    assert len(os.listdir("/proc/self/fd")) <= len(before)
