"""Who fetches which chunk: one thread each, while others that want it wait.

Thread rule: any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

__all__ = ["Claims"]


class Claims:
    """Chunks of files that are being fetched. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[tuple[int, int], threading.Event] = {}

    def take(self, file: int, wanted: Iterable[int]) -> list[int]:
        """Those of *wanted* that nobody else is at; they are the caller's until given back."""
        with self._lock:
            mine = [index for index in wanted if (file, index) not in self._taken]
            for index in mine:
                self._taken[file, index] = threading.Event()
            return mine

    def wait(self, file: int, index: int) -> None:
        """Until whoever is at this chunk now has given it back."""
        with self._lock:
            given_back = self._taken.get((file, index))
        if given_back is not None:
            given_back.wait()

    def give_back(self, file: int, mine: Iterable[int]) -> None:
        """The caller is done with them, whatever came of it."""
        with self._lock:
            for index in mine:
                self._taken.pop((file, index)).set()
