"""Reclaiming that fails, dies or is overtaken at every possible place: nothing needed ever goes."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine_harness import RUN, Cluster, StagedNode
from tests.fault.test_engine_faults import DyingSpool

from ckptgate.errors import CkptError
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import AttemptRow, Spool, TombstoneRow
from ckptgate.testing.clock import ManualClock
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore

STRIDES = [pytest.param(1, marks=pytest.mark.full, id="all"), pytest.param(13, id="some")]
FILES = {"kept.txt": b"k" * 100, "dropped.txt": b"d" * 100}


def save(
    cluster: Cluster, node: StagedNode, name: str, files: dict[str, bytes], base: Any = None
) -> AttemptRow:
    row = node.begin(name, base=base)
    for path, data in files.items():
        node.write(row, path, data, rank=0)
    node.commit(row)
    for _ in range(40):
        node.step()
        cluster.clock.advance(0.5)
        if node.fresh(row).state is AttemptState.COMMITTED:
            view = cluster.state().attempts[node.fresh(row).attempt]
            if view.is_published:
                return node.fresh(row)
    raise AssertionError(node.fresh(row))


@dataclass
class Template:
    """A run with something of every kind that goes, and what needs the rest of it."""

    tmp: Path
    store: MemoryStore
    elapsed_s: float
    begun: int

    @classmethod
    def make(cls, tmp: Path) -> Template:
        store = MemoryStore()
        cluster = Cluster(tmp, store=store)
        a, b = cluster.node("a"), cluster.node("b")
        first = save(cluster, a, "step-1", FILES)
        second = save(cluster, a, "step-1", {"dropped.txt": b"new"}, base=first)
        save(cluster, a, "step-2", {"w.txt": b"deleted"})
        save(cluster, a, "step-3", {"w.txt": b"old"})
        save(cluster, a, "step-3", {"w.txt": b"new"})
        gone = a.begin("step-4")
        a.write(gone, "w.txt", b"given up", rank=0)
        for _ in range(4):
            a.step()
        a.publisher.request_abort(gone.id, "test")
        tomb = TombstoneRow(id=0, run=RUN, name="step-2", attempt="step-2.0", job_key="run:job-1")
        a.raw.add_tombstone(tomb)
        # A revision that is committed while the others are reclaimed.
        begun = a.begin("step-1", base=second)
        a.write(begun, "more.txt", b"more", rank=0)
        b.directory()
        for _ in range(4):
            a.step()
            cluster.clock.advance(1.0)
        elapsed_s = cluster.clock.monotonic()
        cluster.close()
        return cls(tmp, store, elapsed_s, begun.id)

    def copy(self, tmp: Path) -> Cluster:
        """A world of its own in the same state."""
        shutil.copytree(self.tmp / "spool-a", tmp / "spool-a")
        store = MemoryStore()
        store._nodes.update(self.store._nodes)
        clock = ManualClock()
        clock.advance(self.elapsed_s)
        return Cluster(tmp, store=store, clock=clock)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template.make(tmp_path_factory.mktemp("template") / "t")


@pytest.fixture(scope="module")
def reference(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cluster = template.copy(tmp_path_factory.mktemp("reference") / "t")
    sweep(cluster.node("a"))
    found = end(cluster)
    cluster.close()
    return found


def sweep(node: StagedNode) -> None:
    node.publisher.sweep(None, grace_s=0.0)


def end(cluster: Cluster) -> Any:
    """What is left after a restart and a whole round: keys in the store, rows in the spool."""
    node = cluster.node("a")
    sweep(node)
    cluster.check_invariants()
    store = cluster.store
    assert isinstance(store, MemoryStore)
    keys = [key for key in MemoryStore.keys(store) if "/log/" not in key]
    rows = [(row.attempt, str(row.state), node.tree(row)) for row in node.raw.attempts()]
    node.raw.finish_removals()
    assert node.raw.stray_files() == []
    return keys, rows


def each(tmp: Path, template: Template, stride: int, run: Callable[[Cluster, int], bool]) -> int:
    """*run* with n = 1, 2, ... in a copy each, until it says that there was no n-th place.

    Only some n, others each time, where the whole matrix isn't asked for.
    """
    for at in range(1 + int(time.time()) % stride, 400, stride):
        cluster = template.copy(tmp / str(at))
        try:
            if not run(cluster, at):
                return at
        finally:
            cluster.close()
    pytest.fail("it never ended")


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [None, CrashError], ids=["no reply", "dies"])
def test_any_store_call_may_fail_or_be_the_last(
    tmp_path: Path, template: Template, reference: Any, stride: int, when: Any, error: Any
) -> None:
    """I9, I10: for every n; the next round comes to the same end."""

    def run(cluster: Cluster, at: int) -> bool:
        plan = FaultPlan(at=at, when=when, error=error)
        node = cluster.node("a", store=FaultyStore(cluster.store, plan))
        with contextlib.suppress(CrashError, CkptError):
            sweep(node)
        cluster.check_invariants()
        assert end(cluster) == reference, (at, plan.failed)
        return plan.is_spent

    assert each(tmp_path, template, stride, run) > 30


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("is_before", [True, False], ids=["rolled-back", "committed"])
def test_the_process_may_die_at_any_transaction_of_its_spool(
    tmp_path: Path, template: Template, reference: Any, stride: int, is_before: bool
) -> None:
    """I9, I10: what is dropped in pieces is dropped whole in the end."""

    def run(cluster: Cluster, at: int) -> bool:
        dying: list[DyingSpool] = []

        def wrap(spool: Spool) -> Any:
            dying.append(DyingSpool(spool, 0, is_before=is_before))
            return dying[-1]

        node = cluster.node("a", wrap=wrap)
        dying[0]._at = dying[0].count + at
        with contextlib.suppress(CrashError):
            sweep(node)
        is_spent = dying[0].count >= dying[0]._at
        cluster.check_invariants()
        assert end(cluster) == reference, at
        return is_spent

    assert each(tmp_path, template, stride, run) > 5


class Overtaken:
    """A store before whose n-th call something else happens."""

    def __init__(self, store: Any, at: int, other: Callable[[], object]) -> None:
        self._store = store
        self._at = at
        self._other = other
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not callable(real) or name == "lock_run":
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._at:
                self._other()
            return real(*args, **kwargs)

        return call


def commit_begun(cluster: Cluster, node: StagedNode, template: Template) -> None:
    """The revision that was under way is committed and published."""
    row = node.raw.attempt(template.begun)
    assert row is not None
    if row.state is AttemptState.OPEN:
        node.commit(row)
    for _ in range(60):
        with contextlib.suppress(CkptError):
            node.step()
        cluster.clock.advance(0.5)
        now = node.raw.attempt(template.begun)
        if now is None or now.state not in {AttemptState.OPEN, AttemptState.SEALED}:
            view = cluster.state().attempts["step-1.2"]
            if view.is_published or (view.decision_index >= 0 and not view.manifest):
                return


def files_after(cluster: Cluster) -> dict[str, bytes]:
    return cluster.files("step-1")


WHOLE = {"kept.txt": b"k" * 100, "dropped.txt": b"new", "more.txt": b"more"}


@pytest.mark.parametrize("stride", STRIDES)
def test_a_publisher_commits_at_any_moment_of_another_gateway_s_round(
    tmp_path: Path, template: Template, stride: int
) -> None:
    """I1, I9: before every store call of the round; twice, as by two gateways at once."""

    def run(cluster: Cluster, at: int) -> bool:
        a = cluster.node("a")
        third = cluster.node("c")
        third.directory()

        def other() -> None:
            commit_begun(cluster, a, template)
            sweep(third)
            cluster.check_invariants()

        slow = Overtaken(cluster.store, at, other)
        b = cluster.node("b", store=slow)
        b.directory()
        slow.count = 0
        sweep(b)
        cluster.check_invariants()
        assert files_after(cluster) in (WHOLE, {**FILES, "dropped.txt": b"new"})
        if slow.count >= at:
            assert files_after(cluster) == WHOLE
        return slow.count >= at

    assert each(tmp_path, template, stride, run) > 20


@pytest.mark.parametrize("stride", STRIDES)
def test_a_round_happens_at_any_moment_of_a_commit(
    tmp_path: Path, template: Template, stride: int
) -> None:
    """I1, I9, I12: another gateway reclaims before every store call of the committing publisher."""

    def run(cluster: Cluster, at: int) -> bool:
        b = cluster.node("b")
        b.directory()
        slow = Overtaken(cluster.store, at, lambda: sweep(b))
        a = cluster.node("a", store=slow)
        slow.count = 0
        commit_begun(cluster, a, template)
        cluster.check_invariants()
        assert files_after(cluster) == WHOLE
        return slow.count >= at

    assert each(tmp_path, template, stride, run) > 20
