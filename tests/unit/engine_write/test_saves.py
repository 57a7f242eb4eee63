"""Whole saves by one and two nodes, without faults: what commits, what doesn't, and who says so."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_harness import RUN, Cluster, StagedNode

from ckptgate.engine.adopt import adopt, load_manifest
from ckptgate.errors import MissingError, NotCopiedError
from ckptgate.model.documents import Manifest, Vote, decode
from ckptgate.model.entries import Abort, Commit, LogRecord, Seal
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.incidents import Severity, incident_kind
from ckptgate.model.layout import log_key, vote_key
from ckptgate.model.states import CANCELLED, AttemptState
from ckptgate.ports.meters import SAVES
from ckptgate.ports.spool import TombstoneRow
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore

SESSION = "session:a/1@2"


def entries(cluster: Cluster, kind: type) -> list:
    found: list = []
    index = 0
    while True:
        try:
            data = cluster.store.get(log_key(RUN, index))
        except MissingError:
            return found
        entry = decode(data, LogRecord, subject="log").entry
        if isinstance(entry, kind):
            found.append(entry)
        index += 1


def save(node: StagedNode, name: str, files: dict[str, bytes], *, job: str = SESSION):
    row = node.begin(name, job=job)
    for path, data in files.items():
        node.write(row, path, data, rank=0)
    node.commit(row)
    return row


def test_one_rank_commits_and_everything_is_published(cluster: Cluster) -> None:
    """I1: what is committed is in the store, byte for byte."""
    node = cluster.node("a")
    row = save(node, "step-1", {"a.txt": b"weights", "sub/b.txt": b"state"})
    cluster.settle()
    cluster.check_invariants()
    assert cluster.files("step-1") == {"a.txt": b"weights", "sub/b.txt": b"state"}
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"
    assert node.fresh(row).state is AttemptState.COMMITTED
    assert cluster.state().attempts["step-1.0"].is_published
    assert (row.run_ino, "step-1") in node.forgotten.names
    assert (row.run_ino, "latest") in node.forgotten.names


def test_without_its_plain_copies_a_checkpoint_is_published_as_any_other(
    cluster: Cluster,
) -> None:
    """I1, I13: what can't be a key keeps nothing back, and is told once."""
    said = "the key 'n...n' has 1025 bytes, S3 takes 1024 at most"

    class Short(MemoryStore):
        def publish(self, *args: Any, **words: Any) -> None:
            super().publish(*args, **words)
            raise NotCopiedError(said)

    cluster.store = Short()
    node = cluster.node("a")
    save(node, "step-1", {"a.txt": b"weights"})
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"weights"}
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"
    assert cluster.state().attempts["step-1.0"].is_published
    (told,) = [event for event in node.events.recent(9) if event.kind == "not-copied"]
    assert (told.subject, told.detail) == (f"{RUN}/step-1", said)
    cluster.check_invariants()


def test_four_ranks_of_one_node_commit_only_together(cluster: Cluster) -> None:
    """I4: no COMMIT before all ranks said so."""
    node = cluster.node("a")
    row = node.begin("step-1")
    for rank in range(4):
        node.write(row, f"r{rank}.txt", b"%d" % rank, rank=rank)
    for rank in range(3):
        node.commit(row, rank, 4)
        cluster.settle()
        assert cluster.state().current == {}
    node.commit(row, 3, 4)
    cluster.settle()
    cluster.check_invariants()
    assert sorted(cluster.files("step-1")) == [f"r{rank}.txt" for rank in range(4)]


def test_two_nodes_commit_once_both_did(cluster: Cluster) -> None:
    """I1, I2: one manifest of both members' files."""
    a, b = cluster.node("a"), cluster.node("b")
    rows = {node: node.begin("step-1") for node in (a, b)}
    a.write(rows[a], "a.txt", b"A", rank=0)
    a.commit(rows[a], 0, 2)
    cluster.settle()
    assert cluster.state().current == {}
    b.write(rows[b], "b.txt", b"B", rank=1)
    b.commit(rows[b], 1, 2)
    cluster.settle()
    cluster.check_invariants()
    assert cluster.files("step-1") == {"a.txt": b"A", "b.txt": b"B"}
    for node in (a, b):
        row = node.fresh(rows[node])
        assert row.state is AttemptState.COMMITTED
        assert sorted(node.tree(row)) == ["a.txt", "b.txt"]
    assert len(entries(cluster, Commit)) == 1


