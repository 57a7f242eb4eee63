"""How fast saves go: bytes that were stored lately, by attempt, and who has voted as far as known.

It is kept in memory only: a publisher that was started anew knows it again after its first file.

Thread rule: any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from ckptgate.ports.clock import Clock

__all__ = ["Progress"]

_WINDOW_S: Final = 60.0
_SENT_KEPT: Final = 256
_ATTEMPTS_KEPT: Final = 64
_MEMBERS_KEPT: Final = 4096


@dataclass(frozen=True, slots=True)
class _Sent:
    began_s: float
    ended_s: float
    size: int


@dataclass(slots=True)
class _Known:
    sent: deque[_Sent] = field(default_factory=lambda: deque[_Sent](maxlen=_SENT_KEPT))
    members: dict[str, bool] = field(default_factory=dict[str, bool])


class Progress:
    """What was seen of the saves under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    def stored(self, run: str, attempt: str, size: int, *, began_s: float) -> None:
        """The store has *size* bytes more, on which somebody was since *began_s* (monotonic)."""
        sent = _Sent(began_s, self._clock.monotonic(), size)
        with self._lock:
            self._of(run, attempt).sent.append(sent)

    def votes(self, run: str, attempt: str, members: dict[str, bool]) -> None:
        """Who is registered, and whether that member's vote is final."""
        if len(members) <= _MEMBERS_KEPT:
            with self._lock:
                self._of(run, attempt).members = members

    def rate(self, run: str, attempt: str) -> float | None:
        """Bytes a second that reach the store; None while nothing is known of the last minute."""
        now_s = self._clock.monotonic()
        with self._lock:
            known = self._known.get((run, attempt))
            sent = list(known.sent) if known else []
        recent = [each for each in sent if now_s - each.ended_s < _WINDOW_S]
        if not recent:
            return None
        took_s = now_s - min(each.began_s for each in recent)
        return sum(each.size for each in recent) / max(took_s, 1e-3)

    def members(self, run: str, attempt: str) -> dict[str, bool]:
        """As `votes` was last told; {} where this node has not looked."""
        with self._lock:
            known = self._known.get((run, attempt))
            return known.members if known else {}

    def _of(self, run: str, attempt: str) -> _Known:
        known = self._known.get((run, attempt))
        if known is None:
            known = self._known[run, attempt] = _Known()
            while len(self._known) > _ATTEMPTS_KEPT:
                self._known.popitem(last=False)
        return known
