"""The rules of the decision log: what may be appended after what.

An entry is checked against the whole folded prefix before it takes the next slot, by everybody and
always by these functions: that is all the coordination there is between members.

Thread rule: as `fold`: not thread-safe, its owner guards it by a lock.
"""

from __future__ import annotations

from typing import Final

from ckptgate.errors import IntegrityError, RefusedError
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Fence,
    Hold,
    LogRecord,
    Pin,
    Point,
    Published,
    Quarantine,
    Reclaim,
    Retire,
    Seal,
)
from ckptgate.model.fold import (
    LATEST,
    AttemptEntry,
    AttemptPhase,
    AttemptView,
    FoldedPointer,
    FoldedRun,
    NameEntry,
)
from ckptgate.model.jobkey import JobKey
from ckptgate.model.layout import GATEWAY_DIR

__all__ = ["LATEST", "AttemptPhase", "AttemptView", "FoldedPointer", "RunState"]

_UNDECIDED: Final = frozenset({AttemptPhase.SEALED, AttemptPhase.CLOSED})


class RunState(FoldedRun):
    """The folded prefix of a run's log, which takes only what the rules allow."""

    __slots__ = ()

    def check(self, entry: Entry) -> None:
        """Return if *entry* may be the next one.

        Raises:
            RefusedError: a rule forbids it; the message names the rule.
        """
        match entry:
            case Fence():
                _check_fence(self, entry)
            case Seal() | Close() | Commit() | Abort() | Published():
                _check_attempt_entry(self, entry)
            case Retire() | Reclaim() | Point() | Pin() | Hold() | Quarantine():
                _check_name_entry(self, entry)

    def apply(self, record: LogRecord, digest: str) -> None:
        """Fold a stored record whose bytes have this digest; nothing is changed on an error.

        Raises:
            IntegrityError: it isn't the next record, or its entry breaks a rule: somebody wrote
                into the log without checking, or the log was edited.
        """
        subject = f"log record {record.index}"
        if record.index != self.length or record.previous != self.last_digest:
            msg = f"{subject} does not follow the {self.length} records before it"
            raise IntegrityError(msg, subject=subject)
        try:
            self.check(record.entry)
        except RefusedError as exc:
            msg = f"{subject} breaks a rule of the log: {exc}"
            raise IntegrityError(msg, subject=subject, hint=exc.hint) from exc
        self.fold(record.entry, record.index, record.member, record.at)
        self.length += 1
        self.last_digest = digest


def _refuse(entry: Entry, subject: str, why: str, hint: str = "") -> RefusedError:
    kind = type(entry).__name__.upper()
    return RefusedError(
        f"{kind} of {subject!r} is against the rules: {why}", subject=subject, hint=hint
    )


def _check_fence(state: RunState, entry: Fence) -> None:
    if entry.generation != state.generation + 1:
        why = f"its generation is {entry.generation}, the next is {state.generation + 1}"
        raise _refuse(entry, entry.job_key, why)
    if entry.job_key in state.fences:
        why = f"that job already is generation {state.fences[entry.job_key]}"
        raise _refuse(entry, entry.job_key, why)
    try:
        key = JobKey.parse(entry.job_key)
    except ValueError as exc:
        raise _refuse(entry, entry.job_key, "it is no job key") from exc
    if not key.is_shared or not key.value:
        why = "only a job key that all nodes of the job share gets a generation"
        raise _refuse(entry, entry.job_key, why, "start the job through `ckptgate exec -- COMMAND`")


def _check_attempt_entry(state: RunState, entry: AttemptEntry) -> None:
    view = state.attempts.get(entry.attempt)
    match entry:
        case Seal():
            _check_seal(state, entry, view)
        case Close() if view is None or view.state is not AttemptPhase.SEALED:
            raise _refuse(
                entry, entry.attempt, f"only a sealed attempt is closed, it is {_phase(view)}"
            )
        case Commit():
            _check_commit(state, entry, view)
        case Abort() if view is not None and view.state not in _UNDECIDED:
            raise _refuse(entry, entry.attempt, f"it is already {view.state}, which is final")
        case Published() if view is None or view.state is not AttemptPhase.COMMITTED:
            why = f"only a committed attempt is published, it is {_phase(view)}"
            raise _refuse(entry, entry.attempt, why)
        case Published() if view is not None and view.is_published:
            raise _refuse(entry, entry.attempt, "it is already published")
        case _:
            pass


def _phase(view: AttemptView | None) -> str:
    return "not sealed" if view is None else str(view.state)


def _check_seal(state: RunState, entry: Seal, view: AttemptView | None) -> None:
    if view is not None:
        raise _refuse(entry, entry.attempt, f"it is already {view.state}")
    if entry.generation != state.generation:
        why = f"its generation is {entry.generation}, the newest is {state.generation}"
        raise _refuse(entry, entry.attempt, f"{why} (a newer incarnation has begun)")
    if entry.name == GATEWAY_DIR:
        raise _refuse(entry, entry.attempt, f"{GATEWAY_DIR!r} is the gateway's own name")
    if entry.name in state.pointers:
        why = f"{entry.name!r} is a pointer here"
        raise _refuse(entry, entry.attempt, why, "save the checkpoint under another name")


