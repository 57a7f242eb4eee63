"""The real clock and real randomness. Any thread."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime

__all__ = ["SystemClock", "SystemIds"]


class SystemClock:
    """`ports.clock.Clock` on the operating system's clocks."""

    def now(self) -> str:
        """UTC, RFC 3339 with milliseconds."""
        text = datetime.now(UTC).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")

    def now_ns(self) -> int:
        """Wall-clock ns since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class SystemIds:
    """`ports.clock.Ids` from the kernel's random numbers."""

    def write_id(self) -> str:
        """32 hex digits."""
        return secrets.token_hex(16)

    def suffix(self) -> str:
        """8 hex digits."""
        return secrets.token_hex(4)
