"""The real spool, a catalog in memory, and processes that live and die as a test says."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from ckptgate.engine.settling import settle
from ckptgate.errors import CkptError, MissingError
from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.jobkey import OUTSIDE, JobKey, JobKind, RankInfo
from ckptgate.model.kinds import DEFAULT_PATTERNS
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.catalog import RunView
from ckptgate.ports.spool import AttemptRow, LocalBytes, NodeKind, NodeRow, Spool
from ckptgate.ports.store import PlainEntry, PlainKind
from ckptgate.vfs.identify import ProcessInfo
from ckptgate.vfs.interface import Caller, Entry, Opened
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.sqlite_spool import SqliteSpool

ROOT = 1


class FakeClock:
    """Time that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.on_sleep = lambda: None

    def now(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    def now_ns(self) -> int:
        self.seconds += 1e-6
        return int(1.7e18) + int(self.seconds * 1e9)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.on_sleep()


class FakeIdentify:
    """Processes: thread id -> what is known of it."""

    def __init__(self) -> None:
        self.processes: dict[int, ProcessInfo] = {}
        self.dead: set[int] = set()
        self.exiting: set[int] = set()
        self.held: set[tuple[int, int]] = set()

    def add(self, pid: int, key: JobKey, rank: RankInfo | None = None) -> None:
        self.processes[pid] = ProcessInfo(pid, pid * 10, key, rank or RankInfo())

    def process(self, tid: int) -> ProcessInfo:
        return self.processes.get(tid, ProcessInfo(0, 0, OUTSIDE, RankInfo()))

    def closer(self, tid: int) -> tuple[ProcessInfo, bool]:
        return self.process(tid), tid in self.exiting

    def holds(self, pid: int, ino: int) -> bool:
        return (pid, ino) in self.held

    def is_alive(self, pid: int, start: int) -> bool:
        return pid in self.processes and pid not in self.dead and start == pid * 10


class FakeCatalog:
    """A store's state as a test says; counts what was asked."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.views: dict[str, RunView] = {}
        self.trees: dict[str, dict[str, bytes]] = {}
        self.plain: dict[str, PlainEntry] = {}
        self.plain_bytes: dict[str, bytes] = {}
        self.others: dict[str, AttemptRow] = {}
        self.refreshes = 0
        self.is_on_several_nodes = False
        self.on_refresh = lambda: False
        self.fresh = True
        self.fetched: list[tuple[int, int, int]] = []
        self.ahead: list[tuple[int, int, int]] = []

    def set_view(self, run: str, **changes: Any) -> None:
        self.views[run] = replace(self.view(run, 0), **changes)

    def is_fresh(self, run: str, max_age_s: float) -> bool:
        return self.fresh

    def view(self, run: str, max_age_s: float) -> RunView:
        empty = RunView(
            run=run, length=0, committed={}, names=frozenset(), pointers={}, undecided=()
        )
        return self.views.get(run, empty)

    def fill(self, attempt: int) -> None:
        raise AssertionError("trees are made whole here")

    def materialise(self, run: str, run_ino: int, name: str) -> AttemptRow:
        attempt = self.view(run, 0).committed.get(name)
        if attempt is None:
            raise MissingError(name)
        known = self.spool.attempt_by_id(run, attempt)
        if known is not None:
            return known
        with self.spool.transaction():
            root = self._node(NodeKind.DIR, None, 0o755, 0, None)
            row = self.spool.add_attempt(
                AttemptRow(
                    id=0, run=run, run_ino=run_ino, name=name, attempt=attempt, job_key="",
                    generation=1, state=AttemptState.COMMITTED, root=root.ino,
                    seal_index=0, manifest="0" * 64,
                )
            )  # fmt: skip
            self.spool.update_node(root.ino, attempt=row.id)
            for path, data in self.trees[attempt].items():
                parent = root.ino
                *folders, last = path.split("/")
                for folder in folders:
                    child = self.spool.child(parent, folder)
                    if child is None:
                        child = self._node(NodeKind.DIR, row.id, 0o755, 0, None)
                        self.spool.link(parent, folder, child.ino)
                    parent = child.ino
                file = self.spool.add_file(state=FileState.STORED)
                self.spool.update_file(file.file, size=len(data), key="k", digest="0" * 64)
                with open(self.spool.data_path(file.file), "wb") as stream:
                    stream.write(data)
                node = self._node(NodeKind.FILE, row.id, 0o644, len(data), file.file)
                self.spool.link(parent, last, node.ino)
        return row

    def _node(
        self, kind: NodeKind, attempt: int | None, mode: int, size: int, file: int | None
    ) -> NodeRow:
        return self.spool.add_node(
            NodeRow(
                ino=0, kind=kind, attempt=attempt, mode=mode, uid=0, gid=0, size=size,
                mtime_ns=5, ctime_ns=5, file=file,
            )
        )  # fmt: skip

    def find_open(self, run: str, run_ino: int, name: str, job_key: str) -> AttemptRow | None:
        return self.others.get(name)

    def has_others(self, attempt: int) -> bool:
        return self.is_on_several_nodes

    def refresh_shared(self, attempt: int) -> bool:
        self.refreshes += 1
        return self.on_refresh()

    def fetch(self, file: int, offset: int, length: int) -> None:
        self.fetched.append((file, offset, length))

    def read_ahead(self, file: int, offset: int, length: int) -> None:
        self.ahead.append((file, offset, length))

    def is_fetched(self, file: int, offset: int, length: int) -> bool:
        return False

    def is_local(self, file: int) -> bool:
        row = self.spool.file(file)
        return row is not None and row.local is LocalBytes.FULL

    def plain_stat(self, path: str) -> PlainEntry | None:
        return self.plain.get(path)

    def plain_list(self, path: str) -> list[PlainEntry]:
        prefix = f"{path}/" if path else ""
        if path and path not in self.plain:
            raise MissingError(path)
        return [
            entry
            for key, entry in self.plain.items()
            if key.startswith(prefix) and key != path and "/" not in key[len(prefix) :]
        ]

    def plain_fetch(self, path: str, file: int) -> None:
        data = self.plain_read(path, 0, 1 << 30)
        with open(self.spool.data_path(file), "wb") as stream:
            stream.write(data)

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        if path not in self.plain_bytes:
            raise MissingError(path)
        return self.plain_bytes[path][offset : offset + length]

    def add_plain(
        self, path: str, data: bytes = b"", *, kind: PlainKind = PlainKind.FILE, **more: Any
    ) -> None:
        entry = PlainEntry(
            name=path.rpartition("/")[2], kind=kind, size=len(data), mode=0o644, mtime_ns=7,
            uid=0, gid=0,
        )  # fmt: skip
        self.plain[path] = replace(entry, **more)
        self.plain_bytes[path] = data


class FakeWaker:
    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        self.count += 1


class FakeInvalidations:
    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []

    def name(self, parent: int, name: str) -> None:
        self.names.append((parent, name))

    def node(self, ino: int) -> None:
        pass


JOB_A = JobKey(JobKind.SESSION, "n/1@1")
JOB_B = JobKey(JobKind.SESSION, "n/2@2")
SHARED = JobKey(JobKind.RUN_ID, "train-7")


@dataclass
class World:
    """All of it, and shortcuts that do what a kernel would."""

    vfs: Vfs
    spool: SqliteSpool
    catalog: FakeCatalog
    identify: FakeIdentify
    clock: FakeClock
    waker: FakeWaker
    invalidations: FakeInvalidations
    a: Caller = field(default_factory=lambda: Caller(0, 0, 100, may_block=True))
    a2: Caller = field(default_factory=lambda: Caller(0, 0, 101, may_block=True))
    b: Caller = field(default_factory=lambda: Caller(0, 0, 200, may_block=True))
    s: Caller = field(default_factory=lambda: Caller(0, 0, 300, may_block=True))
    outside: Caller = field(default_factory=lambda: Caller(0, 0, 0, may_block=True))

    def walk(self, caller: Caller, path: str) -> Entry:
        ino, entry = ROOT, None
        for part in path.split("/"):
            entry = self.vfs.lookup(caller, ino, part)
            ino = entry.attr.ino
        assert entry is not None
        return entry

    def place(self, caller: Caller, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return (self.walk(caller, folder).attr.ino if folder else ROOT), name

    def exists(self, caller: Caller, path: str) -> bool:
        try:
            self.walk(caller, path)
        except MissingError:
            return False
        return True

    def mkdir(self, caller: Caller, path: str) -> int:
        parent, name = self.place(caller, path)
        return self.vfs.mkdir(caller, parent, name, 0o755).attr.ino

    def open_new(self, caller: Caller, path: str) -> Opened:
        """open(path, "wb"), with the kernel's one retry after ESTALE."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for _ in range(3):
            parent, name = self.place(caller, path)
            try:
                entry = self.vfs.lookup(caller, parent, name)
            except MissingError:
                return self.vfs.create(caller, parent, name, flags, 0o644)[1]
            try:
                return self.vfs.open(caller, entry.attr.ino, flags)
            except CkptError as exc:
                if exc.errno != 116:
                    raise
        raise AssertionError(path)

    def write(self, caller: Caller, path: str, data: bytes) -> None:
        opened = self.open_new(caller, path)
        os.pwrite(opened.fd, data, 0)
        self.close(caller, opened)

    def close(self, caller: Caller, opened: Opened) -> None:
        self.vfs.flush(caller, opened.fh)
        self.vfs.release(opened.fh)

    def read(self, caller: Caller, path: str) -> bytes:
        opened = self.vfs.open(caller, self.walk(caller, path).attr.ino, os.O_RDONLY)
        try:
            if opened.fd < 0:
                return self.vfs.read(caller, opened.fh, 0, 1 << 20)
            return os.pread(opened.fd, 1 << 20, 0)
        finally:
            self.close(caller, opened)

    def unlink(self, caller: Caller, path: str) -> None:
        self.vfs.unlink(caller, *self.place(caller, path))

    def rmdir(self, caller: Caller, path: str) -> None:
        self.again(lambda: self.vfs.rmdir(caller, *self.place(caller, path)))

    def again(self, call: Callable[[], None]) -> None:
        """With the kernel's one retry after ESTALE."""
        try:
            call()
        except CkptError as exc:
            if exc.errno != errno.ESTALE:
                raise
            call()

    def symlink(self, caller: Caller, target: str, path: str) -> int:
        return self.vfs.symlink(caller, *self.place(caller, path), target).attr.ino

    def readlink(self, caller: Caller, path: str) -> str:
        return self.vfs.readlink(caller, self.walk(caller, path).attr.ino)

    def rename(self, caller: Caller, old: str, new: str, flags: int = 0) -> None:
        def call() -> None:
            places = *self.place(caller, old), *self.place(caller, new)
            self.vfs.rename(caller, *places, flags)

        self.again(call)

    def names(self, caller: Caller, path: str = "") -> list[str]:
        ino = self.walk(caller, path).attr.ino if path else ROOT
        fh = self.vfs.opendir(caller, ino)
        found = [entry.name for entry in self.vfs.readdir(caller, fh, 0)]
        self.vfs.releasedir(fh)
        return sorted(name for name in found if name not in {".", ".."})

    def commit(self, run: str, name: str, files: dict[str, bytes], k: int = 0) -> str:
        """Another node's commit of *name*."""
        attempt = f"{name}.{k}"
        view = self.catalog.view(run, 0)
        self.catalog.trees[attempt] = files
        self.catalog.set_view(
            run,
            length=view.length + 3,
            committed={**view.committed, name: attempt},
            names=view.names | {name},
        )
        return attempt

    def commit_own(self, run: str, name: str, k: int = 0) -> AttemptRow:
        """The publisher commits what this spool has at *name*."""
        row = self.attempt(name)
        if row.base is not None:
            self.spool.update_attempt(row.base, state=AttemptState.REPLACED)
        for _, _, file in self.spool.files_of_attempt(row.id):
            if file.state is not FileState.STORED:
                self.spool.update_file(file.file, state=FileState.DIGESTED)
                self.spool.update_file(file.file, state=FileState.STORED)
        view = self.catalog.view(run, 0)
        attempt = f"{name}.{k}"
        row = self.spool.update_attempt(
            row.id, attempt=attempt, state=AttemptState.COMMITTED, seal_index=view.length
        )
        self.commit(run, name, {}, k)
        return row

    def attempt(self, name: str) -> AttemptRow:
        return self.spool.attempts(name=name)[-1]

    def set_pointer(self, run: str, pointer: str, target: str) -> None:
        value = PointerValue(
            pointer=pointer, kind=PointerKind.SYMLINK, target=target, content=target
        )
        view = self.catalog.view(run, 0)
        self.catalog.set_view(run, pointers={**view.pointers, pointer: value})

    def settle(self, name: str) -> None:
        """The publisher has read in the log what is pending under that name."""
        row = next(row for row in self.spool.pending() if row.name == name)
        view = self.catalog.view("", 0)
        with self.spool.transaction():
            settle(self.spool, row, view.pointers[name], view.length)

    def publish_whole(self, name: str) -> None:
        """The publisher stored a whole file of the root directory: now everybody sees it."""
        (row,) = (row for row in self.spool.pending() if row.name == name)
        assert row.ino is not None
        with self.spool.transaction():
            if self.spool.child(row.parent, name) is not None:
                self.spool.unlink(row.parent, name)
            self.spool.link(row.parent, name, row.ino)
            self.spool.update_node(row.ino, plain_path=name)
            self.spool.drop_pending(row.id)

    def die(self, caller: Caller, opened: Opened | None = None) -> None:
        """The process is killed; the kernel closes its file."""
        self.identify.exiting.add(caller.pid)
        if opened is not None:
            self.vfs.flush(caller, opened.fh)
            self.vfs.release(opened.fh)
        self.identify.dead.add(caller.pid)

    def evidence_torn(self, name: str) -> list[bool]:
        files = self.spool.files_of_attempt(self.attempt(name).id)
        return [msgspec.structs.asdict(file.evidence)["is_torn"] for _, _, file in files]


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    spool = SqliteSpool.create_or_open(str(tmp_path / "spool"), store_url="memory://", host="node")
    identify = FakeIdentify()
    identify.add(100, JOB_A)
    identify.add(101, JOB_A)
    identify.add(200, JOB_B)
    identify.add(300, SHARED, RankInfo(0, 2))
    catalog, clock, waker = FakeCatalog(spool), FakeClock(), FakeWaker()
    invalidations = FakeInvalidations()
    vfs = Vfs(
        spool=spool,
        catalog=catalog,
        waker=waker,
        clock=clock,
        patterns=DEFAULT_PATTERNS,
        identify=identify,
        settings=VfsSettings(),
        invalidations=invalidations,
    )
    vfs.start_session(is_takeover=False)
    yield World(vfs, spool, catalog, identify, clock, waker, invalidations)
    spool.close()


__all__ = ["JOB_A", "JOB_B", "ROOT", "SHARED", "LocalBytes", "World"]
