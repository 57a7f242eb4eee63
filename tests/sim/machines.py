"""A simulated machine: its spool, its clock, and the two processes that share them.

Everything below the store calls is the product's: the publisher with its stager, uploader, voter,
sealer, decider and publication, and a mount's `Vfs` on a `StoreCatalog`. The spool is the real one
on a database in memory, which outlives its processes as a file would; no task is ever interrupted
inside of a transaction, so two processes see each other's changes as they would on a disk.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, cast

from tests.engine_parts import EngineParts, Forgotten
from tests.sim.faults import Network, ProcessStore
from tests.sim.scheduler import Killed, Process, Scheduler, Task, TaskScope
from tests.sim.stand_ins import SimJobs, SimThread
from tests.unit.vfs.conftest import FakeIdentify, World

from ckptgate.engine.settings import PublisherSettings
from ckptgate.errors import CkptError, IntegrityError, TransientStoreError
from ckptgate.model.kinds import DEFAULT_PATTERNS
from ckptgate.ports.spool import Spool
from ckptgate.ports.store import Store
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate.vfs import context
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.creating import CONNECTION_DDL
from ckptgate_adapters.sqlite_spool.generation import Generation
from ckptgate_adapters.sqlite_spool.noted import NOTED_FILE
from ckptgate_adapters.sqlite_spool.removal import Removal, remove

__all__ = [
    "RUN",
    "Machine",
    "MachineClock",
    "Mount",
]

RUN: Final = "run"
START: Final = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
PUBLISHER: Final = PublisherSettings(
    job_wait_s=5.0, digest_threads=1, upload_threads=1, spool_free_min_share=0.0
)
# Looks at the spool while waiting cost real time here; when they come is the scheduler's.
MOUNT: Final = VfsSettings(poll_interval_s=2.0)
IDLE_S_MAX: Final = 400.0
QUESTIONS: Final = frozenset({
    "attempt_by_id", "attempts", "children", "count_children", "files_of_attempt", "handles",
    "handles_of_attempt", "name_ops", "nodes_of_file", "pending", "plain_ops", "rank_commits",
    "tombstones", "tree", "waiting_files", "watched_runs",
})  # fmt: skip
"""Reads of a spool whose answers depend on its database only, rows that nobody can change."""


class MachineClock(ManualClock):
    """The machine's idea of the time of day, which may be off by a day; seconds pass as for all."""

    def __init__(self, scheduler: Scheduler, skew_s: float) -> None:
        super().__init__(start=START + timedelta(seconds=skew_s))
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now_s

    def sleep(self, seconds: float) -> None:
        self._scheduler.pause(seconds)


class _RemovalAtOnce(Removal):
    """The worst order for whoever still needs the bytes; a thread would outlive its seed."""

    def add(self, path: str) -> None:
        remove(path)