def _check_commit(state: RunState, entry: Commit, view: AttemptView | None) -> None:
    if view is None or view.state is not AttemptPhase.CLOSED:
        why = f"only a closed attempt is committed, it is {_phase(view)}"
        raise _refuse(entry, entry.attempt, why)
    if entry.name != view.name:
        why = f"it was sealed as {view.name!r}, not as {entry.name!r}"
        raise _refuse(entry, entry.attempt, why)
    if state.is_superseded(entry.attempt):
        why = f"a newer seal of {entry.name!r} is committed: it must be aborted (superseded)"
        raise _refuse(entry, entry.attempt, why)
    if entry.base:
        _check_base(state, entry)
    seen: set[str] = set()
    for value in entry.pointers:
        if value.target != entry.name or value.pointer in seen:
            why = f"pointer {value.pointer!r} is listed twice or names {value.target!r}"
            raise _refuse(entry, entry.attempt, why)
        seen.add(value.pointer)
        _check_pointer_name(state, entry, value.pointer)


def _check_base(state: RunState, entry: Commit) -> None:
    base = state.attempts.get(entry.base)
    if base is None or base.state is not AttemptPhase.COMMITTED:
        why = f"it is a revision of {entry.base!r}, which is not committed"
        raise _refuse(entry, entry.attempt, why)
    if base.is_reclaimed:
        why = f"it is a revision of {entry.base!r}, whose bytes are being removed"
        raise _refuse(entry, entry.attempt, why)


def _check_pointer_name(state: RunState, entry: Entry, pointer: str) -> None:
    if pointer == GATEWAY_DIR or state.is_checkpoint(pointer):
        raise _refuse(
            entry, pointer, "a pointer cannot have the name of a checkpoint or the gateway"
        )


def _check_name_entry(state: RunState, entry: NameEntry) -> None:
    match entry:
        case Retire():
            _check_retire(state, entry)
        case Reclaim():
            _check_reclaim(state, entry)
        case Point():
            _check_point(state, entry)
        case Pin():
            _check_switch(state, entry, "pinned", is_on=entry.name in state.pins)
        case Quarantine():
            _check_switch(state, entry, "quarantined", is_on=entry.name in state.quarantined)
        case Hold() if entry.is_on == state.is_held:
            raise _refuse(entry, "run", f"it already is {'held' if entry.is_on else 'free'}")
        case Hold():
            pass


def _check_switch(state: RunState, entry: Pin | Quarantine, word: str, *, is_on: bool) -> None:
    if entry.name not in state.current:
        raise _refuse(entry, entry.name, "it is not a committed checkpoint")
    if entry.is_on == is_on:
        raise _refuse(entry, entry.name, f"it already is {'' if is_on else 'not '}{word}")


def _check_point(state: RunState, entry: Point) -> None:
    value = entry.pointer
    if value.target not in state.current:
        raise _refuse(entry, value.pointer, f"{value.target!r} is not a committed checkpoint")
    if value.target in state.quarantined:
        why = f"{value.target!r} is quarantined: {state.quarantined[value.target]}"
        raise _refuse(entry, value.pointer, why, "release the quarantine first")
    _check_pointer_name(state, entry, value.pointer)


def _check_retire(state: RunState, entry: Retire) -> None:
    name = entry.name
    if state.current.get(name) != entry.attempt:
        raise _refuse(entry, name, f"{entry.attempt!r} is not what it is now")
    if state.is_held:
        raise _refuse(entry, name, "the run is held")
    if name in state.pins:
        raise _refuse(entry, name, "it is pinned")
    for pointer, folded in state.pointers.items():
        if folded.value.target == name:
            raise _refuse(entry, name, f"the pointer {pointer!r} names it")
    if not _has_newer_good(state, state.attempts[entry.attempt].seal_index):
        raise _refuse(entry, name, "no newer good checkpoint is committed")


def _has_newer_good(state: RunState, seal_index: int) -> bool:
    # The newest stand at the end, so this ends at once for all but the newest.
    return any(
        name not in state.quarantined and state.attempts[attempt].seal_index > seal_index
        for name, attempt in reversed(state.current.items())
    )


def _check_reclaim(state: RunState, entry: Reclaim) -> None:
    if state.is_held:
        raise _refuse(entry, "run", "the run is held")
    if not entry.attempts or len(set(entry.attempts)) != len(entry.attempts):
        raise _refuse(entry, "run", "it names no attempt, or one twice")
    for attempt in entry.attempts:
        view = state.attempts.get(attempt)
        if view is None or view.state is not AttemptPhase.COMMITTED:
            why = f"only what was committed is reclaimed, it is {_phase(view)}"
            raise _refuse(entry, attempt, why)
        if view.is_reclaimed:
            raise _refuse(entry, attempt, "it already is reclaimed")
        if state.current.get(view.name) == attempt:
            raise _refuse(entry, attempt, f"it is what {view.name!r} is now")
        if view.name in state.pins:
            raise _refuse(entry, attempt, f"{view.name!r} is pinned")
        if not _has_newer_good(state, view.seal_index):
            raise _refuse(entry, attempt, "no newer good checkpoint is committed")
