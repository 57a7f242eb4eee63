"""Uploads: bytes that arrive late, wrong or not at all, and those that the store shares."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine_harness import RUN, Cluster

from ckptgate.engine.fetch import Fetcher
from ckptgate.engine.leases import has_no_open_writer
from ckptgate.errors import (
    FullError,
    IntegrityError,
    TransientStoreError,
)
from ckptgate.model.states import FileState
from ckptgate.ports.spool import FileRow
from ckptgate.ports.store import DigestedFile, VerifyMode
from ckptgate.testing.faults import FaultPlan, FaultyStore
from ckptgate_adapters.posix_store import PosixStore

SESSION = "session:a/1@2"


def fresh(cluster: Cluster, file: int) -> FileRow:
    row = next(iter(cluster.nodes.values())).raw.file(file)
    assert row is not None
    return row


class BadStore(FaultyStore):
    """A store where bytes arrive wrong, or don't fit."""

    error: Exception | None = None
    tries = 0

    def verify(self, *args: Any) -> None:
        if self.error is not None:
            self.tries += 1
            raise self.error
        super().verify(*args)


class LateStore(FaultyStore):
    """A store whose first request to store bytes is given up, and arrives when it is told to."""

    sent: tuple[str, DigestedFile] | None = None

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        if self.sent is not None:
            return super().put_all(files, mode)
        ((key, source),) = files.items()
        path = f"{source.path}.sent"
        shutil.copyfile(source.path, path)
        self.sent = key, replace(source, path=path)
        return {key: TransientStoreError("no reply to put", subject=key)}


@pytest.mark.parametrize("is_killed", [False, True])
def test_bytes_that_were_given_up_and_arrive_late_replace_no_newer_ones(
    cluster: Cluster, is_killed: bool
) -> None:
    """I1: the file was written again meanwhile, and what it holds now is stored and verified."""
    store = LateStore(cluster.store, FaultPlan(at=0))
    node = cluster.node("a", store=store)
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"before", rank=0)
    cluster.settle(rounds=1)
    assert store.sent is not None
    if is_killed:
        node = cluster.node("a", store=store)
    Path(node.raw.data_path(file)).write_bytes(b"after!")
    cluster.settle(rounds=4)
    assert fresh(cluster, file).state is FileState.STORED
    cluster.store.put(*store.sent)
    node.commit(row)
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"after!"}
    cluster.check_invariants()


def test_bytes_that_arrive_wrong_three_times_are_told(cluster: Cluster) -> None:
    store = BadStore(cluster.store, FaultPlan(at=0))
    store.error = IntegrityError("chunk 0 differs", subject="k")
    node = cluster.node("a", store=store)
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"x")
    cluster.settle(tick_s=20.0, rounds=12)
    assert store.tries == 3
    assert fresh(cluster, file).state is FileState.DIGESTED
    assert "arrived wrong" in node.fresh(row).reason
    assert node.kinds().count("upload-mismatch") == 3


def test_a_full_store_is_told_once_and_tried_again(cluster: Cluster) -> None:
    """I11: nothing staged is lost by a full store."""
    store = BadStore(cluster.store, FaultPlan(at=0))
    store.error = FullError("no space left", subject="k")
    node = cluster.node("a", store=store)
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"x")
    node.commit(row)
    cluster.settle(tick_s=5.0, rounds=10)
    assert store.tries > 2
    assert node.kinds().count("store-full") == 1
    missing = node.fresh(row).missing
    # Its own work first, and nothing that its vote will bring.
    assert missing[0] == "a.txt: not in the store yet"
    assert [line for line in missing[1:] if "vote of" not in line] == []
    store.error = None
    cluster.settle(tick_s=5.0)
    assert cluster.files("step-1") == {"a.txt": b"x"}


def test_a_lease_tells_whether_anybody_can_write(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 4096)
    assert has_no_open_writer(str(path))
    with path.open("r+b") as stream:
        assert not has_no_open_writer(str(path))
        mapping = mmap.mmap(stream.fileno(), 0)
    assert not has_no_open_writer(str(path))
    mapping.close()
    assert has_no_open_writer(str(path))
    with path.open("rb"):
        assert has_no_open_writer(str(path))
    assert not has_no_open_writer(str(tmp_path / "absent"))
    with path.open("rb") as stream:
        assert fcntl.fcntl(stream.fileno(), fcntl.F_GETLEASE) == fcntl.F_UNLCK


def test_a_linked_file_is_the_stores_own_and_stays_whole_here(tmp_path: Path) -> None:
    """I1: the store shares the spool's inode; publication's times don't look like a write."""
    (tmp_path / "store").mkdir()
    store = PosixStore(str(tmp_path / "store"))
    store.probe()
    cluster = Cluster(tmp_path, store=store)
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "sub/a.txt", b"linked", rank=0)
    ino = next(n.ino for path, n, _ in node.raw.files_of_attempt(row.id) if path == "sub/a.txt")
    node.raw.update_node(ino, mtime_ns=1_600_000_000_000_000_000)
    node.commit(row)
    cluster.settle()
    found = fresh(cluster, file)
    assert found.is_linked
    assert os.path.samefile(node.raw.data_path(file), tmp_path / "store" / found.key)
    shown = tmp_path / "store" / RUN / "step-1" / "sub" / "a.txt"
    assert shown.read_bytes() == b"linked"
    assert os.path.samefile(shown, node.raw.data_path(file))
    assert os.readlink(tmp_path / "store" / RUN / "latest") == "step-1"
    fetcher = Fetcher(store=store, spool=node.raw, events=node.events)
    assert fetcher.is_fetched(file, 0, 6)
    cluster.check_invariants()
    cluster.close()


def test_a_file_that_something_may_still_write_is_copied(tmp_path: Path) -> None:
    """I1: shared bytes never change."""
    (tmp_path / "store").mkdir()
    cluster = Cluster(tmp_path, store=PosixStore(str(tmp_path / "store")))
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    file = node.write(row, "a.txt", b"copied", rank=0)
    with open(node.raw.data_path(file), "r+b"):
        node.commit(row)
        cluster.settle()
    found = fresh(cluster, file)
    assert not found.is_linked
    assert not os.path.samefile(node.raw.data_path(file), tmp_path / "store" / found.key)
    cluster.check_invariants()
    cluster.close()
