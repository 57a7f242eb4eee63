"""Closes that are answered at once and taken into the spool a moment later, many at once.

Owns the rule: nothing is built on a state that a noted close will still change. So every change
takes the noted ones over first, in its own transaction, and where no change comes a thread does so
after `close_delay_s`. A noted close survives kill -9 (`spool.note_close`); the successor of this
process takes it over at its start. Any thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckptgate.ports.spool import HandleRow, Spool
from ckptgate.vfs.who import Who

__all__ = ["Closes", "NotedClose"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class NotedClose:
    """A handle that was closed, released, or both.

    Attributes:
        row: as the spool keeps it.
        is_closed: its opener closed it since its row was written.
        is_released: its last descriptor is gone.
        who: the process that closed it, where it is known.
        found: of a writer's, the spool file's stat when its last descriptor went.
    """

    row: HandleRow
    is_closed: bool
    is_released: bool
    who: Who | None = None
    found: os.stat_result | None = None

    def join(self, other: NotedClose) -> None:
        """What is noted of the same handle is true as well."""
        self.is_closed = self.is_closed or other.is_closed
        self.is_released = self.is_released or other.is_released
        self.who = self.who or other.who
        self.found = self.found or other.found


class Closes:
    """The noted closes of this process."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self._noted: dict[int, NotedClose] = {}
        self._wanted = threading.Event()
        self._is_started = False
        self._takes = 0

    def start(self, apply: Callable[[], None], delay_s: float) -> None:
        """Have *apply* called, which makes any change, *delay_s* after a close was noted."""
        self._is_started = True
        threading.Thread(
            target=self._run, args=(apply, delay_s), name="closes", daemon=True
        ).start()

    def note(self, item: NotedClose) -> bool:
        """Note a close or release; False: the caller has to change the spool itself."""
        if not self._is_started:
            return False
        with self._lock:
            known = self._noted.get(item.row.fh)
            if known is not None:
                item.join(known)
            if not self._spool.note_close(item.row.fh, is_released=item.is_released):
                return False
            self._noted[item.row.fh] = item
            if known is None and not self._wanted.is_set():
                self._wanted.set()
        return True

    def has_any(self) -> bool:
        """Whether anything waits to be taken over."""
        return bool(self._noted)

    def take(self) -> list[NotedClose]:
        """All that is noted, for a transaction that takes it over, or gives it back."""
        if not self._noted:
            return []
        with self._lock:
            taken = list(self._noted.values())
            self._noted.clear()
            self._takes += 1
        return taken

    def give_back(self, taken: list[NotedClose]) -> None:
        """The transaction was undone."""
        with self._lock:
            for item in taken:
                newer = self._noted.get(item.row.fh)
                if newer is not None:
                    item.join(newer)
                self._noted[item.row.fh] = item
            if taken:
                self._wanted.set()

    def done(self, taken: list[NotedClose]) -> None:
        """The transaction was committed."""
        with self._lock:
            for item in taken:
                if item.row.fh not in self._noted:
                    self._spool.forget_close(item.row.fh)

    def _run(self, apply: Callable[[], None], delay_s: float) -> None:
        pause = threading.Event()
        while True:
            self._wanted.wait()
            self._wanted.clear()
            while self._noted:
                takes = self._takes
                pause.wait(delay_s)
                if takes != self._takes:
                    # Changes come anyway and take all of them: what is left is younger.
                    continue
                try:
                    apply()
                except OSError as exc:
                    _log.warning("closes-not-taken-over reason=%s", exc)
                    pause.wait(1.0)
