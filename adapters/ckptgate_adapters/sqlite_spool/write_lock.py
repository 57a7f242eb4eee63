"""Waiting for another process's lock on the spool's database, without keeping others from reading.

SQLite's own waiting would keep the lock of this process's one connection. So it is told not to, and
what was in vain is tried again here: by one thread at a time, which has the connection's lock only
while it looks. Thread rule: with the connection's lock, which is given up in between.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, Final

from ckptgate_adapters.sqlite_spool.failures import holder

__all__ = ["BUSY_TIMEOUT_S", "Waits", "is_busy"]

_log = logging.getLogger(__name__)

BUSY_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.001
"""Between looks whether another process has given the write lock back, at first."""
_LONG_PAUSE_S: Final = 0.01
"""The same once it is clear that this is no transaction of ours: those take milliseconds."""
_LONG_S: Final = 0.2


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process's lock was in the way."""
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


class _Patience(threading.local):
    """How long this thread waits for other processes, s."""

    limit_s = math.inf


class Waits:
    """How one connection waits.

    Attributes:
        timeout_s: no thread waits longer.
        is_looking: whether one waits.
    """

    def __init__(self, lock: threading.RLock, path: str) -> None:
        """Prepare for the connection of *lock* to the database *path*."""
        self.timeout_s = BUSY_TIMEOUT_S
        self.is_looking = False
        self._path = path
        # Its waits give the lock up, however often its thread has it.
        self._looked = threading.Condition(lock)
        self._patience = _Patience()

    @contextlib.contextmanager
    def patience(self, limit_s: float) -> Generator[None]:
        """Inside, this thread waits no longer than that."""
        before, self._patience.limit_s = self._patience.limit_s, limit_s
        try:
            yield
        finally:
            self._patience.limit_s = before

    def execute(
        self, connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()
    ) -> sqlite3.Cursor:
        """Execute what another process's lock was in the way of, as soon as it isn't.

        Raises:
            sqlite3.Error: the other's lock stayed for `timeout_s`, or this thread's patience.
        """
        began, limit_s = time.monotonic(), min(self.timeout_s, self._patience.limit_s)
        while self.is_looking and time.monotonic() - began < limit_s:
            self._looked.wait(_LONG_PAUSE_S)
        was_looking, self.is_looking = self.is_looking, True
        try:
            while True:
                try:
                    return connection.execute(sql, values)
                except sqlite3.OperationalError as exc:
                    waited_s = time.monotonic() - began
                    if not is_busy(exc) or waited_s >= limit_s:
                        self._tell(waited_s)
                        raise
                self._looked.wait(_LONG_PAUSE_S if waited_s > _LONG_S else _PAUSE_S)
        finally:
            self.is_looking = was_looking

    def _tell(self, waited_s: float) -> None:
        if waited_s >= self.timeout_s:
            who = holder(self._path) or "unknown"
            _log.warning("spool-locked waited_s=%.0f pid=%s database=%s", waited_s, who, self._path)
