"""The memory in which pieces of objects lie: a fixed number of buffers, used again and again.

Touching fresh memory costs more than reading into it. They are made when they are first needed, and
given back to the system once nobody has used one for a while.

Thread rule: any thread.
"""

from __future__ import annotations

import mmap
import threading
import time
from typing import Final

__all__ = ["Buffers"]

IDLE_S: Final = 5.0


class Buffers:
    """All of them.

    Args:
        count: how many there are at most.
        size: bytes of each.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._room = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._spare: list[memoryview] = []
        self._used = 0
        self._last_use = 0.0
        self._is_watched = False

    def take(self) -> memoryview:
        """One of them, the caller's alone until it is given back; waits for it."""
        self._room.acquire()
        return self._taken()

    def take_free(self) -> memoryview | None:
        """`take`, if there is one now."""
        return self._taken() if self._room.acquire(blocking=False) else None

    def _taken(self) -> memoryview:
        with self._lock:
            self._used += 1
            if self._spare:
                return self._spare.pop()
        return memoryview(mmap.mmap(-1, self._size))

    def give_back(self, buffer: memoryview) -> None:
        """The caller, and whoever it gave it to, is done with it."""
        with self._lock:
            self._spare.append(buffer)
            self._used -= 1
            self._last_use = time.monotonic()
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            threading.Thread(target=self._watch, name="buffers", daemon=True).start()
        self._room.release()

    def _watch(self) -> None:
        """Give the memory back, once nobody needs it."""
        wait_s = IDLE_S
        while wait_s > 0:
            time.sleep(wait_s)
            with self._lock:
                wait_s = self._last_use + IDLE_S - time.monotonic()
                if self._used:
                    wait_s = IDLE_S
                elif wait_s <= 0:
                    self._spare.clear()
                    self._is_watched = False
