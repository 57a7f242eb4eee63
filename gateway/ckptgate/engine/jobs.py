"""Background jobs of the publisher, each known by its keys, and the wait after a failure.

Which jobs run is only a matter of speed: what is to be done is derived from the spool at each pass,
so a job that is lost in a crash is started again.

Thread rule: `Jobs` and `Backoff` belong to the publisher's one thread; jobs run on their own.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from ckptgate.ports.clock import Clock

__all__ = ["QUEUED_MAX", "Backoff", "Cancelled", "Jobs", "Outcome"]

_K = TypeVar("_K", bound=Hashable)

Outcome: TypeAlias = bool | Exception
"""What became of a key: whether anything was done for it, or why it failed."""

QUEUED_MAX: Final = 1024
"""Keys that are handed out at once; the rest waits."""


def _nobody() -> None:
    """Whoever submits jobs looks for their ends often enough."""


class Cancelled(Exception):  # noqa: N818 -- it tells of no error
    """The job was told to stop."""


class Jobs(Generic[_K]):
    """A small pool of threads; each job is for some keys, and each key in one job at a time."""

    def __init__(self, name: str, threads: int, on_end: Callable[[], None] = _nobody) -> None:
        """Prepare.

        Args:
            name: of the threads.
            threads: jobs that run at once.
            on_end: called when a job has ended, on its thread: what follows it can be begun.
        """
        self._on_end = on_end
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: dict[concurrent.futures.Future[Mapping[_K, Outcome]], tuple[_K, ...]] = {}
        self._keys: set[_K] = set()
        self._stop = threading.Event()

    def has(self, key: _K) -> bool:
        """Whether a job with that key was submitted and not yet taken with `take_done`."""
        return key in self._keys

    @property
    def room(self) -> int:
        """How many more keys are taken now."""
        return max(0, QUEUED_MAX - len(self._keys))

    def submit(self, keys: Iterable[_K], job: Callable[[], Mapping[_K, Outcome]]) -> None:
        """Start *job* when a thread is free; the keys must be free.

        What it returns holds for the keys that it names, what it raises for all.
        """
        of_job = tuple(keys)
        assert self._keys.isdisjoint(of_job), of_job
        self._keys.update(of_job)
        future = self._pool.submit(job)
        self._running[future] = of_job
        future.add_done_callback(lambda _: self._on_end())

    def take_done(self, wait_s: float) -> list[tuple[_K, bool | BaseException]]:
        """Outcomes of ended jobs by key, after waiting up to *wait_s* for all of them."""
        if not self._running:
            return []
        concurrent.futures.wait(self._running, timeout=wait_s)
        found: list[tuple[_K, bool | BaseException]] = []
        for future in [future for future in self._running if future.done()]:
            keys = self._running.pop(future)
            self._keys.difference_update(keys)
            error = future.exception()
            if error is not None:
                found += [(key, error) for key in keys]
                continue
            outcomes = future.result()
            found += [(key, outcomes.get(key, False)) for key in keys]
        return found

    def check_cancelled(self) -> None:
        """Called by jobs between steps; raises Cancelled once `close` was called."""
        if self._stop.is_set():
            raise Cancelled

    def close(self) -> None:
        """Tell the jobs to stop and wait for them."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True)
class _Wait:
    until: float
    delay_s: float


class Backoff(Generic[_K]):
    """After a failure of something, when to try it again."""

    def __init__(self, clock: Clock, first_s: float, max_s: float) -> None:
        self._clock = clock
        self._first_s = first_s
        self._max_s = max_s
        self._waits: dict[_K, _Wait] = {}

    def is_due(self, key: _K) -> bool:
        """Whether it never failed, or its wait is over."""
        wait = self._waits.get(key)
        return wait is None or self._clock.monotonic() >= wait.until

    def failed(self, key: _K) -> None:
        """It failed: wait, twice as long as last time."""
        wait = self._waits.get(key)
        delay = self._first_s if wait is None else min(self._max_s, wait.delay_s * 2)
        self._waits[key] = _Wait(self._clock.monotonic() + delay, delay)

    def succeeded(self, key: _K) -> None:
        """It works again."""
        self._waits.pop(key, None)
