"""Attempts that are in the store and in no log: who will seal them, and what becomes of the others.

It owns the rule that such an attempt is dead only by an ABORT in the log, after which no COMMIT is
possible, and that the ABORT comes only when nobody can seal it any more, or when for a long time
nothing came to it.

Thread rule: one thread at a time; `Reclaimer` guards it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

from ckptgate.engine.node import Node
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.sightings import Graces, Reclaimed, Sightings
from ckptgate.errors import IntegrityError, MissingError, UnusableError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES, Intent, decode, digest_of
from ckptgate.model.entries import Abort, Entry
from ckptgate.model.ids import is_attempt_id
from ckptgate.model.layout import attempts_prefix, intent_key
from ckptgate.model.reclaim import Part, PartKind
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED, AttemptState

__all__ = ["Lost"]

_log = logging.getLogger(__name__)

INTENTS_KEPT: Final = 1024
_GIVEN_UP: Final = frozenset({AttemptState.ABORTED, AttemptState.ABANDONED})


class Lost:
    """Finds and aborts them."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._spool = node.spool
        self._member = node.member
        self._intents: OrderedDict[tuple[str, str], Intent] = OrderedDict()

    def unlogged(self, log: RunLog) -> list[str]:
        """Attempts that the store has and the log doesn't speak of."""
        known = log.look(lambda state: frozenset(state.attempts))
        names = self._store.children(attempts_prefix(log.run))
        return [name for name in names if name not in known and is_attempt_id(name)]

    def abort(
        self,
        log: RunLog,
        unlogged: Collection[str],
        sightings: Sightings,
        graces: Graces,
        *,
        is_dry: bool,
    ) -> Iterator[Reclaimed]:
        """Abort what nobody will seal any more; its bytes go after the next grace."""
        for attempt in tuple(unlogged):
            why = self._why(log, attempt, sightings, graces)
            if not why:
                continue
            if not is_dry:
                self._append_abort(log, attempt, why)
            yield Reclaimed(place="store", run=log.run, what=attempt, why=f"aborted: {why}")

    def intent(self, run: str, attempt: str) -> Intent | None:
        """The attempt's intent, None if it can't be read."""
        known = self._intents.get((run, attempt))
        if known is None:
            key = intent_key(run, attempt)
            try:
                known = decode(self._store.get(key, limit=MAX_DOCUMENT_BYTES), Intent, subject=key)
            except (MissingError, IntegrityError, UnusableError) as exc:
                _log.warning("intent-unreadable key=%s error=%s", key, exc)
                return None
            self._intents[run, attempt] = known
            while len(self._intents) > INTENTS_KEPT:
                self._intents.popitem(last=False)
        return known

    def _why(self, log: RunLog, attempt: str, sightings: Sightings, graces: Graces) -> str:
        """Why nobody will seal the attempt, "" if somebody may."""
        parts = self._store.attempt_parts(log.run, attempt)
        stamp = digest_of(repr(sorted((part.key, part.stamp) for part in parts)).encode())
        age_s = sightings.age_s(f"unlogged:{attempt}", stamp)
        row = self._spool.attempt_by_id(log.run, attempt)
        intent = self.intent(log.run, attempt)
        if intent is None or (row is not None and row.state in UNDECIDED):
            return ""
        if age_s >= graces.grace_s:
            newest = log.look(lambda state: state.generation)
            if intent.is_shared and intent.generation < newest:
                return "a newer incarnation of the job began before its seal"
            if row is not None and row.state in _GIVEN_UP and self._is_alone(parts):
                return row.reason or "given up before its seal"
        if age_s >= max(graces.lost_s, graces.grace_s):
            return "nobody sealed it, and nothing came to it any more"
        return ""

    def _is_alone(self, parts: Collection[Part]) -> bool:
        """Whether no other member takes part."""
        own = f"/{self._member}.json"
        return all(part.key.endswith(own) for part in parts if part.kind is PartKind.MEMBER)

    @staticmethod
    def _append_abort(log: RunLog, attempt: str, why: str) -> None:
        def decide(state: RunState) -> Entry | None:
            return None if attempt in state.attempts else Abort(attempt=attempt, reason=why)

        log.append(decide)
