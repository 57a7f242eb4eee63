"""Whether a mount answers, asked by a process of its own.

A call into a mount whose daemon stands still waits for ever, and whoever makes it can't be killed
then: so it is never made by a process that somebody needs. One that didn't come back is left alone,
and no second one is begun beside it. Any thread.
"""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Final

__all__ = ["MountProbe"]

_WAIT_S: Final = 2.0
_POLL_S: Final = 0.01


class MountProbe:
    """Asks the mount at *mountpoint* for its size, as `df` does."""

    def __init__(self, mountpoint: str) -> None:
        self._command = ("stat", "-f", "-c", "%T", "--", mountpoint)
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def is_usable(self, *, wait_s: float = _WAIT_S) -> bool:
        """Whether it answered within *wait_s*."""
        with self._lock:
            if self._running is None:
                try:
                    self._running = subprocess.Popen(
                        self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        cwd="/",
                    )
                except OSError:
                    return False
            deadline = time.monotonic() + wait_s
            while (code := self._running.poll()) is None:
                if time.monotonic() > deadline:
                    self._running.kill()
                    return False
                time.sleep(_POLL_S)
            self._running = None
            return code == 0
