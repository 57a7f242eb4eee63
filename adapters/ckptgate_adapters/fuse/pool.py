"""Threads for requests that wait: for the store, for other machines, for the disk.

Owns the rule that work which has not begun can be taken back, by its key.
Any thread; threads are started when they are needed and never hold up the end of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Pool"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    task: Callable[[], None]
    can_cancel: bool


class Pool:
    """At most *size* threads working on jobs in the order of their arrival."""

    def __init__(self, size: int, *, name: str = "fuse-pool") -> None:
        self._size = size
        self._name = name
        self._changed = threading.Condition()
        self._queue: OrderedDict[int, _Job] = OrderedDict()
        self._threads = 0
        self._idle = 0
        self._is_closed = False

    def submit(self, key: int, task: Callable[[], None], *, can_cancel: bool = True) -> None:
        """Queue *task*. A *key* is never used again."""
        with self._changed:
            self._queue[key] = _Job(task, can_cancel)
            if self._idle < len(self._queue) and self._threads < self._size:
                self._threads += 1
                threading.Thread(
                    target=self._work, name=f"{self._name}-{self._threads}", daemon=True
                ).start()
            else:
                self._changed.notify()

    def is_queued(self, key: int) -> bool:
        """Whether the job waits for a thread."""
        with self._changed:
            return key in self._queue

    def cancel(self, key: int) -> bool:
        """Take a queued job back; False if it runs, is done, must run, or is not queued."""
        with self._changed:
            job = self._queue.get(key)
            if job is None or not job.can_cancel:
                return False
            del self._queue[key]
            return True

    def close(self, timeout_s: float) -> bool:
        """Let everything queued finish, for *timeout_s* at most; whether it did."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._threads:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
            return True

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._queue:
                if self._is_closed:
                    self._threads -= 1
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return self._queue.popitem(last=False)[1].task

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - the outermost edge of a thread: one job must not end it
                _log.exception("pool-job-failed")
