"""Single steps: digests, uploads, links, explicit commits, the loop's isolation."""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path
from typing import Any

import blake3
import pytest
from msgspec.structs import replace
from tests.engine_harness import Cluster, StagedNode

from ckptgate.engine.digest import SpoolView, digest_file, has_hole
from ckptgate.engine.jobs import Backoff, Cancelled, Jobs
from ckptgate.engine.settings import PublisherSettings
from ckptgate.errors import (
    MissingError,
    RefusedError,
    TransientStoreError,
    UsageError,
)
from ckptgate.formats.containers import Container, check_container
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.explicit import record_explicit_commit
from ckptgate.ports.spool import AttemptRow, FileRow, NodeKind
from ckptgate.testing.clock import ManualClock

SESSION = "session:a/1@2"


def fresh(cluster: Cluster, file: int) -> FileRow:
    row = next(iter(cluster.nodes.values())).raw.file(file)
    assert row is not None
    return row


# Digests


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_one_pass_gives_the_whole_digest_and_one_for_each_chunk(tmp_path: Path, size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    path = tmp_path / "f"
    path.write_bytes(data)
    with path.open("rb") as stream:
        found = digest_file(stream.fileno(), lambda: None)
        assert not has_hole(stream.fileno(), size)
        view = SpoolView(stream.fileno(), size)
        assert view.read(0, size) == data
        assert view.read(size, 10) == b""
    assert (found.size, found.digest) == (size, blake3.blake3(data).hexdigest())
    wanted = [blake3.blake3(data[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)]
    assert found.chunks == b"".join(chunk.digest() for chunk in wanted)


def test_a_digest_stops_when_it_is_told_to() -> None:
    jobs: Jobs[int] = Jobs("test", 1)
    started = threading.Event()

    def work() -> dict[int, bool | Exception]:
        started.set()
        while True:
            jobs.check_cancelled()

    jobs.submit([1], work)
    assert started.wait(10)
    assert jobs.take_done(0.0) == []
    jobs.close()
    ((key, error),) = jobs.take_done(10.0)
    assert key == 1
    assert isinstance(error, Cancelled)


def test_each_end_of_a_job_is_told(tmp_path: Path) -> None:
    ends: queue.Queue[int] = queue.Queue()
    jobs: Jobs[int] = Jobs("test", 1, lambda: ends.put(len(jobs.take_done(0.0))))

    def fail() -> dict[int, bool | Exception]:
        raise OSError("no disk")

    def succeed() -> dict[int, bool | Exception]:
        return {0: True}

    for key, job in enumerate((succeed, fail)):
        jobs.submit([key], job)
        # Whoever is told finds it done.
        assert ends.get(timeout=10) == 1
    jobs.close()


def test_the_ends_of_digests_and_uploads_wake_the_loop(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    node.write(row, "w.bin", b"x" * 4096, rank=0)
    node.commit(row)
    cluster.settle()
    # One file: one job digested it, and one stored it.
    assert len(node.wakes) == 2


def test_explicit_zeros_are_no_hole(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    zeros = node.write(row, "zeros.txt", bytes(1 << 20), rank=0)
    hole = node.write(row, "hole.txt", b"x", rank=0, extend_to=1 << 20)
    cluster.settle(rounds=3)
    assert not fresh(cluster, zeros).evidence.has_hole
    assert fresh(cluster, hole).evidence.has_hole


def test_a_file_with_an_open_writer_is_not_digested(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"x", rank=0, is_open=True)
    node.raw.update_file(file, state=FileState.QUIET)
    cluster.settle(rounds=3)
    assert fresh(cluster, file).state is FileState.QUIET
    node.close_file(file)
    cluster.settle(rounds=3)
    assert fresh(cluster, file).state is FileState.STORED


def test_a_write_after_the_digest_takes_it_away(cluster: Cluster) -> None:
    """I1: a leaked descriptor or mapping that still writes is seen before the vote."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"before", rank=0)
    cluster.settle(rounds=3)
    assert fresh(cluster, file).state is FileState.STORED
    Path(node.raw.data_path(file)).write_bytes(b"after!")
    node.commit(row)
    cluster.settle()
    assert "changed-after-digest" in node.kinds()
    assert cluster.files("step-1") == {"a.txt": b"after!"}
    cluster.check_invariants()


def test_what_is_stored_a_second_time_has_another_key(cluster: Cluster) -> None:
    """I1: an early vote may name the bytes that were stored first."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"before", rank=0)
    cluster.settle(rounds=3)
    first = fresh(cluster, file).key
    Path(node.raw.data_path(file)).write_bytes(b"after!")
    cluster.settle(rounds=4)
    second = fresh(cluster, file)
    assert second.state is FileState.STORED
    assert second.key != first
    assert cluster.store.read(first, 0, 10) == b"before"
    assert cluster.store.read(second.key, 0, 10) == b"after!"
    node.commit(row)
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"after!"}
    cluster.check_invariants()


def test_a_failed_fsync_is_final_until_the_file_is_written_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: the bytes are kept, and never counted as durable."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"bytes", rank=0)
    real = os.fsync
    failed: list[int] = []

    def fsync(fd: int) -> None:
        if not failed and os.readlink(f"/proc/self/fd/{fd}") == node.raw.data_path(file):
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    node.commit(row)
    cluster.settle()
    assert fresh(cluster, file).evidence.problem.startswith("fsync failed")
    assert cluster.state().current == {}
    assert node.kinds().count("fsync-failed") == 1
    assert Path(node.raw.data_path(file)).read_bytes() == b"bytes"
    Path(node.raw.data_path(file)).write_bytes(b"BYTES")
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"BYTES"}


def test_a_file_of_holes_alone_does_not_keep_the_publisher(cluster: Cluster) -> None:
    """It isn't read; the next one goes on, and so does it once it is written again."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    sparse = node.write(row, "a.txt", b"x", rank=0, extend_to=1 << 43)
    other = node.write(row, "b.txt", b"other", rank=0)
    node.commit(row)
    cluster.settle()
    assert fresh(cluster, sparse).state is FileState.QUIET
    assert fresh(cluster, sparse).evidence.problem.startswith("almost nothing was written")
    assert fresh(cluster, other).state is FileState.STORED
    assert node.kinds().count("too-sparse") == 1
    assert cluster.state().current == {}
    Path(node.raw.data_path(sparse)).write_bytes(b"all")
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"all", "b.txt": b"other"}


def test_a_file_that_is_renamed_while_it_is_digested_is_judged_by_its_new_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a file that is no container would be taken for one that was looked at."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "w.tmp", b"no container", rank=0)
    (inner,) = node.raw.nodes_of_file(file)
    judged: list[str] = []

    def check(path: str, view: SpoolView) -> Container:
        if not judged:
            node.raw.unlink(row.root, "w.tmp")
            node.raw.link(row.root, "w.safetensors", inner.ino)
        judged.append(path)
        return check_container(path, view)

    monkeypatch.setattr("ckptgate.engine.staging.check_container", check)
    node.commit(row)
    cluster.settle()
    assert judged == ["w.tmp", "w.safetensors"]
    assert "safetensors" in fresh(cluster, file).evidence.problem
    assert cluster.state().current == {}


def test_a_fresh_time_stamp_is_waited_for(tmp_path: Path) -> None:
    """I1: within one tick of the clock a later write would look like no write."""

    class NowClock(ManualClock):
        def now_ns(self) -> int:
            return os.stat(tmp_path / "probe").st_mtime_ns + 1_000_000

    (tmp_path / "probe").write_bytes(b"")
    cluster = Cluster(tmp_path, clock=NowClock())
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"x")
    os.utime(node.raw.data_path(file), ns=(0, os.stat(tmp_path / "probe").st_mtime_ns))
    node.step()
    assert cluster.settings.racy_write_s in cluster.clock.slept_s
    cluster.close()


# Explicit commits


def test_an_explicit_commit_is_checked_and_may_be_repeated(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"x", rank=0)

    def commit(rank: int | None, world: int | None, *, is_all: bool = False) -> Any:
        return record_explicit_commit(
            node.raw, row.id, rank=rank, world_size=world, is_all=is_all, now_ns=7
        )

    for rank, world in ((None, None), (2, 2), (-1, 2), (0, 0), (0, 10**9), (None, 4)):
        with pytest.raises(UsageError):
            commit(rank, world)
    assert commit(0, 2).state is AttemptState.OPEN
    with pytest.raises(UsageError, match="contradicts"):
        commit(1, 3)
    with pytest.raises(UsageError, match="not below"):
        commit(5, None)
    assert commit(0, 2) == commit(0, None)
    sealed = commit(1, 2)
    assert (sealed.state, sealed.event, sealed.event_ns) == (AttemptState.SEALED, "explicit", 7)
    assert node.raw.rank_commits(row.id) == (0, 1)
    with pytest.raises(MissingError):
        record_explicit_commit(node.raw, 99, rank=0, world_size=1, is_all=False, now_ns=0)
    node.raw.update_attempt(row.id, state=AttemptState.ABORTED)
    with pytest.raises(RefusedError):
        commit(0, 2)


@pytest.mark.parametrize("job", [SESSION, "run:one"])
def test_a_committed_tree_whose_files_were_removed_at_once_takes_changes(
    cluster: Cluster, job: str
) -> None:
    """I12: with a final vote on nothing its job could neither remove nor write it for minutes."""
    node = cluster.node("a")
    row = node.begin("step-1", job=job)
    node.write(row, "a.txt", b"x")
    node.commit(row)
    (path, child), *_ = node.raw.tree(row.id)
    with node.raw.transaction():
        node.raw.unlink(row.root, path)
        node.raw.drop_node(child.ino)
    cluster.settle(rounds=20)
    now = node.fresh(row)
    assert (now.state, now.is_voted) == (AttemptState.SEALED, False)
    assert "step-1" not in cluster.state().current
    node.write(row, "b.txt", b"y")
    cluster.settle()
    assert cluster.files("step-1") == {"b.txt": b"y"}
    cluster.check_invariants()


def test_a_sealed_tree_of_several_members_that_lost_all_files_takes_changes(
    cluster: Cluster,
) -> None:
    """I12: each would wait for the other with a final vote on nothing, and so would `rm -rf`."""
    nodes = [cluster.node(host) for host in ("a", "b")]
    rows = [node.begin("step-1", job="run:one") for node in nodes]
    nodes[0].write(rows[0], "a.txt", b"x")
    cluster.settle(rounds=4)
    for rank, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        node.commit(row, rank, 2)
        for path, child in node.raw.tree(row.id):
            with node.raw.transaction():
                node.raw.unlink(row.root, path)
                node.raw.drop_node(child.ino)
    cluster.settle(rounds=20)
    for node, row in zip(nodes, rows, strict=True):
        assert (node.fresh(row).state, node.fresh(row).is_voted) == (AttemptState.SEALED, False)
    assert "step-1" not in cluster.state().current
    nodes[1].write(rows[1], "b.txt", b"y")
    cluster.settle()
    assert cluster.files("step-1") == {"b.txt": b"y"}
    cluster.check_invariants()


def test_a_member_without_a_file_votes_where_another_has_some(cluster: Cluster) -> None:
    nodes = [cluster.node(host) for host in ("a", "b")]
    rows = [node.begin("step-1", job="run:one") for node in nodes]
    nodes[0].write(rows[0], "a.txt", b"x")
    cluster.settle(rounds=4)
    for rank, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        node.commit(row, rank, 2)
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"x"}


def test_a_commit_for_all_keeps_the_event_that_was_seen(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"x")
    node.event(row, "rename")
    found = record_explicit_commit(
        node.raw, row.id, rank=None, world_size=None, is_all=True, now_ns=7
    )
    assert (found.event, found.committed_all) == ("rename", True)


@pytest.mark.parametrize(("rank", "world", "is_all"), [(None, None, True), (0, 1, False)])
def test_a_commit_of_nothing_is_refused_and_changes_nothing(
    cluster: Cluster, rank: int | None, world: int | None, is_all: bool
) -> None:
    """Sealed, it could get no file any more; of a shared job other nodes may have the files."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    with pytest.raises(RefusedError, match="has no file") as caught:
        node.commit(row, rank, world, is_all=is_all)
    assert caught.value.errno == errno.EINVAL
    assert node.fresh(row) == row
    assert node.raw.rank_commits(row.id) == ()
    node.write(row, "a.txt", b"x", rank=0)
    node.commit(row, rank, world, is_all=is_all)
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"x"}
    shared = node.begin("step-2")
    node.commit(shared, rank, world, is_all=is_all)
    assert node.fresh(shared).state is AttemptState.SEALED


def test_a_commit_that_came_true_may_be_repeated_and_no_other(cluster: Cluster) -> None:
    """I6: a caller whose reply was lost asks again, and hears what is so."""
    node = cluster.node("a")
    ranks = node.begin("step-1", job=SESSION)
    node.write(ranks, "a.txt", b"x", rank=0)
    for rank in (0, 1):
        node.commit(ranks, rank, 2)
    everything = node.begin("step-2", job=SESSION)
    node.write(everything, "a.txt", b"x")
    node.commit(everything, None, None, is_all=True)
    cluster.settle()
    assert {node.fresh(row).state for row in (ranks, everything)} == {AttemptState.COMMITTED}
    for rank, world in ((0, 2), (1, None), (1, 2)):
        node.commit(ranks, rank, world)
    node.commit(everything, None, None, is_all=True)
    # A framework's marker, or somebody for all, may have come before a rank's own commit.
    node.commit(everything, 0, 1)
    node.commit(ranks, None, None, is_all=True)
    other = cluster.node("b")
    other.fetched("step-1")
    (read,) = other.raw.attempts(name="step-1")
    others: tuple[tuple[StagedNode, AttemptRow, int | None, int | None], ...] = (
        (node, ranks, 0, 3),
        (node, ranks, 2, None),
        (other, read, 0, 1),
        (other, read, None, None),
    )
    for place, row, of_rank, of_world in others:
        with pytest.raises(RefusedError, match="is committed"):
            place.commit(row, of_rank, of_world, is_all=of_rank is None)


# The loop


def test_one_attempt_that_fails_stops_no_other(cluster: Cluster) -> None:
    """I12: a symlink that leaves its checkpoint spoils only its own attempt."""
    node = cluster.node("a")
    bad = node.begin("step-1", job=SESSION)
    node.write(bad, "a.txt", b"x", rank=0)
    root = node.raw.node(bad.root)
    assert root is not None
    link = node.raw.add_node(replace(root, ino=0, kind=NodeKind.SYMLINK, target="/etc"))
    node.raw.link(bad.root, "leaves", link.ino)
    node.commit(bad)
    good = node.begin("step-2", job=SESSION)
    node.write(good, "a.txt", b"y", rank=0)
    node.commit(good)
    cluster.settle()
    assert cluster.files("step-2") == {"a.txt": b"y"}
    assert node.kinds().count("step-failed") == 1
    assert cluster.state().current == {"step-2": "step-2.0"}


def test_the_loop_sleeps_less_while_something_is_undecided(cluster: Cluster) -> None:
    node = cluster.node("a")
    stop = threading.Event()
    pauses: list[float] = []

    def wait(pause_s: float) -> None:
        pauses.append(pause_s)
        cluster.clock.advance(pause_s)
        if len(pauses) >= 3:
            stop.set()

    node.publisher.run(stop, wait)
    assert pauses == [cluster.settings.idle_interval_s] * 3
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"x", is_open=True)
    node.step()
    stop.clear()
    pauses.clear()
    node.publisher.run(stop, wait)
    assert cluster.settings.busy_interval_s in pauses


def test_a_failure_is_waited_for_twice_as_long_each_time() -> None:
    clock = ManualClock()
    backoff: Backoff[str] = Backoff(clock, 1.0, 3.0)
    assert backoff.is_due("x")
    for delay in (1.0, 2.0, 3.0, 3.0):
        backoff.failed("x")
        clock.advance(delay - 0.01)
        assert not backoff.is_due("x")
        clock.advance(0.02)
        assert backoff.is_due("x")
    backoff.succeeded("x")
    backoff.failed("x")
    clock.advance(1.0)
    assert backoff.is_due("x")


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        PublisherSettings().quiescence_s = 1.0  # type: ignore[misc]
    assert isinstance(TransientStoreError("x"), OSError)
