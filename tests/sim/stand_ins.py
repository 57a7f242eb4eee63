"""Locks and thread pools of the product while it is simulated: tasks instead of threads."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from tests.sim.scheduler import Process, Scheduler, TaskLock

from ckptgate.engine import (
    catalog,
    chunks,
    claims,
    events,
    fetch,
    intents,
    jobs,
    membership,
    reclaimer,
    rolls,
    runlog,
    staging,
    uploads,
)
from ckptgate.vfs import closing, context, openfiles
from ckptgate_adapters.sqlite_spool import files

__all__ = ["SimJobs", "SimThread", "simulated_threads"]


class SimJobs:
    """`engine.jobs.Jobs` whose threads are tasks."""

    owner: tuple[Scheduler, Process] | None = None

    def __init__(self, name: str, threads: int, on_end: Callable[[], None]) -> None:
        del threads
        self._on_end = on_end
        assert self.owner is not None
        self._scheduler, self._process = self.owner
        self._name = f"{self._process.name}:{name}"
        self._running: dict[int, tuple[Any, ...]] = {}
        self._ended: dict[int, Any] = {}
        self._queue: list[tuple[int, Callable[[], Any]]] = []
        self._keys: set[Any] = set()
        self._count = 0
        self._has_worker = False

    def has(self, key: Any) -> bool:
        return key in self._keys

    @property
    def room(self) -> int:
        return max(0, jobs.QUEUED_MAX - len(self._keys))

    def submit(self, keys: Iterable[Any], job: Callable[[], Any]) -> None:
        of_job = tuple(keys)
        assert self._keys.isdisjoint(of_job)
        self._keys.update(of_job)
        self._count += 1
        self._running[self._count] = of_job
        self._queue.append((self._count, job))
        if not self._has_worker:
            self._has_worker = True
            self._scheduler.spawn(self._name, self._process, self._work)

    def _work(self) -> None:
        while self._queue:
            number, job = self._queue.pop(0)
            try:
                self._ended[number] = job()
            except Exception as exc:  # noqa: BLE001 -- as a pool does
                self._ended[number] = exc
            self._on_end()
        self._has_worker = False

    def take_done(self, wait_s: float) -> list[tuple[Any, Any]]:
        if self._running:
            self._scheduler.wait_until(lambda: len(self._ended) == len(self._running), wait_s)
        found: list[tuple[Any, Any]] = []
        for number in [number for number in self._running if number in self._ended]:
            keys, outcome = self._running.pop(number), self._ended.pop(number)
            self._keys.difference_update(keys)
            is_error = isinstance(outcome, Exception)
            found += [(key, outcome if is_error else outcome.get(key, False)) for key in keys]
        return found

    def check_cancelled(self) -> None:
        return

    def close(self) -> None:
        return


class SimThread:
    """A thread of a mount that is a task of its process."""

    owner: tuple[Scheduler, Process] | None = None

    def __init__(
        self, *, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool
    ) -> None:
        assert daemon
        self._body = lambda: target(*args)
        self._name = name

    def start(self) -> None:
        assert self.owner is not None
        scheduler, process = self.owner
        scheduler.spawn(f"{process.name}:{self._name}", process, self._body)


class TaskEvent:
    """What `threading.Event` is to threads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float = math.inf) -> bool:
        return self._scheduler.wait_until(lambda: self._is_set, timeout)


@contextmanager
def simulated_threads(scheduler: Scheduler) -> Generator[None]:
    """Locks and thread pools of the engine and the vfs are the scheduler's while this lasts."""
    shim = types.SimpleNamespace(
        Lock=lambda: TaskLock(scheduler),
        RLock=lambda: TaskLock(scheduler),
        Event=lambda: TaskEvent(scheduler),
        Thread=SimThread,
    )
    locking = [
        catalog, chunks, claims, closing, context, events, fetch, intents, membership, openfiles,
        reclaimer, rolls, runlog,
    ]  # fmt: skip
    replaced: list[tuple[Any, str, Any]] = [(module, "threading", shim) for module in locking]
    replaced += [(staging, "Jobs", SimJobs), (uploads, "Jobs", SimJobs)]
    # Which lock a name has must not depend on how Python hashes it in this process.
    replaced += [(catalog, "LOCKS_COUNT", 1)]
    # Each look for strays reads all directories of a spool: one is enough for so few files.
    replaced += [(files, "DATA_FANOUT", 1)]
    saved = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)