class SimSpool(SqliteSpool):
    """The real spool; it remembers which files it named, to remove them after the seed.

    And what it answered: most looks of a publisher find what the last one found, and asking SQLite
    for it took a third of a seed's time.
    """

    def __init__(self, path: str, database: Database) -> None:
        super().__init__(path, database)
        self._removal = _RemovalAtOnce(self._durability.sync)
        self.used: set[str] = set()
        self._answers: dict[Hashable, Any] = {}
        self._answered_at = -1

    def ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of `QUESTIONS`; while nothing is committed the answer is the same."""
        method = getattr(self, name)
        if self._db._depth:
            return method(*args, **kwargs)
        generation = self._db._generation.value()
        if generation != self._answered_at:
            self._answers.clear()
            self._answered_at = generation
        key = (name, args, *kwargs.items())
        if key not in self._answers:
            self._answers[key] = method(*args, **kwargs)
        answer = self._answers[key]
        return answer.copy() if isinstance(answer, list) else answer

    def data_path(self, file: int) -> str:
        path = super().data_path(file)
        self.used.add(path)
        return path

    def remove_files(self) -> None:
        for path in {*self.used, f"{self.path}/{NOTED_FILE}"}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _GuardedSpool:
    """The spool as one process has it: nothing happens there any more once it is killed."""

    def __init__(self, spool: SimSpool, process: Process) -> None:
        self._spool = spool
        self._process = process
        self.on_state: Callable[[Any, object], None] = lambda _row, _state: None

    @property
    def path(self) -> str:
        return self._spool.path

    @contextmanager
    def transaction(self) -> Generator[None]:
        self._check()
        self._process.spool_depth += 1
        try:
            with self._spool.transaction():
                yield
        finally:
            self._process.spool_depth -= 1

    def update_attempt(self, id: int, **changes: object) -> Any:
        self._check()
        row = self._spool.update_attempt(id, **changes)
        if "state" in changes:
            self.on_state(row, changes["state"])
        return row

    def __getattr__(self, name: str) -> Any:
        spool = self._spool
        method = getattr(spool, name)

        def ask(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return spool.ask(name, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return method(*args, **kwargs)

        made = ask if name in QUESTIONS else call
        setattr(self, name, made)
        return made

    def _check(self) -> None:
        if not self._process.is_alive:
            raise Killed


class _Waker:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def wake(self) -> None:
        task = self._machine.publisher_task
        if task is not None:
            self._machine.scheduler.wake(task)


class Mount:
    """One start of a machine's mount."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.process = Process(f"{machine.host}.mount{machine.starts}", is_mount=True)
        self.opened: dict[int, int] = {}
        """Handle -> descriptor of what trainers and readers have open."""
        machine.spool.clear_handles()
        self.spool = machine.guard(self.process)
        parts = machine.parts(self.process, self.spool)
        invalidations = Forgotten()
        known = parts.catalog(invalidations)
        self.vfs = Vfs(
            spool=cast("Spool", self.spool),
            catalog=known,
            waker=_Waker(machine),
            clock=machine.clock,
            patterns=DEFAULT_PATTERNS,
            identify=machine.identify,
            settings=replace(MOUNT, close_delay_s=machine.close_delay_s),
            invalidations=invalidations,
        )
        SimThread.owner = (machine.scheduler, self.process)
        self.vfs._ctx._scope = cast("Any", TaskScope(context._Scope))
        self.vfs.start_session(is_takeover=False)
        self.world = World(
            self.vfs,
            cast("Any", self.spool),
            cast("Any", known),
            machine.identify,
            cast("Any", machine.clock),
            cast("Any", None),
            cast("Any", invalidations),
        )

    def close(self) -> None:
        """The kernel closes its descriptors."""
        for fd in self.opened.values():
            os.close(fd)
        self.opened.clear()


