"""A two-node save with one fault at every possible place: the end is always the same (I10).

The reference is the run without a fault. Ids and times differ, so what is compared is what people
and trainers see: committed files, pointers, the spools' trees and states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_harness import RUN, Cluster, StagedNode, outcome

from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import Spool
from ckptgate.testing.faults import MUTATIONS, CrashError, FaultPlan, FaultyStore


def stage(a: StagedNode, b: StagedNode) -> None:
    """Two ranks save step-1, each on its node, and rank 0 points `latest` at it."""
    for rank, node in enumerate((a, b)):
        row = node.begin("step-1")
        node.write(row, f"shard-{rank}.txt", b"%d" % rank * 100, rank=rank)
        node.write(row, f"sub/state-{rank}.json", b"{}", rank=rank)
        node.commit(row, rank, 2)
    a.point("latest", "step-1", content="step-1\n")


def finish(cluster: Cluster) -> dict[str, Any]:
    """Restart every node on the healthy store and let them finish."""
    for host in ("a", "b"):
        cluster.node(host)
    cluster.settle(rounds=150)
    cluster.check_invariants()
    for node in cluster.nodes.values():
        assert not node.raw.attempts(states=UNDECIDED), [
            (row.state, row.missing, row.reason) for row in node.raw.attempts(states=UNDECIDED)
        ]
    return outcome(cluster)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cluster = Cluster(tmp_path_factory.mktemp("reference"))
    stage(cluster.node("a"), cluster.node("b"))
    cluster.settle()
    found = finish(cluster)
    cluster.close()
    assert set(found["committed"]) == {"step-1"}
    assert found["pointers"] == {"latest": ("step-1", "step-1\n")}
    return found


def places() -> Iterator[int]:
    yield from range(1, 400)


@pytest.mark.parametrize("when", ["before", "after"])
def test_any_store_call_may_fail(tmp_path: Path, reference: dict[str, Any], when: Any) -> None:
    """I1, I3, I10: a lost request or a lost reply of the n-th change, for every n."""
    for at in places():
        cluster = Cluster(tmp_path / str(at))
        cluster.tmp.mkdir()
        plan = FaultPlan(at=at, when=when, calls=MUTATIONS)
        faulty = FaultyStore(cluster.store, plan)
        stage(cluster.node("a", store=faulty), cluster.node("b", store=faulty))
        cluster.settle(rounds=100)
        assert finish(cluster) == reference, (at, plan.failed)
        cluster.close()
        if not plan.is_spent:
            return
    pytest.fail("the run never ended")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_process_may_die_in_any_store_call(
    tmp_path: Path, reference: dict[str, Any], when: Any
) -> None:
    """I10, I11: kill -9 of the first node in its n-th change, for every n."""
    for at in places():
        cluster = Cluster(tmp_path / str(at))
        cluster.tmp.mkdir()
        plan = FaultPlan(at=at, when=when, calls=MUTATIONS, error=CrashError)
        a = cluster.node("a", store=FaultyStore(cluster.store, plan))
        b = cluster.node("b")
        stage(a, b)
        for _ in range(60):
            with contextlib.suppress(CrashError):
                a.step()
            b.step()
            cluster.clock.advance(1.0)
            if plan.is_spent:
                break
        assert finish(cluster) == reference, (at, plan.failed)
        cluster.close()
        if not plan.is_spent:
            return
    pytest.fail("the run never ended")


def test_any_question_to_the_store_may_stay_unanswered(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """I10, I12: every fifth call of any kind gets no reply, each in a run of its own."""
    for at in range(2, 1000, 5):
        cluster = Cluster(tmp_path / str(at))
        cluster.tmp.mkdir()
        plan = FaultPlan(at=at)
        faulty = FaultyStore(cluster.store, plan)
        stage(cluster.node("a", store=faulty), cluster.node("b", store=faulty))
        for _ in range(60):
            moved = [node.step() for node in cluster.nodes.values()]
            cluster.clock.advance(1.0)
            if not any(moved) and "step-1" in cluster.state().current:
                break
        assert outcome(cluster) == reference, (at, plan.failed)
        cluster.close()
        if not plan.is_spent:
            return
    pytest.fail("the run never ended")


def test_both_processes_may_die_between_any_two_steps(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """I10: the next step follows from what is recorded, never from a variable."""
    for steps in range(40):
        cluster = Cluster(tmp_path / str(steps))
        cluster.tmp.mkdir()
        stage(cluster.node("a"), cluster.node("b"))
        did = True
        for _ in range(steps):
            moved = [node.step() for node in cluster.nodes.values()]
            did = any(moved)
            cluster.clock.advance(1.0)
        assert finish(cluster) == reference, steps
        cluster.close()
        if not did:
            return


class DyingSpool:
    """A spool whose process dies at the end of its n-th outermost transaction."""

    def __init__(self, spool: Spool, at: int, *, is_before: bool) -> None:
        self._spool = spool
        self._at = at
        self._is_before = is_before
        self._depth = 0
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        if 0 < self._at <= self.count:
            raise CrashError
        return getattr(self._spool, name)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        if 0 < self._at <= self.count:
            raise CrashError
        self._depth += 1
        try:
            with self._spool.transaction():
                yield
                if self._depth == 1 and self._is_before and self.count + 1 == self._at:
                    self.count += 1
                    raise CrashError
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.count += 1
            if self.count == self._at:
                raise CrashError


@pytest.mark.parametrize("is_before", [True, False], ids=["rolled-back", "committed"])
def test_the_process_may_die_at_any_transaction_of_its_spool(
    tmp_path: Path, reference: dict[str, Any], is_before: bool
) -> None:
    """I10, I11: what a committed transaction wrote is there, what was not isn't."""
    for at in places():
        cluster = Cluster(tmp_path / str(at))
        cluster.tmp.mkdir()
        dying: list[DyingSpool] = []

        def wrap(spool: Spool, at: int = at, dying: list[DyingSpool] = dying) -> Any:
            dying.append(DyingSpool(spool, at, is_before=is_before))
            return dying[-1]

        a, b = cluster.node("a", wrap=wrap), cluster.node("b")
        stage(a, b)
        for _ in range(60):
            with contextlib.suppress(CrashError):
                a.step()
            b.step()
            cluster.clock.advance(1.0)
            if dying[0].count >= at:
                break
        is_over = dying[0].count < at
        assert finish(cluster) == reference, at
        cluster.close()
        if is_over:
            return
    pytest.fail("the run never ended")


