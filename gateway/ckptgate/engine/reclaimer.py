"""When reclaiming happens: a little at a time by the publisher, all at once when somebody asks.

It owns the rule that reclaiming never stands in the way: a round is rare, its work is done in
pieces between the publisher's other steps, and what fails is tried again at the next round. What
went is recorded.

Thread rule: `step` belongs to the publisher's thread, `sweep` to any; one of them at a time works.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ckptgate.engine.node import Node
from ckptgate.engine.reclaim import StoreReclaimer
from ckptgate.engine.reclaim_spool import SpoolReclaimer
from ckptgate.engine.sightings import Graces, Reclaimed
from ckptgate.errors import CkptError

__all__ = ["Reclaimer"]

_log = logging.getLogger(__name__)

ROUND_S_MAX: Final = 3600.0
ROUND_S_MIN: Final = 5.0
"""Between rounds, also where a log has changed."""
_ROUNDS_IN_A_GRACE: Final = 4
_PAUSE_FACTOR: Final = 100
"""A round over very long logs takes its time: it is done less often then."""
_BUDGET_S: Final = 0.1
"""What one step may take before the publisher's other work goes on."""


class Reclaimer:
    """Removes what nothing refers to any more, in the store and in the spool."""

    def __init__(self, node: Node, runs: Callable[[], list[str]]) -> None:
        self._node = node
        self._runs = runs
        self._clock = node.clock
        settings = node.settings
        self._graces = Graces(
            grace_s=settings.reclaim_grace_s,
            unfinished_s=settings.reclaim_grace_s,
            evidence_s=settings.keep_aborted_s,
            lost_s=settings.lost_after_s,
        )
        self._store = StoreReclaimer(node)
        self._spool = SpoolReclaimer(node)
        self._lock = threading.Lock()
        self._work: Iterator[Reclaimed] | None = None
        self._lengths: dict[str, int] = {}
        self._interval_s = min(
            ROUND_S_MAX, max(ROUND_S_MIN, settings.reclaim_grace_s / _ROUNDS_IN_A_GRACE)
        )
        began_s = node.clock.monotonic()
        self._soonest_s = began_s + ROUND_S_MIN
        self._due_s = began_s + self._interval_s

    def step(self) -> bool:
        """Do a piece of a round, if one is due; True if anything was removed.

        Raises:
            CkptError: the store failed; the same is due at the next round.
        """
        now_s = self._clock.monotonic()
        if (self._work is None and not self._is_due(now_s)) or not self._lock.acquire(
            blocking=False
        ):
            return False
        try:
            return self._continue(now_s)
        finally:
            self._lock.release()

    def sweep(
        self, run: str | None, *, grace_s: float | None = None, is_dry: bool = False
    ) -> list[Reclaimed]:
        """A whole round at once, over *run* or over everything, and what went.

        Args:
            run: its path; None for all runs, plain directories and left-overs of crashes.
            grace_s: instead of the configured graces of what the log says is dead, and of what
                was given up here; unfinished writes and what others may still seal keep theirs.
            is_dry: change nothing, say what would go.

        Raises:
            CkptError: the store failed; what was removed until then is gone.
        """
        graces = self._graces
        if grace_s is not None:
            graces = dataclasses.replace(graces, grace_s=grace_s, evidence_s=grace_s)
        runs = self._runs() if run is None else [run]
        found: dict[tuple[str, str, str, str], Reclaimed] = {}
        with self._lock:
            for done in self._rounds(runs, graces, is_dry=is_dry, is_asked=True, only=run):
                key = (done.place, done.run, done.what, done.why)
                into = found.setdefault(key, dataclasses.replace(done, count=0, size=0))
                into.count += done.count
                into.size += done.size
        if not is_dry:
            self._tell(found.values())
        return list(found.values())

    def _is_due(self, now_s: float) -> bool:
        if now_s < self._soonest_s:
            return False
        # A look at the logs' lengths is all that an idle publisher does here.
        self._soonest_s = now_s + ROUND_S_MIN
        return now_s >= self._due_s or self._lengths != self._lengths_now()

    def _lengths_now(self) -> dict[str, int]:
        logs = self._node.logs
        return {run: logs.get(run).look(lambda state: state.length) for run in self._runs()}

    def _continue(self, now_s: float) -> bool:
        if self._work is None:
            self._lengths = self._lengths_now()
            self._due_s = now_s + self._interval_s
            self._work = self._rounds(self._runs(), self._graces, is_dry=False, is_asked=False)
        did: list[Reclaimed] = []
        try:
            for done in self._work:
                did.append(done)
                if self._clock.monotonic() - now_s >= _BUDGET_S:
                    return True
            self._work = None
        except CkptError:
            self._work = None
            raise
        finally:
            self._tell(did)
        took_s = self._clock.monotonic() - now_s
        self._soonest_s = now_s + max(ROUND_S_MIN, _PAUSE_FACTOR * took_s)
        return bool(did)

    def _rounds(
        self,
        runs: Iterable[str],
        graces: Graces,
        *,
        is_dry: bool,
        is_asked: bool,
        only: str | None = None,
    ) -> Iterator[Reclaimed]:
        """Runs, then plain directories, then the spool; one that fails stops no other."""
        failure: CkptError | None = None
        rounds = [self._store.round(run, graces, is_dry=is_dry, is_full=is_asked) for run in runs]
        if only is None:
            rounds.append(self._store.plain_round(graces, is_dry=is_dry, is_full=is_asked))
        rounds.append(self._spool.round(graces, run=only, is_dry=is_dry))
        for part in rounds:
            try:
                yield from part
            except CkptError as exc:
                failure = failure or exc
        if failure is not None:
            raise failure

    def _tell(self, done: Iterable[Reclaimed]) -> None:
        """One event for each run and place."""
        groups: dict[tuple[str, str], list[Reclaimed]] = {}
        for item in done:
            groups.setdefault((item.place, item.run), []).append(item)
        for (place, run), items in groups.items():
            what = ", ".join(sorted({f"{item.what} ({item.why})" for item in items}))
            count, size = sum(item.count for item in items), sum(item.size for item in items)
            detail = f"{count} files, {size} bytes in the {place}: {what}"
            self._node.events.record("reclaimed", run or "/", detail)
