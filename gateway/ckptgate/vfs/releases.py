"""Releases of handles, noted for sure.

It owns the rule: the kernel says once that a handle is gone and listens to no error. A release that
the spool can't take (a full disk, a lock) is tried again until it can: else the file would count as
open, and its checkpoint would never be committed. Any thread.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from ckptgate.errors import CkptError
from ckptgate.vfs import handles
from ckptgate.vfs.context import Context

__all__ = ["Releases"]

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


class Releases:
    """What is released, and what is still to be."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._lock = threading.Lock()
        self._waiting: set[int] = set()

    def release(self, fh: int) -> None:
        """The last descriptor of the handle is gone."""
        try:
            with self._ctx.atomic():
                handles.release(self._ctx, fh)
        except CkptError as exc:
            _log.warning("release-not-noted fh=%d error=%s: trying again", fh, exc)
            self._wait_for(fh)

    def again(self) -> None:
        """Try all that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for fh in sorted(waiting):
            self.release(fh)

    def _wait_for(self, fh: int) -> None:
        with self._lock:
            is_first = not self._waiting
            self._waiting.add(fh)
        if is_first:
            timer = threading.Timer(_RETRY_S, self.again)
            timer.daemon = True
            timer.start()
