"""A deterministic scheduler: tasks of simulated processes, one of which runs at a time.

Each task is a greenlet. It runs until it calls `pause` (every store call does, and every sleep),
and the seeded random generator says who goes on; time moves only when nobody is ready. So one seed
is one history, and the recorded trace of two runs with it is equal. One thread.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any, Final

from greenlet import getcurrent, greenlet

__all__ = [
    "BrokenError",
    "Halted",
    "Killed",
    "Process",
    "Scheduler",
    "Task",
    "TaskLock",
    "TaskScope",
]

STEPS_MAX: Final = 20_000
"""Turns after which a simulation is said to go round in circles."""
STYLES: Final = ("uniform", "sticky", "priority")
_STICKS: Final = 0.85
_REORDERS: Final = 0.03


class BrokenError(AssertionError):
    """Something that must hold did not; the message says what."""


class Killed(BaseException):
    """kill -9 of the process that this task is part of."""


class Halted(BaseException):
    """The simulation is over."""


class Process:
    """What is killed as a whole."""

    def __init__(self, name: str, *, is_mount: bool = False) -> None:
        self.name = name
        self.is_mount = is_mount
        self.is_alive = True
        self.tasks: list[Task] = []
        self.spool_depth = 0
        """Transactions of its spool that are begun and not ended."""


class Task:
    """One flow of control."""

    __slots__ = ("gate", "greenlet", "is_idle", "name", "priority", "process", "wake_s")

    def __init__(
        self, name: str, process: Process, body: Callable[[], None], parent: greenlet
    ) -> None:
        self.name = name
        self.process = process
        self.wake_s = 0.0
        self.priority = 0.0
        self.gate: Callable[[], bool] | None = None
        """What it waits for, until `wake_s` at most."""
        self.is_idle = False
        """It waits for nothing but time, and can be woken."""
        self.greenlet = greenlet(body, parent)

    @property
    def is_over(self) -> bool:
        return self.greenlet.dead or not self.process.is_alive


class TaskLock:
    """A re-entrant lock between tasks: who finds it taken lets the others run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.owner: object = None
        self._depth = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        me = getcurrent()
        if self.owner is not None and self.owner is not me:
            if not blocking:
                return False
            self._scheduler.wait_until(lambda: self.owner is None)
        self.owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.owner = None

    def __enter__(self) -> TaskLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class TaskScope:
    """To tasks what `threading.local` is to threads; for the vfs's scope of a mutation."""

    def __init__(self, make: Callable[[], object]) -> None:
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "_scopes", {})

    def _scope(self) -> object:
        me = id(getcurrent())
        if me not in self._scopes:
            self._scopes[me] = self._make()
        return self._scopes[me]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scope(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._scope(), name, value)


