"""A clock that only moves when told, and ids that repeat with their seed. Any thread."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime, timedelta
from typing import Final

__all__ = ["ManualClock", "SeededIds"]

_START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class ManualClock:
    """`ports.clock.Clock` under a test's control; `sleep` moves it at once."""

    def __init__(self, *, start: datetime = _START) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._elapsed_s = 0.0
        self.slept_s: list[float] = []

    def now(self) -> str:
        """UTC, RFC 3339 with milliseconds."""
        at = self._start + timedelta(seconds=self.monotonic())
        return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"

    def now_ns(self) -> int:
        """Wall-clock ns since the epoch."""
        return int(self._start.timestamp()) * 10**9 + round(self.monotonic() * 10**9)

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        with self._lock:
            return self._elapsed_s

    def sleep(self, seconds: float) -> None:
        """Remember the wish and move on by it, without waiting."""
        with self._lock:
            self.slept_s.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move on."""
        with self._lock:
            self._elapsed_s += seconds


class SeededIds:
    """`ports.clock.Ids` that gives the same ids for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  reproducible, not secret
        self._lock = threading.Lock()

    def write_id(self) -> str:
        """The next id, 32 hex digits."""
        with self._lock:
            return f"{self._random.getrandbits(128):032x}"

    def suffix(self) -> str:
        """The next eight hex digits."""
        with self._lock:
            return f"{self._random.getrandbits(32):08x}"