class Machine:
    """One machine; `boot` starts its processes, `publisher` or all may be killed."""

    def __init__(
        self, network: Network, host: str, path: str, skew_s: float, close_delay_s: float
    ) -> None:
        self.close_delay_s = close_delay_s
        self.network = network
        self.scheduler = network.scheduler
        self.host = host
        self.member = f"{host}-{sum(host.encode()):08x}"
        self.clock = MachineClock(self.scheduler, skew_s)
        self.identify = FakeIdentify()
        self.path = path
        self.connection = _database()
        self.used: set[str] = set()
        self._opened: list[SimSpool] = []
        self.spool = self._open()
        self.spool.set_meta("member", self.member)
        self.starts = 0
        self.is_dead = False
        self.cut_until_s = -1.0
        self.held_until_s = 0.0
        self.mount: Mount | None = None
        self.publisher: Any = None
        self.publisher_task: Task | None = None
        self.publisher_process: Process | None = None
        self.on_state: Callable[[Machine, Any, object], None] = lambda _machine, _row, _state: None
        self._ids = 0

    def _open(self) -> SimSpool:
        database = Database(self.connection, f"{self.path}/spool.db", Generation(self.path))
        made = SimSpool(self.path, database)
        made.used = self.used
        self._opened.append(made)
        return made

    def guard(self, process: Process) -> Any:
        made = _GuardedSpool(self.spool, process)
        made.on_state = lambda row, state: self.on_state(self, row, state)
        return made

    def parts(self, process: Process, spool: Any) -> EngineParts:
        """The engine of one process."""
        self._ids += 1
        is_cut = lambda: self.scheduler.now_s < self.cut_until_s  # noqa: E731
        return EngineParts.build(
            store=cast("Store", ProcessStore(self.network, process, is_cut=is_cut)),
            spool=cast("Spool", spool),
            clock=self.clock,
            ids=SeededIds(sum(self.member.encode()) * 1000 + self._ids),
            member=self.member,
            host=self.host,
            is_alive=self.identify.is_alive,
        )

    def boot(self) -> None:
        """The machine comes up."""
        self.starts += 1
        self.start_publisher()
        self.mount = Mount(self)

    def start_publisher(self) -> None:
        """Start the publisher on what its predecessor left."""
        self.spool = self._open()
        process = Process(f"{self.host}.publisher")
        self.publisher_process = process
        self.publisher_task = self.scheduler.spawn(process.name, process, self._publish)

    def _publish(self) -> None:
        process = self.publisher_process
        assert process is not None
        SimJobs.owner = (self.scheduler, process)
        parts = self.parts(process, self.guard(process))
        publisher = parts.publisher(Forgotten(), PUBLISHER)
        publisher._failed = self._watch(publisher._failed)  # type: ignore[method-assign,assignment]
        self.publisher = publisher
        idle = 0
        while True:
            seen = self.network.version
            did = publisher.step()
            idle = 0 if did else idle + 1
            if did:
                self.scheduler.pause(0.01)
            else:
                self._wait_for_work(seen, min(IDLE_S_MAX, 5.0 ** (idle - 2)))

    def _wait_for_work(self, seen: int, limit_s: float) -> None:
        """Looks at a store in which nothing changed find nothing: they are left out.

        Only time can bring something then, so there are some; whoever stages wakes the publisher.
        """
        network, rng, generation = self.network, self.scheduler.rng, self.spool._db._generation
        staged = generation.value()
        is_new = lambda: network.version != seen or generation.value() != staged  # noqa: E731
        self.scheduler.wait_until(is_new, limit_s, is_idle=True)
        self.scheduler.pause(rng.choice([0.0, 0.0, 0.2, 2.0]), is_idle=True)

    def _watch(self, failed: Callable[[str, Exception], None]) -> Callable[[str, Exception], None]:
        """Nothing here is damaged or missing: what the engine calls so is a fault of its own."""

        def told(subject: str, error: Exception) -> None:
            is_expected = isinstance(error, CkptError) and not isinstance(error, IntegrityError)
            if not is_expected and not isinstance(error, TransientStoreError):
                self.scheduler.fail(f"{self.host}: {subject}: {type(error).__name__}: {error}")
            failed(subject, error)

        return told

    def kill_publisher(self) -> None:
        """kill -9; the supervisor starts another one."""
        assert self.publisher_process is not None
        self.publisher_task = None
        self.scheduler.kill(self.publisher_process)

    def crash(self) -> None:
        """Everything on it is gone but its disk."""
        self.kill_publisher()
        self.identify.dead.update(self.identify.processes)
        if self.mount is not None:
            self.scheduler.kill(self.mount.process)
            self.mount.close()
            self.mount = None

    def close(self) -> None:
        if self.mount is not None:
            self.mount.close()
        self.spool.remove_files()
        for spool in self._opened:
            spool.close()
        self.connection.close()


_TEMPLATE: list[bytes] = []


def _database() -> sqlite3.Connection:
    """A new spool's database, in memory."""
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
    )
    if not _TEMPLATE:
        _TEMPLATE.append(_template())
    connection.deserialize(_TEMPLATE[0])
    connection.execute("PRAGMA journal_mode = MEMORY")
    connection.executescript(CONNECTION_DDL)
    return connection


def _template() -> bytes:
    from ckptgate_adapters.sqlite_spool import schema, spool

    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("BEGIN")
    spool._create(connection, "memory:", "sim")
    connection.execute("COMMIT")
    schema.check(connection, "memory")
    return connection.serialize()
