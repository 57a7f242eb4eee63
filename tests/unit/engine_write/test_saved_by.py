"""How a checkpoint was saved, from ranks' records to the manifest; attempts that are given up."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path

import pytest
from tests.engine_harness import RUN, Cluster, StagedNode

from ckptgate.engine.manifests import load_manifest
from ckptgate.errors import MissingError, RefusedError
from ckptgate.model.documents import Manifest
from ckptgate.model.saving import SavedBy, SavedConflict, SavedValue
from ckptgate.model.states import AttemptState
from ckptgate.ports.recording import give_up, record_saving, savings_of
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore


def record(node: StagedNode, row, rank: int, **fields) -> None:
    record_saving(node.raw, row.id, rank=rank, record=fields)


def manifest_of(cluster: Cluster, name: str) -> Manifest:
    state = cluster.state()
    attempt = state.current[name]
    return load_manifest(cluster.store, RUN, attempt, state.attempts[attempt].manifest)


def test_the_manifest_has_what_the_ranks_of_all_nodes_recorded(cluster: Cluster) -> None:
    nodes = [cluster.node(host) for host in ("a", "b")]
    rows = [node.begin("step-1") for node in nodes]
    for rank, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        node.write(row, f"{rank}.txt", b"x", rank=rank)
        record(node, row, rank, step=1, versions={"torch": f"2.1{rank}"})
    record(nodes[1], rows[1], 2, step=1)
    cluster.settle(rounds=3)
    for rank, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        node.commit(row, rank, 2)
    cluster.settle()
    assert manifest_of(cluster, "step-1").saved_by == SavedBy(
        record={"step": 1},
        conflicts=(
            SavedConflict(
                field=("versions", "torch"),
                values=(SavedValue(value="2.10", ranks=(0,)), SavedValue(value="2.11", ranks=(1,))),
            ),
        ),
    )
    cluster.check_invariants()


def test_a_rank_s_later_record_takes_the_place_of_its_earlier_one(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1")
    for rank in (0, 1):
        record(node, row, rank, step=1)
    record(node, row, 1, step=2)
    assert [(s.ranks, s.record) for s in savings_of(node.raw, row.id)] == [
        ((0,), {"step": 1}),
        ((1,), {"step": 2}),
    ]


def test_a_revision_keeps_the_record_of_its_base_unless_it_has_its_own(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1")
    node.write(row, "a.txt", b"x")
    record(node, row, 0, step=1, data="v1")
    node.commit(row)
    cluster.settle()
    for own in (None, {"step": 1, "data": "v2"}):
        row = revision = node.begin("step-1", base=node.fresh(row))
        node.write(revision, "b.txt", repr(own).encode())
        if own is not None:
            record(node, revision, 0, **own)
        node.commit(revision)
        cluster.settle()
        saved_by = manifest_of(cluster, "step-1").saved_by
        assert saved_by == SavedBy(record=own or {"step": 1, "data": "v1"})


def test_nothing_is_recorded_once_the_final_vote_is_out_or_it_is_decided(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1")
    node.write(row, "a.txt", b"x")
    node.commit(row)
    node.raw.update_attempt(row.id, is_voted=True)
    with pytest.raises(OSError, match="record before the commit"):
        record(node, row, 0, step=1)
    node.raw.update_attempt(row.id, is_voted=False)
    cluster.settle()
    with pytest.raises(RefusedError):
        record(node, row, 0, step=1)


def test_what_a_writer_gives_up_is_aborted_for_all_members(cluster: Cluster) -> None:
    """I4: the other member's ranks have committed; nobody publishes it, and they hear of it."""
    nodes = [cluster.node(host) for host in ("a", "b")]
    rows = [node.begin("step-1") for node in nodes]
    for rank, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        node.write(row, f"{rank}.txt", b"x", rank=rank)
    nodes[0].commit(rows[0], 0, 2)
    cluster.settle(rounds=3)
    give_up(nodes[1].raw, rows[1].id, "rank 1 failed")
    nodes[1].commit(rows[1], 1, 2)
    cluster.settle()
    for node, row in zip(nodes, rows, strict=True):
        now = node.fresh(row)
        assert (now.state, now.reason) == (AttemptState.ABORTED, "rank 1 failed")
    assert "step-1" not in cluster.state().current
    again = [node.begin("step-1") for node in nodes]
    for rank, (node, row) in enumerate(zip(nodes, again, strict=True)):
        node.write(row, f"again{rank}.txt", b"y", rank=rank)
        node.commit(row, rank, 2)
    cluster.settle()
    assert cluster.files("step-1") == {"again0.txt": b"y", "again1.txt": b"y"}


def test_a_given_up_attempt_is_aborted_whatever_call_of_the_store_the_publisher_dies_at(
    tmp_path: Path,
) -> None:
    """I10"""
    for at in count(1):
        (tmp_path / str(at)).mkdir()
        cluster = Cluster(tmp_path / str(at))
        node = cluster.node("a")
        row = node.begin("step-1")
        node.write(row, "a.txt", b"x")
        node.step()
        node.commit(row)
        give_up(node.raw, row.id, "failed")
        plan = FaultPlan(at=at, error=CrashError)
        dying = cluster.node("a", store=FaultyStore(cluster.store, plan))
        with contextlib.suppress(CrashError):
            for _ in range(4):
                dying.step()
        node = cluster.node("a")
        cluster.settle()
        assert node.fresh(row).state is AttemptState.ABORTED
        assert "step-1" not in cluster.state().current
        cluster.close()
        if not plan.is_spent:
            break
    assert at > 1


def test_giving_up_what_is_committed_or_unknown_is_refused(cluster: Cluster) -> None:
    """I3"""
    node = cluster.node("a")
    row = node.begin("step-1")
    node.write(row, "a.txt", b"x")
    node.commit(row)
    cluster.settle()
    with pytest.raises(RefusedError, match="committed already"):
        give_up(node.raw, row.id, "too late")
    with pytest.raises(MissingError):
        give_up(node.raw, 99, "")
