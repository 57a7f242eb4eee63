"""Removing spool files whose rows are gone, once a power loss can't bring those rows back.

It owns the rule: bytes go only after the transaction that dropped their row is durable. Else a
power loss could undo the transaction and not the removal: a name that was replaced by a rename
would have neither its new nor its old bytes. What a kill leaves here is an orphan (`drop_orphans`).

Thread rule: any thread; removals run on a thread of their own, which lives while there are any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from ckptgate.errors import CkptError

__all__ = ["Removal", "remove"]

_log = logging.getLogger(__name__)

_GATHER_S: Final = 0.1
"""One fsync of the journal serves all removals of that time."""


class Removal:
    """The spool files that wait for their removal."""

    def __init__(self, make_durable: Callable[[], None]) -> None:
        """Start nothing yet.

        Args:
            make_durable: returns when all committed transactions survive a power loss.
        """
        self._make_durable = make_durable
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._thread: threading.Thread | None = None
        self._is_urgent = False

    def add(self, path: str) -> None:
        """Remove *path*, soon; the transaction that dropped its row is committed."""
        with self._changed:
            self._waiting.append(path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="removal", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Return when what waits is removed, or can't be."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            self._is_urgent = False

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_urgent, _GATHER_S)
                paths, self._waiting = self._waiting, []
                if not paths:
                    self._thread = None
                    return
            self._remove_all(paths)

    def _remove_all(self, paths: list[str]) -> None:
        try:
            self._make_durable()
        except CkptError as exc:
            _log.error("spool-files-kept count=%d error=%s", len(paths), exc)
            return
        for path in paths:
            remove(path)


def remove(path: str) -> None:
    """Remove a spool file; what can't be removed is an orphan, and no reason to fail."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as exc:
        _log.warning("spool-file-not-removed path=%s error=%s", path, exc)
