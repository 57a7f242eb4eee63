"""A whole gateway in one process: name space, spool and publisher; calls as a kernel makes them.

The mount's half and the publisher's half have a connection to the spool each, as the two processes
have. Either can be thrown away at any moment and made anew. Requests have ids and are sent again
after a restart of the mount's half, as the kernel does it. The clock stands still unless moved.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptgate.engine.catalog import StoreCatalog
from ckptgate.engine.events import Events
from ckptgate.engine.membership import Membership
from ckptgate.engine.publisher import Publisher
from ckptgate.engine.runlog import RunLogs
from ckptgate.engine.settings import PublisherSettings
from ckptgate.engine.verify import fold_log, verify_checkpoint
from ckptgate.errors import MissingError
from ckptgate.model.jobkey import JobKey, JobKind, RankInfo
from ckptgate.model.kinds import DEFAULT_PATTERNS
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import ROOT_INO, AttemptRow
from ckptgate.ports.store import PlainKind, Store
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate.vfs.identify import ProcessInfo
from ckptgate.vfs.interface import Caller, Entry, Opened
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.sqlite_spool import SqliteSpool

PID = 4000


def _silent(action: Callable[[Caller], None]) -> Callable[[Caller], bytes]:
    """An action whose reply is empty."""

    def act(caller: Caller) -> bytes:
        action(caller)
        return b""

    return act


class OneJob:
    """Everybody is the process of one shared job; it lives until `is_dead`."""

    def __init__(self) -> None:
        self.is_dead = False

    def process(self, tid: int) -> ProcessInfo:
        return ProcessInfo(PID, 1, JobKey(JobKind.RUN_ID, "train"), RankInfo(0, 1))

    def closer(self, tid: int) -> tuple[ProcessInfo, bool]:
        return self.process(tid), False

    def holds(self, pid: int, ino: int) -> bool:
        return False

    def is_alive(self, pid: int, start: int) -> bool:
        return not self.is_dead


class Nobody:
    """Neither a publisher to wake nor a kernel to tell."""

    def wake(self) -> None:
        return

    def name(self, parent: int, name: str) -> None:
        return

    def node(self, ino: int) -> None:
        return


def _drop(spool: SqliteSpool) -> None:
    """What the kernel closes of a killed process: nothing is finished first."""
    spool._db._connection.close()
    spool._db._generation.close()
    spool._noted.close()


@dataclass
class Half:
    """What one process has."""

    spool: SqliteSpool
    logs: RunLogs
    membership: Membership


@dataclass
class Gateway:
    """One node; see the module."""

    spool_path: Path
    store: Store
    clock: ManualClock = field(default_factory=ManualClock)
    settings: PublisherSettings = field(
        default_factory=lambda: PublisherSettings(
            job_wait_s=20.0, digest_threads=1, upload_threads=1, spool_free_min_share=0.0
        )
    )
    on_open: Callable[[SqliteSpool], None] = lambda spool: None

    def __post_init__(self) -> None:
        path = str(self.spool_path)
        SqliteSpool.create_or_open(path, store_url="test:", host="node").close()
        self.events = Events()
        self.identify = OneJob()
        self.ids = SeededIds(7)
        self.unique = 0
        self.start_publisher()
        self.start_mount(is_takeover=False)

    def _half(self) -> Half:
        spool = SqliteSpool.attach(str(self.spool_path))
        self.on_open(spool)
        member = spool.get_meta("member") or ""
        logs = RunLogs(self.store, clock=self.clock, ids=self.ids, member=member)
        membership = Membership(
            store=self.store, spool=spool, logs=logs, clock=self.clock, ids=self.ids,
            member=member, host="node", events=self.events,
        )  # fmt: skip
        return Half(spool, logs, membership)

    def start_mount(self, *, is_takeover: bool) -> None:
        """Begin a mount process; as a successor it takes over what the kernel has open."""
        half = self._half()
        catalog = StoreCatalog(
            store=self.store, spool=half.spool, logs=half.logs, membership=half.membership,
            clock=self.clock, events=self.events, invalidations=Nobody(),
        )  # fmt: skip
        if not is_takeover:
            half.spool.clear_replies()
            half.spool.clear_handles()
        self.mount = half
        self.vfs = Vfs(
            spool=half.spool, catalog=catalog, waker=Nobody(), clock=self.clock,
            patterns=DEFAULT_PATTERNS, identify=self.identify, invalidations=Nobody(),
        )  # fmt: skip
        self.vfs.start_session(is_takeover=is_takeover)

    def start_publisher(self) -> None:
        """Begin a publisher process."""
        half = self._half()
        self.engine = half
        self.publisher = Publisher(
            store=self.store, spool=half.spool, logs=half.logs, membership=half.membership,
            clock=self.clock, ids=self.ids, member=half.spool.get_meta("member") or "",
            events=self.events, invalidations=Nobody(), settings=self.settings,
        )  # fmt: skip

    def kill_mount(self) -> None:
        """Its transaction is undone; what it has open in the spool is closed."""
        for handle in self.vfs._ctx.memory.files._handles.values():
            if handle.fd >= 0:
                os.close(handle.fd)
        _drop(self.mount.spool)

    def kill_publisher(self) -> None:
        self.publisher.close()
        _drop(self.engine.spool)

    def close(self) -> None:
        self.kill_mount()
        self.kill_publisher()

    def settle(self, rounds: int = 200, tick_s: float = 1.0) -> None:
        """Step the publisher until nothing moves any more."""
        quiet = 0
        for _ in range(rounds):
            did = self.publisher.step()
            self.clock.advance(tick_s)
            quiet = 0 if did else quiet + 1
            if quiet > 12:
                return

    def attempts(self, *states: AttemptState) -> list[AttemptRow]:
        return self.engine.spool.attempts(states=states or None)

    # Calls, as a kernel makes them

    @contextlib.contextmanager
    def request(self) -> Iterator[Caller]:
        """A new request; the same caller again is the same request sent again."""
        self.unique += 1
        yield Caller(os.getuid(), os.getgid(), PID, may_block=True, request=self.unique)

    def once(self, caller: Caller, action: Callable[[Caller], bytes]) -> bytes:
        """As the driver: do it, or give the kept reply of a request that was done."""
        with self.vfs.atomic(caller):
            kept = self.vfs.replay(caller)
            if kept is not None:
                return kept
            reply = action(caller)
            self.vfs.remember(caller, reply)
        return reply

    def _reader(self) -> Caller:
        return Caller(os.getuid(), os.getgid(), PID, may_block=True)

    def walk(self, path: str) -> Entry:
        caller, ino, entry = self._reader(), ROOT_INO, None
        for part in path.split("/"):
            entry = self.vfs.lookup(caller, ino, part)
            ino = entry.attr.ino
        assert entry is not None
        return entry

    def place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return (self.walk(folder).attr.ino if folder else ROOT_INO), name

    def mkdir(self, caller: Caller, path: str) -> None:
        place = self.place(path)
        self.once(caller, lambda c: str(self.vfs.mkdir(c, *place, 0o755).attr.ino).encode())

    def rename(self, caller: Caller, old: str, new: str) -> None:
        places = (*self.place(old), *self.place(new))
        self.once(caller, _silent(lambda c: self.vfs.rename(c, *places, 0)))

    def symlink(self, caller: Caller, target: str, path: str) -> None:
        place = self.place(path)
        self.once(caller, lambda c: str(self.vfs.symlink(c, *place, target).attr.ino).encode())

    def unlink(self, caller: Caller, path: str) -> None:
        place = self.place(path)
        self.once(caller, _silent(lambda c: self.vfs.unlink(c, *place)))

    def commit(self, caller: Caller, path: str) -> None:
        ino = self.walk(path).attr.ino
        name = "user.ckptgate.commit"
        self.once(caller, _silent(lambda c: self.vfs.setxattr(c, ino, name, b"all", 0)))

    def open_new(self, caller: Caller, path: str) -> int:
        """open(path, O_CREAT|O_TRUNC), with the kernel's one retry after ESTALE; the handle."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC

        def make(c: Caller) -> bytes:
            parent, name = self.place(path)
            try:
                entry = self.vfs.lookup(c, parent, name)
            except MissingError:
                return str(self.vfs.create(c, parent, name, flags, 0o644)[1].fh).encode()
            return str(self.vfs.open(c, entry.attr.ino, flags).fh).encode()

        for _ in range(3):
            try:
                return int(self.once(caller, make))
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
        raise AssertionError(path)

    def opened(self, fh: int) -> Opened:
        """The handle's descriptor, taken over from a dead mount if need be."""
        found = self.vfs.reopen(fh)
        assert found is not None, f"handle {fh} is lost"
        return found

    def close_file(self, fh: int) -> None:
        self.vfs.flush(self._reader(), fh)
        self.vfs.release(fh)

    def read(self, path: str) -> bytes:
        caller = self._reader()
        opened = self.vfs.open(caller, self.walk(path).attr.ino, os.O_RDONLY)
        try:
            size = os.fstat(opened.fd).st_size if opened.fd >= 0 else 1 << 20
            if opened.fd >= 0 and not opened.is_complete:
                size = self.walk(path).attr.size
                self.vfs.ensure(caller, opened.fh, 0, size)
            if opened.fd < 0:
                return self.vfs.read(caller, opened.fh, 0, 1 << 20)
            return os.pread(opened.fd, size, 0)
        finally:
            self.vfs.release(opened.fh)

    # What came of it

    def files(self, run: str, name: str) -> dict[str, bytes]:
        """Path -> bytes of a published checkpoint in the store."""
        found: dict[str, bytes] = {}

        def walk(path: str, prefix: str) -> None:
            for entry in self.store.plain_list(path):
                if entry.kind is PlainKind.DIR:
                    walk(f"{path}/{entry.name}", f"{prefix}{entry.name}/")
                elif entry.kind is PlainKind.FILE:
                    data = self.store.plain_read(f"{path}/{entry.name}", 0, entry.size)
                    found[prefix + entry.name] = data

        walk(f"{run}/{name}", "")
        return found

    def outcome(self, run: str) -> dict[str, Any]:
        """Everything that people and trainers see of a run, without ids and times."""
        state = fold_log(self.store, run)
        for name in state.current:
            assert verify_checkpoint(self.store, run, name).problems == ()
        return {
            "committed": {name: self.files(run, name) for name in sorted(state.current)},
            "pointers": {n: f.value.target for n, f in state.pointers.items()},
            "store": {n: self.store.pointer_content(run, n) for n in sorted(state.pointers)},
            "states": sorted(
                (row.name, str(row.state), tuple(p for p, _ in self.engine.spool.tree(row.id)))
                for row in self.attempts()
            ),
            "nameless": len(self.engine.spool.nameless_nodes()),
        }
