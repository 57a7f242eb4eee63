"""A checkpoint of many files: what it costs grows with their number, never with its square."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine_harness import Cluster, StagedNode

from ckptgate.engine import batches, durable, jobs, staging
from ckptgate.engine.digest import WORKERS_NICE
from ckptgate.engine.durable import TOGETHER_MIN, sync_files
from ckptgate.model.states import AttemptState, FileState
from ckptgate.testing.clock import ManualClock
from ckptgate.testing.faults import FaultPlan, FaultyStore

SESSION = "session:a/1@2"
STATEMENT_S = 20e-6
ROW_S = 10e-6


class Costs(ManualClock):
    """Counts a node's statements and the rows that they gave; time goes on with them.

    So what is paced by the time that it takes is paced in a test, too, and always in the same way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def watch(self, node: StagedNode) -> None:
        database: Any = node.raw._db
        for name in ("one", "all", "run", "insert"):
            setattr(database, name, self._counted(getattr(database, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(sql: str, values: Any = ()) -> Any:
            found = call(sql, values)
            rows = len(found) if isinstance(found, list) else 1
            self.counts["statements"] += 1
            self.counts["rows"] += rows
            self.advance(STATEMENT_S + rows * ROW_S)
            return found

        return counted


def cost_of_a_save(tmp_path: Path, files: int) -> dict[str, int]:
    clock = Costs()
    cluster = Cluster(tmp_path / str(files), clock=clock)
    plan = FaultPlan(at=0)
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    row = node.begin("step-1", job=SESSION)
    with node.raw.transaction():
        for n in range(files):
            node.write(row, f"d{n % 4}/f{n}.txt", b"%d" % n, rank=0)
    node.commit(row)
    clock.watch(node)
    for _ in range(200):
        if not node.step() and node.fresh(row).state is AttemptState.COMMITTED:
            break
        clock.advance(0.005)
    assert cluster.state().attempts["step-1.0"].is_published
    assert len(cluster.files("step-1")) == files
    cluster.close()
    return {**clock.counts, "store calls": plan.count}


def most_rows_in_a_transaction(tmp_path: Path, files: int) -> int:
    """How many rows of the spool the longest transaction of a commit reads and changes."""
    cluster = Cluster(tmp_path / f"held-{files}")
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    with node.raw.transaction():
        for n in range(files):
            node.write(row, f"d{n % 4}/f{n}.txt", b"%d" % n, rank=0)
    node.commit(row)
    database: Any = node.raw._db
    rows: Counter[int] = Counter()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*words: Any, **more: Any) -> Any:
            found = call(*words, **more)
            if database._depth:
                rows[database.serial] += len(found) if isinstance(found, list) else 1
            return found

        return count

    for name in ("one", "all", "run", "insert", "changed"):
        setattr(database, name, counted(getattr(database, name)))
    for _ in range(200):
        if not node.step() and node.fresh(row).state is AttemptState.COMMITTED:
            break
    assert cluster.state().attempts["step-1.0"].is_published
    cluster.close()
    return max(rows.values())


def test_no_change_of_the_mount_waits_for_more_of_a_commit_than_some_files(tmp_path: Path) -> None:
    """The spool's write lock is held as long for a checkpoint of many files as of few."""
    few, many = (most_rows_in_a_transaction(tmp_path, files) for files in (300, 900))
    assert many <= few + 50, f"{few} rows of 300 files, {many} of 900"


def test_twice_the_files_cost_twice_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a save of a few hundred files takes many passes.
    monkeypatch.setattr(jobs, "QUEUED_MAX", 32)
    monkeypatch.setattr(batches, "BATCH_FILES", 8)
    once, twice = cost_of_a_save(tmp_path, 200), cost_of_a_save(tmp_path, 400)
    for what, cost in twice.items():
        assert cost < 2.3 * once[what], (what, once, twice)


def test_no_file_that_waits_is_overlooked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: files that cannot be digested now don't hold up those behind them."""
    monkeypatch.setattr(jobs, "QUEUED_MAX", 4)
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    stuck = {node.write(row, f"a{n}", b"x", is_open=True) for n in range(6)}
    for file in stuck:
        node.raw.update_file(file, state=FileState.QUIET)
    free = {node.write(row, f"b{n}", b"x") for n in range(6)}
    cluster.settle(rounds=10)
    states = {file.file: file.state for _, _, file in node.raw.files_of_attempt(row.id)}
    assert {states[file] for file in free} == {FileState.STORED}
    assert {states[file] for file in stuck} == {FileState.QUIET}


def test_large_digests_run_at_low_priority_and_nothing_else_does() -> None:
    """What holds Python's lock or the spool's must not wait for the CPU behind a trainer."""
    script = (
        "import os; from ckptgate.engine.digest import start_workers; start_workers();"
        "print(*(os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert set(map(int, done.stdout.split())) == {own, max(own, WORKERS_NICE)}


# Durability


@pytest.fixture
def opened(tmp_path: Path):
    fds = []
    for n in range(TOGETHER_MIN + 2):
        (tmp_path / str(n)).write_bytes(b"x")
        fds.append(os.open(tmp_path / str(n), os.O_RDONLY))
    yield fds
    for fd in fds:
        os.close(fd)


def counted_fsync(monkeypatch: pytest.MonkeyPatch, bad: int | None = None) -> list[int]:
    real, asked = os.fsync, []

    def fsync(fd: int) -> None:
        asked.append(fd)
        if fd == bad:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return asked


def test_many_files_are_made_durable_by_one_flush(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counted_fsync(monkeypatch)
    assert sync_files(opened) == {}
    assert len(asked) == 1
    assert sync_files(opened[:3]) == {}
    assert asked[1:] == opened[:3]


def test_a_write_back_error_is_that_files_own(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: bytes that may not be on the disk are never counted, and never asked for again."""
    asked = counted_fsync(monkeypatch)
    real = durable._sync_range

    def sync_range(fd: int, flags: int) -> None:
        if fd == opened[3]:
            raise OSError(errno.EIO, "Input/output error")
        real(fd, flags)

    monkeypatch.setattr(durable, "_sync_range", sync_range)
    assert list(sync_files(opened)) == [opened[3]]
    assert opened[3] not in asked


def test_where_the_flush_fails_each_file_says_for_itself(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: an error of a whole file system may be another file's."""
    asked = counted_fsync(monkeypatch, bad=opened[1])

    def flush(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable, "_flush", flush)
    assert list(sync_files(opened)) == [opened[1]]
    assert asked == opened


def test_without_these_calls_each_file_is_synced(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counted_fsync(monkeypatch)

    def sync_range(fd: int, flags: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(durable, "_sync_range", sync_range)
    assert sync_files(opened) == {}
    assert asked == opened


def test_one_bad_file_of_a_batch_is_told_and_the_others_go_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: the error of one of many is final for that one only."""
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    files = [node.write(row, f"f{n}", b"%d" % n, rank=0) for n in range(12)]
    bad = node.raw.data_path(files[5])

    def sync(fds: list[int]) -> dict[int, OSError]:
        failed = [fd for fd in fds if os.readlink(f"/proc/self/fd/{fd}") == bad]
        return {fd: OSError(errno.EIO, "Input/output error") for fd in failed}

    monkeypatch.setattr(staging, "sync_files", sync)
    cluster.settle(rounds=4)
    states = {file.file: file for _, _, file in node.raw.files_of_attempt(row.id)}
    assert states.pop(files[5]).evidence.problem.startswith("fsync failed")
    assert {file.state for file in states.values()} == {FileState.STORED}
    assert node.kinds().count("fsync-failed") == 1
