"""The fold of the decision log: the state that its entries lead to, one after the other.

`rules` says which entries may follow which; here they are taken over, and nothing is refused. Every
member folds the same records to the same state.

Thread rule: not thread-safe; its owner guards it by a lock. The values in it are immutable.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Fence,
    Hold,
    Pin,
    Point,
    Published,
    Quarantine,
    Reclaim,
    Retire,
    Seal,
)
from ckptgate.model.ids import split_attempt_id

__all__ = [
    "LATEST",
    "AttemptEntry",
    "AttemptPhase",
    "AttemptView",
    "FoldedPointer",
    "FoldedRun",
    "NameEntry",
]

LATEST: Final = "latest"
"""The pointer that every COMMIT implies, unless a framework owns that name."""


class AttemptPhase(enum.StrEnum):
    """How far the log has come with an attempt."""

    SEALED = "sealed"
    CLOSED = "closed"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """What the log says of one attempt.

    Attributes:
        attempt: its id.
        name: of the checkpoint, as sealed (of one aborted without a seal: as created).
        state: how far the log has come.
        generation: that sealed it; 0 without a seal.
        seal_index, close_index: slots of its SEAL and CLOSE, -1 before.
        decision_index: slot of its COMMIT or ABORT, -1 before.
        manifest: digest once committed, else "".
        reason, missing: of its ABORT.
        is_published: its PUBLISHED is in the log.
        base: the attempt that it is a revision of, once committed; "" for none.
        is_reclaimed: its bytes are being removed from the store, or are gone.
        sealed_by, decided_by: members that wrote its SEAL, and its COMMIT or ABORT; "" before.
        committed_at: when its COMMIT was written, by that member's clock; "" before.
        pointers: that its COMMIT moved.
    """

    attempt: str
    name: str
    state: AttemptPhase
    generation: int = 0
    seal_index: int = -1
    close_index: int = -1
    decision_index: int = -1
    manifest: str = ""
    reason: str = ""
    missing: tuple[str, ...] = ()
    is_published: bool = False
    base: str = ""
    is_reclaimed: bool = False
    sealed_by: str = ""
    decided_by: str = ""
    committed_at: str = ""
    pointers: tuple[PointerValue, ...] = ()


@dataclass(frozen=True, slots=True)
class FoldedPointer:
    """A pointer's present value.

    Attributes:
        value: what it is.
        source: slot of the SEAL (through its COMMIT) or of the POINT that it comes from.
    """

    value: PointerValue
    source: int


AttemptEntry: TypeAlias = Seal | Close | Commit | Abort | Published
"""Entries about one attempt."""
NameEntry: TypeAlias = Retire | Reclaim | Point | Pin | Hold | Quarantine
"""Entries about what is committed."""


class FoldedRun:
    """The state that a run's log has led to.

    Attributes:
        length: records folded; the next slot.
        last_digest: digest of the last record's bytes, "" at first.
        generation: the newest, 0 before the first FENCE.
        fences: job key (as text) -> its generation.
        attempts: attempt id -> what is known of it.
        names: every name that a SEAL ever gave to an attempt.
        current: checkpoint name -> the attempt that it is now, oldest COMMIT first; retired ones
            are not in it, quarantined ones are.
        retired: name -> the attempt that was retired, until the name is committed again.
        pointers: pointer name -> present value.
        owned_pointers: pointers whose form a framework has determined.
        pins: names that are kept.
        is_held: nothing is retired now.
        quarantined: name -> reason; it ends when another attempt is committed under that name.
    """

    __slots__ = (
        "_newest_seals",
        "_numbers",
        "_undecided",
        "attempts",
        "current",
        "fences",
        "generation",
        "is_held",
        "last_digest",
        "length",
        "names",
        "owned_pointers",
        "pins",
        "pointers",
        "quarantined",
        "retired",
    )

    def __init__(self) -> None:
        self.length: int = 0
        self.last_digest = ""
        self.generation = 0
        self.fences: dict[str, int] = {}
        self.attempts: dict[str, AttemptView] = {}
        self.names: set[str] = set()
        self.current: dict[str, str] = {}
        self.retired: dict[str, str] = {}
        self.pointers: dict[str, FoldedPointer] = {}
        self.owned_pointers: set[str] = set()
        self.pins: set[str] = set()
        self.is_held = False
        self.quarantined: dict[str, str] = {}
        self._undecided: dict[str, None] = {}
        # Of all attempts ever committed under a name, retired ones too: what is current never goes
        # back to an older seal.
        self._newest_seals: dict[str, int] = {}
        # Name that an attempt was made under -> highest number of one that is in the log.
        self._numbers: dict[str, int] = {}

    def generation_of(self, job_key_text: str) -> int | None:
        """The generation of that job key, None if it was never fenced."""
        return self.fences.get(job_key_text)

    def undecided(self) -> tuple[str, ...]:
        """Ids of the attempts that are sealed and neither committed nor aborted, oldest first."""
        return tuple(self._undecided)

    def highest_number(self, made_as: str) -> int:
        """The highest number of an attempt made under this name that the log speaks of, or -1."""
        return self._numbers.get(made_as, -1)

    def is_superseded(self, attempt: str) -> bool:
        """Whether a newer seal of the same name is committed, so that only ABORT is left."""
        view = self.attempts.get(attempt)
        return view is not None and self._newest_seals.get(view.name, -1) > view.seal_index

    def newest(self) -> tuple[str, ...]:
        """Names of what is committed and good, the newest first.

        In the order of their SEALs: a COMMIT may come late. One that a POINT has set `latest` to
        since counts as newer than what was sealed before it.
        """
        order = {
            name: self.attempts[attempt].seal_index
            for name, attempt in self.current.items()
            if name not in self.quarantined
        }
        latest = self.pointers.get(LATEST)
        if latest is not None and latest.value.target in order:
            target = latest.value.target
            order[target] = max(order[target], latest.source)
        return tuple(sorted(order, key=order.__getitem__, reverse=True))

    def is_checkpoint(self, name: str) -> bool:
        """Whether *name* is a committed checkpoint or an undecided attempt's."""
        # The first test is for speed: few names are asked for that never were a checkpoint's.
        return name in self.names and (
            name in self.current
            or any(self.attempts[attempt].name == name for attempt in self._undecided)
        )

    def fold(self, entry: Entry, index: int, member: str = "", at: str = "") -> None:
        """Take over *entry* of *member* from slot *index*; the rules were checked before."""
        match entry:
            case Fence():
                self.generation = entry.generation
                self.fences[entry.job_key] = entry.generation
            case Seal() | Close() | Commit() | Abort() | Published():
                self._fold_attempt_entry(entry, index, member, at)
            case Retire() | Reclaim() | Point() | Pin() | Hold() | Quarantine():
                self._fold_name_entry(entry, index)

    def _fold_attempt_entry(self, entry: AttemptEntry, index: int, member: str, at: str) -> None:
        match entry:
            case Seal():
                self.names.add(entry.name)
                self._undecided[entry.attempt] = None
                self._add(
                    AttemptView(
                        attempt=entry.attempt,
                        name=entry.name,
                        state=AttemptPhase.SEALED,
                        generation=entry.generation,
                        seal_index=index,
                        sealed_by=member,
                    )
                )
            case Close():
                self._change(entry.attempt, state=AttemptPhase.CLOSED, close_index=index)
            case Commit():
                self._fold_commit(entry, index, member, at)
            case Abort():
                self._fold_abort(entry, index, member)
            case Published():
                self._change(entry.attempt, is_published=True)

    def _fold_commit(self, entry: Commit, index: int, member: str, at: str) -> None:
        name, seal_index = entry.name, self.attempts[entry.attempt].seal_index
        self._undecided.pop(entry.attempt)
        self._change(
            entry.attempt,
            state=AttemptPhase.COMMITTED,
            decision_index=index,
            manifest=entry.manifest,
            base=entry.base,
            decided_by=member,
            committed_at=at,
            pointers=entry.pointers,
        )
        # Taken out first, so that `current` stays in the order of the COMMITs.
        self.current.pop(name, None)
        self.current[name] = entry.attempt
        self._newest_seals[name] = seal_index
        self.retired.pop(name, None)
        self.quarantined.pop(name, None)
        for value in entry.pointers:
            self.owned_pointers.add(value.pointer)
            self._move(value, seal_index)
        is_implied = entry.implies_latest and LATEST not in self.owned_pointers
        if is_implied and not self.is_checkpoint(LATEST):
            self._move(_implied_latest(name), seal_index)

    def _fold_abort(self, entry: Abort, index: int, member: str) -> None:
        attempt = entry.attempt
        if attempt not in self.attempts:
            name = split_attempt_id(attempt)[0]
            self._add(AttemptView(attempt=attempt, name=name, state=AttemptPhase.ABORTED))
        self._undecided.pop(attempt, None)
        self._change(
            attempt,
            state=AttemptPhase.ABORTED,
            decision_index=index,
            reason=entry.reason,
            missing=entry.missing,
            decided_by=member,
        )

    def _fold_name_entry(self, entry: NameEntry, index: int) -> None:
        match entry:
            case Retire():
                self.retired[entry.name] = self.current.pop(entry.name)
                self.quarantined.pop(entry.name, None)
            case Reclaim():
                for attempt in entry.attempts:
                    self._change(attempt, is_reclaimed=True)
            case Point():
                value = entry.pointer
                if value.pointer != LATEST or value != _implied_latest(value.target):
                    self.owned_pointers.add(value.pointer)
                self._move(value, index)
            case Pin():
                (self.pins.add if entry.is_on else self.pins.remove)(entry.name)
            case Hold():
                self.is_held = entry.is_on
            case Quarantine() if entry.is_on:
                self.quarantined[entry.name] = entry.reason
            case Quarantine():
                del self.quarantined[entry.name]

    def _add(self, view: AttemptView) -> None:
        self.attempts[view.attempt] = view
        made_as, number = split_attempt_id(view.attempt)
        self._numbers[made_as] = max(number, self._numbers.get(made_as, -1))

    def _change(self, attempt: str, **changes: object) -> None:
        self.attempts[attempt] = dataclasses.replace(
            self.attempts[attempt],
            **changes,  # type: ignore[arg-type]
        )

    def _move(self, value: PointerValue, source: int) -> None:
        """Set a pointer, unless its present value comes from a newer SEAL or POINT."""
        present = self.pointers.get(value.pointer)
        if present is None or source > present.source:
            self.pointers[value.pointer] = FoldedPointer(value, source)


def _implied_latest(name: str) -> PointerValue:
    return PointerValue(pointer=LATEST, kind=PointerKind.SYMLINK, target=name, content=name)
