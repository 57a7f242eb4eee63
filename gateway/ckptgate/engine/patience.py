"""How long an attempt has been waited for, and how often it is looked at.

It owns the rule that only time counts in which the store answered: a long outage is no reason to
give up what can be finished after it. After a restart the wait goes on where the spool's time
stamps put it, but never begins at its end.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from ckptgate.ports.clock import Clock

__all__ = ["Patience"]

_SHARE_AT_START_MAX: Final = 0.9
_SHARE_OF_A_GAP_MAX: Final = 0.25
_SHARE_OF_A_STALL: Final = 0.05
MEMBERS_FEW: Final = 8
"""So few are looked at in every pass."""
MEMBERS_PER_SECOND: Final = 500
"""How many members' votes are looked for in a second, at most."""


@dataclass(slots=True)
class _Wait:
    seen_s: float
    stalled_s: float
    looked_at: float
    progress: Hashable = None
    pause_s: float = 0.0


class Patience:
    """Times of the attempts that wait for a decision."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._waits: dict[tuple[str, str], _Wait] = {}

    def look(self, key: tuple[str, str], since_ns: int) -> None:
        """The store answers and the attempt isn't decided: count the time since the last look.

        Args:
            key: run and attempt.
            since_ns: when its SEAL was first seen here (wall clock, ns), 0 where unknown.
        """
        now = self._clock.monotonic()
        wait = self._waits.get(key)
        if wait is None:
            past = max(0.0, (self._clock.now_ns() - since_ns) / 1e9) if since_ns else 0.0
            past = min(past, self._deadline_s * _SHARE_AT_START_MAX)
            self._waits[key] = _Wait(seen_s=past, stalled_s=past, looked_at=now)
            return
        gap = min(now - wait.looked_at, self._deadline_s * _SHARE_OF_A_GAP_MAX)
        wait.looked_at = now
        wait.seen_s += gap
        wait.stalled_s += gap
        wait.pause_s -= gap

    def is_due(self, key: tuple[str, str]) -> bool:
        """Whether its votes may be looked for again."""
        return self._waits[key].pause_s <= 0

    def looked(self, key: tuple[str, str], members: int, progress: Hashable) -> None:
        """Its votes were read: the more members, the longer the next look waits.

        A changed *progress* (what the votes were) begins the wait for the deadline anew.
        """
        wait = self._waits[key]
        crowd_s = max(members / MEMBERS_PER_SECOND, _SHARE_OF_A_STALL * wait.stalled_s)
        wait.pause_s = crowd_s if members > MEMBERS_FEW else 0.0
        if wait.progress is not None and wait.progress != progress:
            wait.stalled_s = 0.0
        wait.progress = progress

    def seen_s(self, key: tuple[str, str]) -> float:
        """Seconds since its SEAL was first seen here."""
        return self._waits[key].seen_s

    def stalled_s(self, key: tuple[str, str]) -> float:
        """Seconds without any progress."""
        return self._waits[key].stalled_s

    def forget(self, key: tuple[str, str]) -> None:
        """It is decided."""
        self._waits.pop(key, None)
