"""Incarnations that come and go: whose FENCE counts, and what silence says of a revision."""

from __future__ import annotations

import json

from tests.engine_harness import JOB, Cluster, StagedNode

from ckptgate.engine.incarnations import OVER
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import BEGAN_META, WRITERS_META, AttemptRow
from ckptgate.testing.faults import FaultPlan, FaultyStore

NEXT_JOB = "run:job-2"
NAMES = {"model-0.json": b'{"a": 0}', "model-1.json": b'{"a": 1}'}


def save(node: StagedNode, name: str, job: str = JOB) -> AttemptRow:
    row = node.begin(name, job=job)
    for path, data in NAMES.items():
        node.write(row, path, data)
    node.commit(row, is_all=True)
    return row


def note(node: StagedNode, row: AttemptRow, generation: int, writer: tuple[int, int]) -> None:
    """What the mount records: what was known at the begin, and who wrote."""
    node.raw.set_meta(BEGAN_META.format(attempt=row.id), str(generation))
    node.raw.set_meta(WRITERS_META.format(attempt=row.id), json.dumps([writer]))


def test_what_a_job_had_finished_is_sealed_before_the_next_one_of_its_node_is_introduced(
    cluster: Cluster,
) -> None:
    """I12: a store that was away must not cost the checkpoint that was whole before."""
    plan = FaultPlan(at=1, is_lasting=True)
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    old = save(node, "step-1")
    new = save(node, "step-2", NEXT_JOB)
    cluster.settle(rounds=3)
    plan.end()
    cluster.settle(rounds=200)
    assert node.fresh(old).state is AttemptState.COMMITTED
    assert node.fresh(new).state is AttemptState.COMMITTED
    assert cluster.state().fences == {JOB: 1, NEXT_JOB: 2}


def test_an_incarnation_that_was_over_before_it_could_be_registered_fences_nobody_off(
    cluster: Cluster,
) -> None:
    """I12: else a gateway that comes back would end who goes on, for ever."""
    late, other = cluster.node("a"), cluster.node("b")
    late.membership._incarnations._is_alive = lambda _pid, _start: False
    row = save(late, "step-1")
    note(late, row, 0, (42, 7))
    save(other, "step-2", NEXT_JOB)
    cluster.settle(other)
    cluster.settle()
    assert late.fresh(row).state is AttemptState.SEALED, "another node may register it"
    assert late.fresh(row).reason == OVER
    cluster.settle(tick_s=cluster.settings.abandon_after_s / 3)
    assert late.fresh(row).state is AttemptState.ABANDONED
    assert late.fresh(row).reason.endswith(OVER)
    assert "abandoned" in late.kinds()
    assert cluster.state().fences == {NEXT_JOB: 1}
    assert save(other, "step-3", NEXT_JOB).name == "step-3"
    cluster.settle()
    assert sorted(cluster.state().current) == ["step-2", "step-3"]


def test_a_node_whose_processes_are_gone_joins_once_another_node_registers_their_job(
    cluster: Cluster,
) -> None:
    """I12: the job that was registered meanwhile was the older one, by a node that was slow."""
    done, slow = cluster.node("a"), cluster.node("b")
    done.membership._incarnations._is_alive = lambda _pid, _start: False
    row = done.begin("step-2", job=NEXT_JOB)
    done.write(row, "model-0.json", NAMES["model-0.json"], rank=0)
    done.commit(row, rank=0, world=2)
    note(done, row, 0, (42, 7))
    save(slow, "step-1")
    cluster.settle(slow)
    cluster.settle(done, rounds=20)
    assert not done.fresh(row).is_joined
    rest = slow.begin("step-2", job=NEXT_JOB)
    slow.write(rest, "model-1.json", NAMES["model-1.json"], rank=1)
    slow.commit(rest, rank=1, world=2)
    cluster.settle()
    assert done.fresh(row).state is slow.fresh(rest).state is AttemptState.COMMITTED
    assert done.fresh(row).reason == ""
    assert cluster.state().fences == {JOB: 1, NEXT_JOB: 2}
    assert cluster.files("step-2") == NAMES


def test_an_incarnation_with_a_live_process_is_registered_however_late(cluster: Cluster) -> None:
    late, other = cluster.node("a"), cluster.node("b")
    late.membership._incarnations._is_alive = lambda pid, start: (pid, start) == (42, 7)
    row = save(late, "step-1")
    note(late, row, 0, (42, 7))
    save(other, "step-2", NEXT_JOB)
    cluster.settle(other)
    cluster.settle()
    assert late.fresh(row).state is AttemptState.COMMITTED
    assert cluster.state().fences == {NEXT_JOB: 1, JOB: 2}


def test_an_incarnation_that_is_over_is_registered_where_no_other_began_since(
    cluster: Cluster,
) -> None:
    node = cluster.node("a")
    node.membership._incarnations._is_alive = lambda _pid, _start: False
    row = save(node, "step-1")
    note(node, row, 0, (42, 7))
    cluster.settle()
    assert node.fresh(row).state is AttemptState.COMMITTED


def revise(cluster: Cluster, *paths: str) -> AttemptRow:
    """A committed checkpoint, these paths of which a job writes anew; then silence."""
    node = cluster.node("a")
    base = save(node, "step-1")
    cluster.settle()
    row = node.begin("step-1", base=node.fresh(base))
    for path in paths:
        node.write(row, path, b'{"b": 2}')
    cluster.clock.advance(31)
    cluster.settle(rounds=20)
    return node.fresh(row)


def test_silence_does_not_seal_a_revision_that_a_job_has_half_written_anew(
    cluster: Cluster,
) -> None:
    """I8: new shards beside those of the checkpoint before."""
    row = revise(cluster, "model-0.json")
    assert row.state is AttemptState.OPEN
    assert any("'model-1.json' written anew" in line for line in row.missing)


def test_silence_seals_a_revision_that_a_job_has_written_anew_as_a_whole(
    cluster: Cluster,
) -> None:
    assert revise(cluster, *NAMES).state is AttemptState.COMMITTED