class Scheduler:
    """Who runs next, what time it is, and what happened so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.style = rng.choice(STYLES)
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.late: list[tuple[str, Callable[[], None]]] = []
        """Requests that are on their way though their callers have given them up."""
        self.late_share = rng.choice([0.01, 0.05, 0.3])
        self.failure: BrokenError | None = None
        self.steps = 0
        self.trace: list[str] = []
        self._main = getcurrent()
        self._has_dead = False

    # For the inside of tasks

    def pause(self, seconds: float = 0.0, *, is_idle: bool = False) -> None:
        """Let others run, for that much of simulated time at least."""
        task = self.current
        if task is None or getcurrent() is not task.greenlet:
            # Before the start and after the end nobody else can run.
            self.now_s += seconds
            return
        if task.process.spool_depth:
            self.fail(f"{task.name} waits inside a transaction of the spool")
        task.wake_s = self.now_s + seconds
        task.is_idle = is_idle
        self._main.switch()

    def wait_until(
        self, gate: Callable[[], bool], limit_s: float = math.inf, *, is_idle: bool = False
    ) -> bool:
        """Let others run until *gate* says so, or so many seconds; whether it does.

        An idle wait also ends when the task is woken.
        """
        task = self.current
        assert task is not None, "who waits here waits for ever"
        deadline_s = self.now_s + limit_s
        while not gate() and self.now_s < deadline_s:
            task.gate = gate
            self.pause(deadline_s - self.now_s, is_idle=is_idle)
            task.gate = None
            if is_idle:
                break
        return gate()

    def fail(self, what: str) -> None:
        """End the simulation: an invariant is broken."""
        if self.failure is None:
            self.failure = BrokenError(what)
            self.note(f"!!! {what}")
        raise Halted(what)

    def note(self, line: str) -> None:
        """Add to the trace."""
        who = self.current.name if self.current is not None else "-"
        self.trace.append(f"{self.now_s:.3f} {who}: {line}")

    def digest(self) -> str:
        """Of the trace so far."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=16).hexdigest()

    # For everybody

    def spawn(self, name: str, process: Process, body: Callable[[], None]) -> Task:
        """A new task; it runs when it is chosen."""
        task = Task(name, process, lambda: self._body(body), self._main)
        task.wake_s = self.now_s
        task.priority = self.rng.random()
        self.tasks.append(task)
        process.tasks.append(task)
        return task

    def wake(self, task: Task) -> None:
        """End its idle wait."""
        if task.is_idle:
            task.wake_s = min(task.wake_s, self.now_s)

    def kill(self, process: Process) -> None:
        """kill -9: its tasks never do anything again."""
        process.is_alive = False
        self._has_dead = True

    def hold(self, process: Process, seconds: float) -> None:
        """The process stands still that long (SIGSTOP, a suspended machine)."""
        for task in process.tasks:
            if task is not self.current:
                task.wake_s = max(task.wake_s, self.now_s) + seconds
                task.is_idle = False

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let tasks run until *is_over* or nobody is left.

        Raises:
            BrokenError: an invariant is broken.
        """
        while self.tasks and not is_over():
            self.steps += 1
            if self.steps > STEPS_MAX:
                self.failure = BrokenError(f"no end after {STEPS_MAX} turns")
            if self.failure is not None:
                raise self.failure
            self._bury()
            if self.late and self.rng.random() < self.late_share:
                self.land(self.rng.randrange(len(self.late)))
                continue
            task = self._next()
            if task is not None:
                self._resume(task)
        if self.failure is not None:
            raise self.failure

    def land(self, index: int) -> None:
        """A late request arrives."""
        self.current = None
        _, call = self.late.pop(index)
        try:
            call()
        except Halted:
            assert self.failure is not None
            raise self.failure from None

    def close(self) -> None:
        """End all tasks."""
        self.current = None
        for task in self.tasks:
            self.kill(task.process)
        self._bury()

    # Inside

    def _body(self, body: Callable[[], None]) -> None:
        try:
            body()
        except (Killed, Halted):
            pass
        except BaseException as exc:  # noqa: BLE001 -- whatever it is, it belongs to this seed
            if self.failure is None:
                self.failure = BrokenError(f"{type(exc).__name__}: {exc}")
                self.failure.__cause__ = exc

    def _next(self) -> Task | None:
        """Who runs now; None: time moved on."""
        now_s = self.now_s
        ready = [task for task in self.tasks if task.wake_s <= now_s or (task.gate and task.gate())]
        if not ready:
            earliest_s = min(task.wake_s for task in self.tasks)
            if earliest_s == math.inf:
                self.failure = BrokenError("all tasks wait for each other")
            else:
                self.now_s = earliest_s
            return None
        if len(ready) == 1:
            return ready[0]
        if self.style == "sticky" and self.current in ready and self.rng.random() < _STICKS:
            return self.current
        if self.style == "priority":
            if self.rng.random() < _REORDERS:
                self.rng.choice(ready).priority = self.rng.random()
            return max(ready, key=lambda task: task.priority)
        return ready[self.rng.randrange(len(ready))]

    def _resume(self, task: Task) -> None:
        self.current = task
        task.greenlet.switch()
        if task.greenlet.dead:
            self._forget(task)

    def _bury(self) -> None:
        """End the tasks of killed processes: nothing that they do has an effect any more."""
        if not self._has_dead:
            return
        self._has_dead = False
        for task in [task for task in self.tasks if not task.process.is_alive]:
            self.current = task
            if task.greenlet:
                task.greenlet.throw(Killed)
            self._forget(task)
        self.current = None

    def _forget(self, task: Task) -> None:
        if task in self.tasks:
            self.tasks.remove(task)
            task.process.tasks.remove(task)
