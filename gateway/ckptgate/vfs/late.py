"""Handles of readers that the spool takes later, as another process is changing it for long.

Owns the rule: who only reads doesn't wait for a change. A reader's row serves the successor of this
process, and keeps its copy from being given up: neither is worth a stop of all that read. It is
tried again until it is there, or the handle is released. Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ckptgate.errors import CkptError
from ckptgate.ports.spool import HandleRow

__all__ = ["READER_WAIT_S", "LateRows"]

_log = logging.getLogger(__name__)

READER_WAIT_S: Final = 0.05
"""So long an open waits: other processes' changes mostly take less."""
_RETRY_S: Final = 0.5


class LateRows:
    """Rows that are still to be added."""

    def __init__(self, add: Callable[[list[HandleRow]], None]) -> None:
        """Prepare; *add* is one transaction, and leaves out what is released by then."""
        self._add = add
        self._lock = threading.Lock()
        self._waiting: list[HandleRow] = []

    def put(self, row: HandleRow) -> None:
        """Add this one as soon as it can be."""
        with self._lock:
            self._waiting.append(row)
            if len(self._waiting) > 1:
                return
        self._start()

    def _start(self) -> None:
        timer = threading.Timer(_RETRY_S, self._try)
        timer.daemon = True
        timer.start()

    def _try(self) -> None:
        with self._lock:
            rows = list(self._waiting)
        try:
            self._add(rows)
        except CkptError as exc:
            _log.warning("handles-not-noted count=%d error=%s: trying again", len(rows), exc)
            rows = []
        with self._lock:
            self._waiting = [row for row in self._waiting if row not in rows]
            is_done = not self._waiting
        if not is_done:
            self._start()
