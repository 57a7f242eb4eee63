"""Every store call of joining, sharing and reading fails once, in every way.

I6, I7, I10: the nodes end up in one attempt, under one FENCE, with one tree, as without the fault.
"""

from __future__ import annotations

from itertools import count

import pytest
from tests.unit.engine.kit import JOB, Node

from ckptgate.errors import TransientStoreError
from ckptgate.model.entries import Fence
from ckptgate.model.layout import attempts_prefix
from ckptgate.ports.spool import ROOT_INO, NameOpRow
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.sqlite_spool import SqliteSpool

pytestmark = pytest.mark.slow


def again(call, plan=None, tries=6):
    """Repeat what is unknown."""
    for _ in range(tries):
        try:
            return call()
        except TransientStoreError:
            if plan is not None:
                plan.land()
    pytest.fail("never resolved")


def make_nodes(store, path, hosts, made):
    """Nodes on *store*; a host's spool is made once, each run in it is another."""
    nodes = [Node(store, path, host, spool=made.get(host)) for host in hosts]
    made.update({node.host: node.spool for node in nodes})
    return nodes


@pytest.fixture
def made():
    """The spools by host, closed at the end."""
    spools: dict[str, SqliteSpool] = {}
    yield spools
    for spool in spools.values():
        spool.close()


def join_and_share(nodes, plan, run="run"):
    """Two nodes join, one makes a directory, the other stages a file in it."""
    a, b = nodes
    rows = []
    for node in nodes:
        begun = node.spool.attempts(run=run, name="step-1")
        row = begun[0] if begun else node.begin("step-1", run=run)
        rows.append(again(lambda node=node, row=row: node.membership.join(row), plan))
    row_a, row_b = rows
    if not a.spool.child(row_a.root, "d") and not a.spool.name_ops(row_a.id):
        a.spool.add_name_op(
            NameOpRow(id=0, attempt=row_a.id, op="mkdir", path="d", to="", mode=0o755)
        )
    again(lambda: a.membership.send_name_ops(row_a), plan)
    again(lambda: b.catalog.refresh_shared(row_b.id), plan)
    return row_a, row_b


def check_joined(store, nodes, rows, run):
    a, b = nodes
    row_a, row_b = rows
    assert row_a.attempt == row_b.attempt == "step-1.0"
    assert store.children(attempts_prefix(run)) == ["step-1.0"]
    state = a.logs.get(run).refresh()
    assert state.length == 1
    assert state.fences == {JOB: 1}
    assert set(a.membership.members(run, "step-1.0")) == {a.member, b.member}
    assert b.paths(row_b) == {"d": "dir"}


def finish(nodes, rows):
    (a, b), (row_a, row_b) = nodes, rows
    b.stage(row_b, "d/x", b"bytes of b")
    a.seal(row_a)
    for node, row in zip(nodes, rows, strict=True):
        node.vote(row)
    a.close(row_a)
    a.commit(row_a)


@pytest.mark.parametrize("when", ["before", "after", "both", "delay"])
def test_nodes_join_one_attempt_whatever_fails(when, tmp_path, made):
    for at in count(1):
        store, plan = MemoryStore(), FaultPlan(at=at, when=when)
        nodes, run = make_nodes(FaultyStore(store, plan), tmp_path, "ab", made), f"run{at}"
        rows = join_and_share(nodes, plan, run)
        plan.land()
        is_over = plan.count < at
        plan.end()
        check_joined(store, nodes, rows, run)
        if is_over:
            assert at > 15
            return


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_while_joining_and_a_restart_join_the_same(when, tmp_path, made):
    """I10."""
    for at in count(1):
        store, plan = MemoryStore(), FaultPlan(at=at, when=when, error=CrashError)
        nodes, run = make_nodes(FaultyStore(store, plan), tmp_path, "ab", made), f"run{at}"
        try:
            rows = join_and_share(nodes, plan, run)
        except CrashError:
            nodes = [node.with_store(store) for node in nodes]
            rows = join_and_share(nodes, plan, run)
        is_over = plan.count < at
        plan.end()
        check_joined(store, nodes, rows, run)
        if is_over:
            assert at > 15
            return


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_reader_sees_the_whole_checkpoint_or_an_error(when, is_lasting, tmp_path, made):
    """I8."""
    store = MemoryStore()
    nodes = make_nodes(store, tmp_path, "ab", made)
    rows = join_and_share(nodes, FaultPlan(at=0))
    finish(nodes, rows)
    for at in count(1):
        plan = FaultPlan(at=at, when=when, is_lasting=is_lasting)
        reader = Node(FaultyStore(store, plan), tmp_path / str(at), "reader")
        run_ino = reader.directory(ROOT_INO, "run")

        def materialise(reader=reader, run_ino=run_ino):
            found = reader.catalog.materialise("run", run_ino, "step-1")
            reader.catalog.fill(found.id)
            return found

        try:
            row = materialise()
            data = reader.read(row, "d/x")
        except TransientStoreError:
            committed = reader.spool.attempts(run="run")
            trees = [len(reader.spool.tree(r.id)) for r in committed if not r.is_root_only]
            assert all(size == 2 for size in trees)
            plan.end()
            row = materialise()
            data = reader.read(row, "d/x")
        assert reader.paths(row) == {"d": "dir", "d/x": "file"}
        assert data == b"bytes of b"
        reader.spool.close()
        if plan.count < at:
            return


def test_a_fence_in_doubt_is_not_written_twice(tmp_path, made):
    """I6: another incarnation may start while ours doesn't know."""
    store = MemoryStore()
    plan = FaultPlan(at=1, when="delay", is_lasting=True, calls=frozenset({"create"}))
    (node,) = make_nodes(FaultyStore(store, plan), tmp_path, "a", made)
    row = node.begin("step-1")
    with pytest.raises(TransientStoreError):
        node.membership.join(row)
    (other,) = make_nodes(store, tmp_path, "b", made)
    other.logs.get("run").append(lambda s: Fence(generation=s.generation + 1, job_key="run:x"))
    plan.end()
    plan.land()
    assert node.membership.join(row).generation == 2
    state = other.logs.get("run").refresh()
    assert state.fences == {"run:x": 1, JOB: 2}
