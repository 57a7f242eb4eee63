"""The newest of many things that are worth to be remembered. Any thread, and no lock.

A lock that another thread holds while the process forks would stay held in the child; each step
here is one of the dictionary's own.
"""

from __future__ import annotations

import contextlib
from typing import Generic, TypeVar

__all__ = ["Remembered"]

_T = TypeVar("_T")


class Remembered(Generic[_T]):
    """By name, of about the *most* that were kept last; to forget costs time only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, _T] = {}

    def get(self, name: str) -> _T | None:
        """What is known of it, None if nothing."""
        return self._known.get(name)

    def keep(self, name: str, value: _T) -> None:
        """Remember it."""
        self._known[name] = value
        while len(self._known) > self._most:
            # Another thread may have been as quick.
            with contextlib.suppress(StopIteration, RuntimeError):
                self._known.pop(next(iter(self._known)), None)

    def forget(self, name: str) -> None:
        """It isn't so any more."""
        self._known.pop(name, None)