def test_a_final_vote_is_written_once(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = save(node, "step-1", {"a.txt": b"x"})
    cluster.settle()
    assert node.fresh(row).votes_count == 1
    vote = decode(
        cluster.store.get(vote_key(RUN, "step-1.0", node.member, 0)), Vote, subject="vote"
    )
    assert vote.is_final
    assert vote.committed_ranks == (0,)


def test_a_dcp_save_waits_for_the_shard_of_the_late_rank(
    cluster: Cluster, shard: bytes, dcp_metadata: bytes
) -> None:
    """I1: the event alone is not enough, the metadata names what must exist."""
    a, b = cluster.node("a"), cluster.node("b")
    row_a, row_b = a.begin("step-1"), b.begin("step-1")
    a.write(row_a, "__0_0.distcp", shard, rank=0)
    a.write(row_a, ".metadata", dcp_metadata, rank=0)
    a.event(row_a, "format", "dcp-metadata")
    late = b.write(row_b, "__1_0.distcp", shard, rank=1, is_open=True)
    cluster.settle()
    assert cluster.state().current == {}
    assert any("__1_0.distcp" in line for line in a.fresh(row_a).missing)
    assert any("open for writing" in line for line in b.fresh(row_b).missing)
    b.close_file(late)
    cluster.settle()
    cluster.check_invariants()
    assert sorted(cluster.files("step-1")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    (seal,) = entries(cluster, Seal)
    assert (seal.event, seal.detail) == ("format", "dcp-metadata")


def test_a_member_that_registers_before_the_close_is_waited_for(
    cluster: Cluster, shard: bytes, dcp_metadata: bytes
) -> None:
    """I6: what a joined member staged is in the manifest or the attempt does not commit."""
    a, b = cluster.node("a"), cluster.node("b")
    row_a = a.begin("step-1")
    for rank in (0, 1):
        a.write(row_a, f"__{rank}_0.distcp", shard, rank=rank)
    a.write(row_a, ".metadata", dcp_metadata, rank=0)
    row_b = b.begin("step-1")
    extra = b.write(row_b, "__2_0.distcp", b"", rank=2, is_open=True)
    cluster.settle()
    a.event(row_a, "format", "dcp-metadata")
    cluster.settle()
    assert cluster.state().current == {}
    b.close_file(extra)
    cluster.settle()
    cluster.check_invariants()
    assert "__2_0.distcp" in cluster.files("step-1")


def test_a_late_member_says_so_and_keeps_its_files(cluster: Cluster) -> None:
    """I3, I6: what was committed without it stays; nothing of it is lost."""
    a, b = cluster.node("a"), cluster.node("b")
    save(a, "step-1", {"a.txt": b"A"}, job="run:job-1")
    row_b = b.begin("step-1")
    b.write(row_b, "b.txt", b"B", rank=0)
    cluster.settle(a)
    assert cluster.files("step-1") == {"a.txt": b"A"}
    cluster.settle()
    row = b.fresh(row_b)
    # It came after the CLOSE: its files are a try of their own, or given up loudly.
    assert row.attempt != "step-1.0" or "late-member" in b.kinds()
    assert sorted(b.tree(row)) == ["b.txt"]
    assert cluster.files("step-1") == {"a.txt": b"A"}


def test_nobody_commits_when_a_node_dies_before_its_final_vote(cluster: Cluster) -> None:
    """I1, I3: the ABORT at the deadline names what is missing and who owes it."""
    a, b = cluster.node("a"), cluster.node("b")
    row_a, row_b = a.begin("step-1"), b.begin("step-1")
    a.write(row_a, "a.txt", b"A", rank=0)
    b.write(row_b, "b.txt", b"B", rank=1)
    cluster.settle(a, b)
    a.event(row_a, "explicit")
    for _ in range(40):
        cluster.settle(a, rounds=10, tick_s=10.0)
        if a.fresh(row_a).state is not AttemptState.SEALED:
            break
    assert a.fresh(row_a).state is AttemptState.ABORTED
    assert cluster.state().current == {}
    (abort,) = entries(cluster, Abort)
    assert any(b.member in line for line in abort.missing)
    assert "aborted" in a.kinds()
    cluster.settle()
    assert b.fresh(row_b).state is AttemptState.ABORTED
    assert sorted(b.tree(b.fresh(row_b))) == ["b.txt"]


class DiesBeforeCommit(FaultyStore):
    """The process dies when it is about to write the manifest, after the CLOSE."""

    def create(self, key: str, data: bytes) -> None:
        if "/manifest-" in key:
            raise CrashError
        super().create(key, data)


def run_until_dead(cluster: Cluster, dying: StagedNode, *others: StagedNode) -> None:
    for _ in range(30):
        try:
            dying.step()
        except CrashError:
            break
        for node in others:
            node.step()
        cluster.clock.advance(1.0)
    else:
        raise AssertionError("it did not come to the manifest")
    dying.close()
    cluster.nodes.pop(dying.host)
    assert len(cluster.state().undecided()) == 1


def test_any_survivor_finishes_after_all_votes(cluster: Cluster) -> None:
    """I10, I12: the member that sealed it is gone; the other commits and publishes."""
    a = cluster.node("a", store=DiesBeforeCommit(cluster.store, FaultPlan(at=0)))
    b = cluster.node("b")
    row_a, row_b = a.begin("step-1"), b.begin("step-1")
    a.write(row_a, "a.txt", b"A", rank=0)
    b.write(row_b, "b.txt", b"B", rank=1)
    a.commit(row_a, 0, 2)
    b.commit(row_b, 1, 2)
    run_until_dead(cluster, a, b)
    cluster.settle(b)
    cluster.check_invariants()
    assert cluster.files("step-1") == {"a.txt": b"A", "b.txt": b"B"}


def test_a_node_without_a_part_finishes_what_is_sealed(cluster: Cluster) -> None:
    """I10: from the store alone."""
    a = cluster.node("a", store=DiesBeforeCommit(cluster.store, FaultPlan(at=0)))
    c = cluster.node("c")
    save(a, "step-1", {"a.txt": b"A"}, job="run:job-1")
    c.directory()
    run_until_dead(cluster, a)
    cluster.settle(c)
    assert cluster.state().current == {"step-1": "step-1.0"}
    assert cluster.state().attempts["step-1.0"].is_published
    cluster.check_invariants()


def test_a_fence_abandons_what_an_older_incarnation_did_not_seal(cluster: Cluster) -> None:
    """I4: no SEAL of an older generation after a FENCE."""
    a, b = cluster.node("a"), cluster.node("b")
    old = a.begin("step-1", job="run:job-1")
    a.write(old, "a.txt", b"old", rank=0)
    cluster.settle()
    new = b.begin("step-1", job="run:job-2")
    b.write(new, "a.txt", b"new", rank=0)
    cluster.settle()
    a.raw.update_attempt(old.id, write_ns=cluster.clock.now_ns())
    assert a.fresh(old).state is AttemptState.ABANDONED
    b.commit(new)
    cluster.settle()
    cluster.check_invariants()
    assert cluster.files("step-1") == {"a.txt": b"new"}
    assert sorted(a.tree(a.fresh(old))) == ["a.txt"]


def test_what_was_sealed_before_the_fence_is_finished(cluster: Cluster) -> None:
    """I12: a FENCE forbids later seals, nothing else."""
    a, b = cluster.node("a"), cluster.node("b")
    old = a.begin("step-1", job="run:job-1")
    late = a.write(old, "a.txt", b"old", rank=0, is_open=True)
    cluster.settle()
    a.event(old, "explicit")
    a.raw.update_attempt(old.id, committed_all=True)
    cluster.settle()
    new = b.begin("step-2", job="run:job-2")
    b.write(new, "a.txt", b"new", rank=0)
    cluster.settle()
    a.close_file(late)
    b.commit(new)
    cluster.settle()
    cluster.check_invariants()
    assert set(cluster.state().current) == {"step-1", "step-2"}


def test_an_older_seal_of_the_same_name_is_superseded(cluster: Cluster) -> None:
    """I2, I3: one committed attempt of a name, and never back to an older one."""
    a, b = cluster.node("a"), cluster.node("b")
    old = a.begin("step-1", job="run:job-1")
    a.write(old, "a.txt", b"old", rank=0, is_open=True)
    cluster.settle()
    a.event(old, "explicit")
    a.raw.update_attempt(old.id, committed_all=True)
    cluster.settle()
    assert cluster.state().undecided() == ("step-1.0",)
    save(b, "step-1", {"a.txt": b"new"}, job="run:job-2")
    cluster.settle()
    cluster.check_invariants()
    assert cluster.files("step-1") == {"a.txt": b"new"}
    assert a.fresh(old).state is AttemptState.ABORTED
    assert "superseded" in a.fresh(old).reason


def test_a_revision_keeps_the_old_bytes_where_they_are(cluster: Cluster) -> None:
    """I9: unchanged files keep their key, and what the old attempt had stays."""
    node = cluster.node("a")
    base = save(node, "step-1", {"a.txt": b"one", "b.txt": b"two"})
    cluster.settle()
    base = node.fresh(base)
    keys = {path: file.key for path, _, file in node.raw.files_of_attempt(base.id)}
    row = node.begin("step-1", job=SESSION, base=base)
    node.write(row, "b.txt", b"TWO", rank=0)
    node.commit(row)
    cluster.settle()
    cluster.check_invariants()
    assert cluster.files("step-1") == {"a.txt": b"one", "b.txt": b"TWO"}
    now = {path: file.key for path, _, file in node.raw.files_of_attempt(row.id)}
    assert now["a.txt"] == keys["a.txt"]
    assert now["b.txt"] != keys["b.txt"]
    assert cluster.store.get(keys["b.txt"]) == b"two"
    assert node.fresh(base).state is AttemptState.REPLACED


def test_unknown_content_commits_by_quiescence_only_like_the_previous_one(
    cluster: Cluster,
) -> None:
    node = cluster.node("a")
    save(node, "step-1", {"a.json": b"{}"})
    cluster.settle()
    row = node.begin("step-2", job=SESSION)
    node.write(row, "a.json", b"[]", rank=0)
    cluster.settle(rounds=20)
    assert "step-2" not in cluster.state().current
    cluster.clock.advance(40.0)
    cluster.settle()
    assert set(cluster.state().current) == {"step-1", "step-2"}
    other = node.begin("step-3", job=SESSION)
    node.write(other, "else.json", b"[]", rank=0)
    cluster.clock.advance(40.0)
    cluster.settle()
    assert "step-3" not in cluster.state().current
    assert any("commit explicitly" in line for line in node.fresh(other).missing)


def test_an_attempt_without_writers_is_given_up_after_a_while(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"1", rank=0)
    cluster.settle(rounds=10, tick_s=80.0)
    assert node.fresh(row).state is AttemptState.OPEN
    cluster.settle(rounds=4, tick_s=80.0)
    assert node.fresh(row).state is AttemptState.ABANDONED
    assert cluster.state().current == {}


@pytest.mark.parametrize("is_joined", [True, False])
def test_what_a_person_has_aborted_is_no_alarm_on_any_node(
    cluster: Cluster, is_joined: bool
) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    rows = [node.begin("step-1") for node in (a, b)]
    for rank, (node, row) in enumerate(zip((a, b), rows, strict=True)):
        node.write(row, f"{rank}.txt", b"x", rank=rank)
    if is_joined:
        cluster.settle()
    a.publisher.request_abort(rows[0].id, f"{CANCELLED}alice on node1: bad data")
    cluster.settle()
    told = [event for event in a.events.recent(100) if event.kind == "cancelled"]
    assert "alice on node1: bad data" in told[0].detail
    assert incident_kind("cancelled").severity is Severity.NOTICE
    for node in (a, b) if is_joined else (a,):
        assert not {"aborted", "abandoned"} & set(node.kinds())
        assert node.meters.counted[SAVES.name, "cancelled"] == 1
        assert node.fresh(node.raw.attempts()[0]).reason.startswith(CANCELLED)


def test_abort_by_request_is_final(cluster: Cluster) -> None:
    """I3: never COMMIT and ABORT of one attempt."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"1", rank=0)
    cluster.settle()
    node.publisher.request_abort(row.id, "not wanted")
    assert node.fresh(row).state is AttemptState.ABORTED
    assert node.fresh(row).reason == "not wanted"
    node.publisher.request_abort(row.id, "again")
    cluster.settle()
    assert len(entries(cluster, Abort)) == 1
    done = save(node, "step-2", {"a.txt": b"2"})
    cluster.settle()
    node.publisher.request_abort(done.id, "too late")
    assert node.fresh(done).state is AttemptState.COMMITTED


def test_a_deleted_checkpoint_is_retired_once_a_newer_one_is_good(cluster: Cluster) -> None:
    """I9: the newest and what is pointed at stay, whoever asks."""
    node = cluster.node("a")
    row = save(node, "step-1", {"a.txt": b"1"})
    cluster.settle()
    node.raw.add_tombstone(
        TombstoneRow(id=0, run=RUN, name="step-1", attempt="step-1.0", job_key=SESSION)
    )
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"1"}
    save(node, "step-2", {"a.txt": b"2"})
    cluster.settle()
    assert set(cluster.state().current) == {"step-2"}
    assert cluster.store.published_attempt(RUN, "step-1") == ""
    assert node.raw.tombstones() == []
    assert node.fresh(row).state is AttemptState.REPLACED
    key = next(file.key for _, _, file in node.raw.files_of_attempt(row.id))
    assert cluster.store.get(key) == b"1"


def test_what_a_retired_checkpoint_had_replaced_is_not_shown_either(cluster: Cluster) -> None:
    """I9: the replacement was deleted before anybody showed it."""
    node = cluster.node("a")
    save(node, "step-1", {"a.txt": b"1"})
    cluster.settle()
    data = cluster.store.get(f"{RUN}/step-1/.ckptgate/manifest.json")
    save(node, "step-1", {"a.txt": b"2"})
    save(node, "step-2", {"a.txt": b"3"})
    cluster.settle()
    node.raw.add_tombstone(
        TombstoneRow(id=0, run=RUN, name="step-1", attempt="step-1.1", job_key=SESSION)
    )
    cluster.settle()
    assert cluster.store.published_attempt(RUN, "step-1") == ""
    cluster.store.publish(RUN, decode(data, Manifest, subject="step-1"), data)
    assert cluster.store.published_attempt(RUN, "step-1") == "step-1.0"
    save(node, "step-3", {"a.txt": b"4"})
    cluster.settle()
    assert cluster.store.published_attempt(RUN, "step-1") == ""


def test_two_members_with_different_bytes_of_one_path_do_not_commit(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    rows = {node: node.begin("step-1") for node in (a, b)}
    for rank, node in enumerate((a, b)):
        node.write(rows[node], "same.txt", b"%d" % rank, rank=rank)
        node.commit(rows[node], rank, 2)
    cluster.settle()
    assert cluster.state().current == {}
    row = next(node.fresh(rows[node]) for node in (a, b) if node.fresh(rows[node]).event)
    assert any(a.member in line and b.member in line for line in row.missing)


def test_a_hole_or_a_torn_close_keeps_a_checkpoint_from_its_commit(cluster: Cluster) -> None:
    """I1: a size alone proves nothing."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"x" * 5000, rank=0, extend_to=1 << 20)
    node.commit(row)
    torn = node.begin("step-2", job=SESSION)
    node.write(torn, "a.bin", b"x", rank=0, is_torn=True)
    node.event(torn, "format")
    cluster.settle()
    assert cluster.state().current == {}
    assert any("never written" in line for line in node.fresh(row).missing)
    assert node.fresh(torn).missing


def test_a_file_of_more_than_one_chunk_has_a_table_of_its_digests(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(node, "step-1", {"big.txt": b"b" * (CHUNK_BYTES + 7), "small.txt": b"s"})
    cluster.settle()
    cluster.check_invariants()
    assert len(cluster.files("step-1")["big.txt"]) == CHUNK_BYTES + 7


def test_a_revision_of_bytes_that_were_never_here_names_the_old_ones(cluster: Cluster) -> None:
    """I9: another node changes one file; the large one stays where it is."""
    a, b = cluster.node("a"), cluster.node("b")
    big = b"b" * (CHUNK_BYTES + 7)
    save(a, "step-1", {"big.txt": big, "small.txt": b"s"})
    cluster.settle(a)
    view = cluster.state().attempts["step-1.0"]
    manifest = load_manifest(cluster.store, RUN, "step-1.0", view.manifest)
    base = adopt(b.raw, RUN, b.directory(), manifest, view.manifest)
    row = b.begin("step-1", job="session:b/1@2", base=base)
    b.write(row, "small.txt", b"S", rank=0)
    b.commit(row)
    cluster.settle()
    cluster.check_invariants()
    assert cluster.files("step-1") == {"big.txt": big, "small.txt": b"S"}
    assert cluster.state().current == {"step-1": "step-1.1"}
    rows = a.raw.attempts(run=RUN, name="step-1", states=(AttemptState.COMMITTED,))
    assert [row.attempt for row in rows] == ["step-1.1"]
