"""Background jobs of the publisher, each known by a key, and the wait after a failure.

Which jobs run is only a matter of speed: what is to be done is derived from the spool at each pass,
so a job that is lost in a crash is started again.

Thread rule: `Jobs` and `Backoff` belong to the publisher's one thread; jobs run on their own.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ckptgate.ports.clock import Clock

__all__ = ["Backoff", "Cancelled", "Jobs"]

_K = TypeVar("_K", bound=Hashable)

QUEUED_MAX: Final = 512
"""Jobs that are handed out at once (small files end many in one pass); the rest waits."""


class Cancelled(Exception):  # noqa: N818 -- it tells of no error
    """The job was told to stop."""


class Jobs(Generic[_K]):
    """A small pool of threads; at most one job for a key at a time."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: dict[_K, concurrent.futures.Future[None]] = {}
        self._stop = threading.Event()

    def has(self, key: _K) -> bool:
        """Whether a job with that key was submitted and not yet taken with `take_done`."""
        return key in self._running

    def is_full(self) -> bool:
        """Whether no more jobs are taken now."""
        return len(self._running) >= QUEUED_MAX

    def submit(self, key: _K, job: Callable[[], None]) -> None:
        """Start *job* when a thread is free; the key must be free."""
        assert key not in self._running, key
        self._running[key] = self._pool.submit(job)

    def take_done(self, wait_s: float) -> list[tuple[_K, BaseException | None]]:
        """Keys of ended jobs with their error, after waiting up to *wait_s* for all of them."""
        if not self._running:
            return []
        concurrent.futures.wait(self._running.values(), timeout=wait_s)
        done = [key for key, future in self._running.items() if future.done()]
        return [(key, self._running.pop(key).exception()) for key in done]

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
