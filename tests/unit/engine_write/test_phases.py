"""Phases of saves, progress of their ranks, and what is counted of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.engine_harness import Cluster, StagedNode

from ckptgate.engine.attempt_status import AttemptStatus, Reader
from ckptgate.engine.phases import FINISHED_MAX
from ckptgate.engine.status import status, step_of
from ckptgate.model.states import AttemptState
from ckptgate.ports.meters import (
    COMMITTED_BYTES,
    DIGESTED_BYTES,
    PHASE_SECONDS,
    PHASES,
    SAVES,
    UPLOAD_ERRORS,
    UPLOADED_BYTES,
    UPLOADED_FILES,
)
from ckptgate.ports.rows import PHASES_META, SavePhases
from ckptgate.ports.spool import AttemptRow
from ckptgate.testing.faults import FaultPlan, FaultyStore


def shown(node: StagedNode, name: str) -> AttemptStatus:
    reader = Reader(spool=node.raw, membership=node.membership, progress=node.publisher.progress)
    report = status(node.raw, node.logs, node.events, reader=reader)
    json.dumps(report.to_json())
    return next(row for row in report.attempts if row.name == name)


def save(node: StagedNode, name: str, size: int = 10) -> AttemptRow:
    row = node.begin(name)
    node.write(row, "a.txt", b"x" * size, rank=0)
    node.commit(row)
    return row


def test_each_phase_is_what_it_adds_to_the_save(cluster: Cluster):
    node = cluster.node("a")
    row = node.begin("step-1")
    node.write(row, "a.txt", b"x" * 100, rank=0)
    cluster.clock.advance(30)
    node.commit(row)
    cluster.clock.advance(5)
    cluster.settle(tick_s=0.5)
    found = shown(node, "step-1")
    assert list(found.phases) == list(PHASES)
    assert found.phases["staging"] >= 30
    assert found.committed_at
    total = sum(found.phases.values())
    kept = SavePhases.parse(node.raw.get_meta(PHASES_META.format(attempt=row.id)))
    assert total == pytest.approx((kept.committed_ns - row.created_ns) / 1e9)
    assert (kept.files, kept.size) == (1, 100)
    assert {label for _, label in node.meters.observed} == set(PHASES)
    assert all(name == PHASE_SECONDS.name for name, _ in node.meters.observed)


def test_a_publisher_that_is_started_anew_goes_on_with_the_phases(cluster: Cluster):
    """I10."""
    node = cluster.node("a")
    row = save(node, "step-1")
    for _ in range(60):
        node.step()
        cluster.clock.advance(1)
        node = cluster.node("a")
    found = shown(node, "step-1")
    assert found.state == "committed"
    assert list(found.phases) == list(PHASES)
    assert node.raw.attempt(row.id) is not None


def test_a_clock_that_was_set_back_makes_no_negative_time():
    phases = SavePhases(staged_ns=5, digested_ns=3, stored_ns=9, voted_ns=9, committed_ns=1)
    assert phases.seconds(7) == {
        "staging": 0, "digest": 0, "upload": pytest.approx(2e-9), "vote": 0, "commit": 0,
    }  # fmt: skip
    assert SavePhases(digested_ns=3).seconds(1) == {}
    assert SavePhases.parse("{") == SavePhases.parse(None) == SavePhases()


def test_saves_and_bytes_are_counted_by_how_they_end(cluster: Cluster):
    node = cluster.node("a")
    save(node, "step-1", 100)
    given_up = node.begin("step-2")
    node.write(given_up, "a.txt", b"x", rank=0)
    cluster.settle()
    node.publisher.request_abort(given_up.id, "enough")
    cluster.settle()
    counted = node.meters.counted
    assert counted[SAVES.name, "committed"] == 1
    assert counted[SAVES.name, "aborted"] + counted[SAVES.name, "abandoned"] == 1
    assert counted[COMMITTED_BYTES.name, ""] == 100
    assert counted[DIGESTED_BYTES.name, ""] == counted[UPLOADED_BYTES.name, ""] == 101
    assert counted[UPLOADED_FILES.name, ""] == 2


def test_failed_uploads_are_counted_by_kind(cluster: Cluster):
    plan = FaultPlan(at=1, calls=frozenset({"put", "put_all"}))
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    save(node, "step-1")
    for _ in range(10):
        node.step()
        cluster.clock.advance(1)
    assert node.meters.counted[UPLOAD_ERRORS.name, "transient-store"] >= 1
    assert node.meters.counted[UPLOAD_ERRORS.name, "other"] == 0


def test_each_rank_s_progress_is_told(cluster: Cluster):
    node = cluster.node("a")
    row = node.begin("step-1", world_size=4)
    node.write(row, "r0.txt", b"x" * 10, rank=0)
    node.write(row, "r1.txt", b"y" * 20, rank=1, is_open=True)
    node.write(row, "who.txt", b"z" * 5)
    node.commit(row, 0, 4)
    cluster.settle()
    found = shown(node, "step-1")
    ranks = {it.rank: it for it in found.ranks}
    assert set(ranks) == {-1, 0, 1}
    assert (ranks[0].staged_bytes, ranks[0].stored_bytes, ranks[0].committed) == (10, 10, True)
    assert (ranks[1].stored_bytes, ranks[1].committed, ranks[1].voted) == (0, False, False)
    assert ranks[-1].files == 1
    assert found.world_size == 4
    assert (found.digested_bytes, found.stored_bytes) == (15, 15)


def test_files_that_other_members_staged_are_theirs_to_tell(cluster: Cluster):
    one, two = cluster.node("a"), cluster.node("b")
    row = one.begin("step-1", world_size=2)
    one.write(row, "r0.txt", b"x" * 10, rank=0)
    other = two.begin("step-1", world_size=2)
    two.write(other, "r1.txt", b"y" * 20, rank=1)
    one.commit(row, 0, 2)
    cluster.settle()
    assert [it.rank for it in shown(one, "step-1").ranks] == [0]
    assert shown(two, "step-1").size_bytes == 20


def test_the_nodes_that_have_not_voted_are_named(cluster: Cluster):
    one, two = cluster.node("a"), cluster.node("b")
    rows = [node.begin("step-1", world_size=2) for node in (one, two)]
    one.write(rows[0], "r0.txt", b"x" * 10, rank=0)
    two.write(rows[1], "r1.txt", b"y" * 10, rank=1, is_open=True)
    cluster.settle(rounds=4)
    one.event(one.raw.attempt(rows[0].id) or rows[0], "format", ".metadata")
    cluster.settle(rounds=12)
    members = {it.member: it.voted for it in shown(one, "step-1").members}
    assert members == {one.member: True, two.member: False}


def test_pace_and_time_left_come_from_what_was_stored_lately(cluster: Cluster):
    progress = cluster.node("a").publisher.progress
    assert progress.rate("run", "s.0") is None
    began_s = cluster.clock.monotonic()
    cluster.clock.advance(10)
    progress.stored("run", "s.0", 1000, began_s=began_s)
    assert progress.rate("run", "s.0") == pytest.approx(100)
    cluster.clock.advance(10)
    assert progress.rate("run", "s.0") == pytest.approx(50)
    cluster.clock.advance(61)
    assert progress.rate("run", "s.0") is None
    for number in range(500):
        progress.stored("run", f"t.{number}", 1, began_s=0)
    assert progress.rate("run", "s.0") is None


def test_only_the_last_saves_keep_their_phases(cluster: Cluster):
    node = cluster.node("a")
    for step in range(FINISHED_MAX + 5):
        save(node, f"step-{step}")
        cluster.settle(rounds=12)
    kept = [
        row.id
        for row in node.raw.attempts()
        if node.raw.get_meta(PHASES_META.format(attempt=row.id))
    ]
    assert 0 < len(kept) <= FINISHED_MAX + 1
    report = status(node.raw, node.logs, node.events)
    assert all(row.phases for row in report.attempts[-FINISHED_MAX + 1 :])


def test_what_is_decided_is_read_once(cluster: Cluster, monkeypatch):
    node = cluster.node("a")
    save(node, "step-1")
    cluster.settle()
    reader = Reader(spool=node.raw, membership=node.membership)
    (row,) = node.raw.attempts()
    first = reader.read([row])
    monkeypatch.setattr(type(node.raw), "count_files", None)
    assert reader.read([row]) == first
    other = node.raw.update_attempt(row.id, state=AttemptState.REPLACED)
    monkeypatch.undo()
    assert reader.read([other])[0].state == "replaced"
    assert replace(first[0], state="replaced") == reader.read([other])[0]


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-100", 100), ("ep1-ba200", 200), ("iter_0000300", 300), ("latest", None), ("", None),
     ("step-" + "9" * 16, None), ("step-\u0661", None)],
)  # fmt: skip
def test_a_step_is_the_last_number_of_a_name(name: str, step: int | None):
    assert step_of(name) == step
