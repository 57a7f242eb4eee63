"""How long this gateway has seen something as it is, and how long that must be.

It owns the rule that a grace is judged by one's own time: the seconds that passed while this
gateway ran, counted by its monotonic clock, and of the pause between two of its processes an hour
at most. So neither another machine's clock nor a step of the own one makes anything old.

Thread rule: one thread at a time; its owner guards it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from ckptgate.ports.clock import Clock
from ckptgate.ports.spool import Spool

__all__ = ["Graces", "Reclaimed", "Sightings"]

GAP_S_MAX: Final = 3600.0
"""What a pause between two processes counts at most, whatever the wall clock says."""
_META: Final = "sightings.{scope}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graces:
    """How long what is dead is kept, in seconds.

    Attributes:
        grace_s: what the log says is dead.
        unfinished_s: unfinished writes that don't move any more.
        evidence_s: bytes of aborted and abandoned attempts in the spool.
        lost_s: an attempt of others that nobody sealed and nothing comes to.
    """

    grace_s: float
    unfinished_s: float
    evidence_s: float
    lost_s: float


@dataclass(slots=True, kw_only=True)
class Reclaimed:
    """What went, or would go, of one thing.

    Attributes:
        place: `store` or `spool`.
        run: path in the store.
        what: the attempt, or what else it is.
        why: the reason, for people.
        count: parts of it.
        size: bytes won, as far as it can be told.
    """

    place: str
    run: str
    what: str
    why: str
    count: int = 0
    size: int = 0


class _Kept(msgspec.Struct):
    """As it lies in the spool: seconds observed, wall clock at the last save, first sightings."""

    observed_s: float = 0.0
    at_ns: int = 0
    seen: dict[str, tuple[float, str]] = msgspec.field(default_factory=dict[str, tuple[float, str]])


class Sightings:
    """First sightings of one scope, kept in the spool."""

    def __init__(self, spool: Spool, clock: Clock, scope: str) -> None:
        self._spool = spool
        self._clock = clock
        self._key = _META.format(scope=scope)
        self._kept = _load(spool.get_meta(self._key))
        self._ticked_s = clock.monotonic()
        self._touched: set[str] = set()
        if self._kept.at_ns:
            gap_s = (clock.now_ns() - self._kept.at_ns) / 1e9
            self._kept.observed_s += min(max(0.0, gap_s), GAP_S_MAX)

    def age_s(self, what: str, stamp: str = "") -> float:
        """Seconds since *what* was first seen with this *stamp*; 0 if that is now."""
        age_s = self.known_s(what, stamp)
        if age_s is None:
            self.note(what, stamp)
            return 0.0
        return age_s

    def known_s(self, what: str, stamp: str = "") -> float | None:
        """As `age_s`, but None, and nothing is noted, if it wasn't seen so before."""
        self._tick()
        first_s, known = self._kept.seen.get(what, (0.0, None))
        if known != stamp:
            return None
        self._touched.add(what)
        return self._kept.observed_s - first_s

    def note(self, what: str, stamp: str = "") -> None:
        """*what* is seen with this *stamp* from now on."""
        self._tick()
        self._touched.add(what)
        self._kept.seen[what] = (self._kept.observed_s, stamp)

    def begin_round(self) -> None:
        """From here on it is noted what is asked for."""
        self._touched.clear()

    def end_round(self) -> None:
        """Forget what wasn't asked for since `begin_round`, and save the rest."""
        self._kept.seen = {k: v for k, v in self._kept.seen.items() if k in self._touched}
        self.save()

    def save(self) -> None:
        """Keep it over a restart."""
        self._tick()
        self._kept.at_ns = self._clock.now_ns()
        self._spool.set_meta(self._key, msgspec.json.encode(self._kept).decode())

    def _tick(self) -> None:
        now_s = self._clock.monotonic()
        self._kept.observed_s += max(0.0, now_s - self._ticked_s)
        self._ticked_s = now_s


def _load(text: str | None) -> _Kept:
    try:
        return msgspec.json.decode(text or "{}", type=_Kept)
    except msgspec.MsgspecError:
        # Edited or torn: everything is seen for the first time again.
        return _Kept()
