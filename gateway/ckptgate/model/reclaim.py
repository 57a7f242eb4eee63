"""What of a run may be removed from its store, and why: all of reclaiming that is a decision.

Owns three rules. What a COMMIT names stays while its attempt isn't reclaimed by the log; a RECLAIM
comes only after the grace, for what is replaced or retired. An attempt's bytes that no manifest of
an unreclaimed attempt names are garbage once it is decided: nothing can come to name them any more,
because a COMMIT names bytes of its own attempt or of its base only, and a reclaimed base is
refused. So a plan that is old by the time it is carried out removes nothing that is needed then.
And what isn't one of our own names isn't ours.

Ages are in seconds, as the planning gateway itself has observed; no clock of another one counts.
Pure; any thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import RefusedError
from ckptgate.model.documents import Manifest
from ckptgate.model.entries import Reclaim
from ckptgate.model.rules import AttemptPhase, AttemptView, RunState

__all__ = [
    "Part",
    "PartKind",
    "Why",
    "doomed",
    "garbage",
    "named_by",
    "namers",
    "revisions_of",
    "standing",
]


class Why(enum.StrEnum):
    """How an attempt stands; all but `UNDECIDED` and `LIVE` are reasons to remove it."""

    UNDECIDED = "undecided"
    LIVE = "live"
    ABORTED = "aborted"
    REPLACED = "replaced"
    RETIRED = "retired"


class PartKind(enum.StrEnum):
    """What an attempt has in the store, in the order in which it goes."""

    TREE = "tree"
    """A published directory that was moved away, or one that was never put in place."""
    DATA = "data"
    CHUNKS = "chunks"
    NAME_OP = "name-op"
    VOTE = "vote"
    MEMBER = "member"
    MANIFEST = "manifest"
    UNFINISHED = "unfinished"
    """A write that was never completed."""


_ORDER: Final = {kind: number for number, kind in enumerate(PartKind)}
_ALWAYS_KEPT: Final = frozenset({PartKind.NAME_OP, PartKind.VOTE, PartKind.MEMBER})
"""What a checkpoint that is still there keeps beside its bytes: who took part, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something of an attempt that may be removed by itself.

    Attributes:
        key: below the run's directory.
        kind: what it is.
        size: bytes that the store would win, as far as it can tell before.
        stamp: differs whenever it was changed.
    """

    key: str
    kind: PartKind
    size: int
    stamp: str = ""


def standing(state: RunState, attempt: str) -> Why:
    """How the attempt stands in the log."""
    view = state.attempts.get(attempt)
    if view is None:
        return Why.UNDECIDED
    if view.state is AttemptPhase.ABORTED:
        return Why.ABORTED
    if view.state is not AttemptPhase.COMMITTED:
        return Why.UNDECIDED
    if state.current.get(view.name) == attempt:
        return Why.LIVE
    return Why.RETIRED if state.retired.get(view.name) == attempt else Why.REPLACED


def doomed(
    state: RunState, ages: Mapping[str, float], grace_s: float, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """The attempts for whose bytes a RECLAIM is due, oldest first.

    Args:
        state: the run as its log says.
        ages: attempt -> seconds since it was first seen to stand as it does.
        grace_s: seconds that must have passed.
        kept: attempts that somebody here still uses, or revises.
    """
    found: list[str] = []
    for attempt, view in state.attempts.items():
        why = standing(state, attempt)
        if why not in {Why.REPLACED, Why.RETIRED} or view.is_reclaimed or attempt in kept:
            continue
        if ages.get(attempt, -1.0) < grace_s or not _is_successor_shown(state, view):
            continue
        try:
            state.check(Reclaim(attempts=(attempt,)))
        except RefusedError:
            # Held, pinned, or nothing good is newer.
            continue
        found.append(attempt)
    return tuple(found)


def _is_successor_shown(state: RunState, view: AttemptView) -> bool:
    """Whether the store shows what took its place: until then its own directory may be there."""
    current = state.current.get(view.name)
    return current is None or state.attempts[current].is_published


def revisions_of(state: RunState, gone: Collection[str] = ()) -> dict[str, list[AttemptView]]:
    """Attempt -> the unreclaimed ones whose manifests may name its bytes, itself among them.

    Args:
        state: the run as its log says.
        gone: attempts that are taken as reclaimed already.
    """
    found: dict[str, list[AttemptView]] = {}
    for view in state.attempts.values():
        if view.state is not AttemptPhase.COMMITTED or view.is_reclaimed or view.attempt in gone:
            continue
        for above in _bases(state, view):
            found.setdefault(above, []).append(view)
    return found


def namers(state: RunState, attempt: str, gone: Collection[str] = ()) -> list[AttemptView]:
    """The unreclaimed attempts whose manifests may name bytes of *attempt*."""
    return revisions_of(state, gone).get(attempt, [])


def _bases(state: RunState, view: AttemptView) -> Iterator[str]:
    """The attempt, what it revises, what that revises, ..."""
    attempt = view.attempt
    seen: set[str] = set()
    while attempt and attempt not in seen:
        yield attempt
        seen.add(attempt)
        above = state.attempts.get(attempt)
        attempt = "" if above is None else above.base


def named_by(manifests: Iterable[Manifest]) -> frozenset[str]:
    """All keys that these manifests name, below the run's directory."""
    keys: set[str] = set()
    for manifest in manifests:
        for entry in manifest.entries:
            if entry.key:
                keys.add(entry.key)
            if entry.chunks is not None:
                keys.add(entry.chunks.table)
    return frozenset(keys)


def garbage(
    state: RunState,
    attempt: str,
    parts: Iterable[Part],
    named: Collection[str],
    *,
    gone: Collection[str] = (),
) -> list[Part]:
    """Which of an attempt's parts may go, the first to go first; none of an undecided one's.

    Args:
        state: the run as its log says.
        attempt: whose parts; it must have stood as it does for the grace.
        parts: what the store has of it.
        named: by the manifests of its `namers`.
        gone: attempts that are taken as reclaimed already.
    """
    why = standing(state, attempt)
    if why is Why.UNDECIDED or state.is_held:
        return []
    view = state.attempts[attempt]
    is_gone = why is Why.ABORTED or view.is_reclaimed or attempt in gone
    found = [part for part in parts if _may_go(part, view, why, named, is_gone=is_gone)]
    return sorted(found, key=lambda part: (_ORDER[part.kind], part.key))


def _may_go(
    part: Part, view: AttemptView, why: Why, named: Collection[str], *, is_gone: bool
) -> bool:
    if part.kind in {PartKind.DATA, PartKind.CHUNKS}:
        return part.key not in named
    if is_gone:
        return True
    if part.kind in _ALWAYS_KEPT:
        return False
    if part.kind is PartKind.MANIFEST:
        return not part.key.endswith(f"/manifest-{view.manifest}.json")
    if part.kind is PartKind.TREE:
        # What it was shown as until it was replaced; its own grace is that of the RECLAIM.
        return why is Why.LIVE and view.is_published
    return True
