"""Time and randomness, so that the core is deterministic under test."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock", "Ids"]


class Clock(Protocol):
    """Time. Any thread."""

    def now(self) -> str:
        """UTC wall-clock time, RFC 3339 with milliseconds and `Z`; informative only."""
        ...

    def now_ns(self) -> int:
        """Wall-clock time in ns since the epoch, for file times."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for deadlines."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Ids(Protocol):
    """Randomness. Any thread."""

    def write_id(self) -> str:
        """A new unique id for one write, 32 hex digits."""
        ...

    def suffix(self) -> str:
        """Eight random hex digits."""
        ...