def test_a_store_that_is_away_for_long_costs_nothing_but_time(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """I11, I12: an outage of hours after the seal is no reason to abort."""
    for at in (1, 5, 9, 13, 17, 21, 25):
        cluster = Cluster(tmp_path / str(at))
        cluster.tmp.mkdir()
        plan = FaultPlan(at=at, is_lasting=True)
        faulty = FaultyStore(cluster.store, plan)
        stage(cluster.node("a", store=faulty), cluster.node("b", store=faulty))
        cluster.settle(rounds=30, tick_s=300.0)
        plan.end()
        cluster.settle(rounds=100)
        assert finish(cluster) == reference, (at, plan.failed[:1])
        cluster.close()


def test_an_outcome_that_was_told_never_changes(tmp_path: Path) -> None:
    """I6: a state that the spool told once is what the log says for ever."""
    cluster = Cluster(tmp_path)
    a, b = cluster.node("a"), cluster.node("b")
    stage(a, b)
    told: dict[str, AttemptState] = {}
    for _ in range(60):
        for node in (a, b):
            node.step()
            for row in node.raw.attempts(run=RUN):
                if row.state not in UNDECIDED:
                    assert told.setdefault(node.host, row.state) is row.state
                    assert cluster.state().current == {"step-1": row.attempt}
        cluster.clock.advance(1.0)
    assert set(told) == {"a", "b"}
    cluster.close()
