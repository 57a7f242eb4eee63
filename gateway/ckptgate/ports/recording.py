"""What writers say of an attempt beside its bytes: that they begin, how they save, that they fail.

The one place for the mount and any other way in. A rank *begins* its part; one that began or
committed before in the same undecided attempt is in its second try, which must not be mixed with
the first: it is refused, and whoever asks gives the attempt up. A rank *records* how it saves;
votes carry that into the manifest. A writer *gives up*: the publisher aborts the attempt, for all
members. All of it is kept in the spool. Any thread of any process that has it open.
"""

from __future__ import annotations

import errno
from typing import Any, Final

import msgspec

from ckptgate.errors import BusyError, ExistsError, FullError, MissingError, RefusedError
from ckptgate.model.saving import Saving, canonical
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import AttemptRow, Spool

__all__ = [
    "KEPT_META",
    "REASON_CHARS_MAX",
    "SAVINGS_BYTES_MAX",
    "begin_part",
    "begun_by",
    "give_up",
    "given_up",
    "is_left_undone",
    "record_saving",
    "savings_of",
]

_BEGUN: Final = "begun.{attempt}"
"""Setting with who began a part of the attempt with that row id: rank -> [pid, start] (JSON)."""
_SAVINGS: Final = "saved-by.{attempt}"
"""Setting with what ranks recorded of its saving (JSON)."""
_GIVEN_UP: Final = "given-up.{attempt}"
"""Setting with the reason why a writer gave it up, to be aborted."""
KEPT_META: Final = (_BEGUN, _SAVINGS, _GIVEN_UP)
"""Settings that go with the attempt's row."""

SAVINGS_BYTES_MAX: Final = 1024 * 1024
"""Of all ranks of one node; equal records count once."""
REASON_CHARS_MAX: Final = 1000
_ALL: Final = -1
"""Stands for who begins for all ranks."""


def begin_part(
    spool: Spool, attempt_id: int, *, rank: int | None, writer: tuple[int, int]
) -> AttemptRow:
    """Note that a rank (None: somebody for all) begins to write its part.

    Args:
        spool: where the attempt is.
        attempt_id: its row.
        rank: which one.
        writer: (pid, start) of its process, (0, 0) if unknown.

    Raises:
        ExistsError: EEXIST, it began or committed before: this would be a second try.
        MissingError, RefusedError, BusyError: the attempt takes nothing any more.
    """
    with spool.transaction():
        row = _undecided(spool, attempt_id)
        begun = begun_by(spool, attempt_id)
        number = _ALL if rank is None else rank
        if number in begun or number in spool.rank_commits(row.id) or row.committed_all:
            who = "it was" if rank is None else f"rank {rank}'s part was"
            msg = f"{who} begun before in this try of {row.name!r}"
            raise ExistsError(msg, subject=row.name, hint="give this try up, then begin anew")
        text = _text({str(each): who for each, who in {**begun, number: writer}.items()})
        spool.set_meta(_BEGUN.format(attempt=row.id), text)
        return row


def begun_by(spool: Spool, attempt_id: int) -> dict[int, tuple[int, int]]:
    """Ranks that began here -> (pid, start) of their processes; -1: somebody who began for all."""
    text = spool.get_meta(_BEGUN.format(attempt=attempt_id))
    return msgspec.json.decode(text, type=dict[int, tuple[int, int]]) if text else {}


def is_left_undone(spool: Spool, row: AttemptRow) -> bool:
    """Whether somebody began a part here and didn't commit it."""
    begun = begun_by(spool, row.id)
    if not begun or row.committed_all:
        return False
    return not set(begun) <= set(spool.rank_commits(row.id))


def record_saving(
    spool: Spool, attempt_id: int, *, rank: int, record: dict[str, Any]
) -> AttemptRow:
    """Keep how a rank saves; what it recorded before in this attempt is replaced.

    Args:
        spool: where the attempt is.
        attempt_id: its row.
        rank: whose record it is, -1 where unknown.
        record: as `model.saving.check_record` allows.

    Raises:
        MissingError: there is no such attempt.
        RefusedError: EPERM, it is decided already.
        BusyError: EBUSY, its final vote is out.
        FullError: ENOSPC, all records of this node are too large.
    """
    with spool.transaction():
        row = _undecided(spool, attempt_id)
        kept: dict[bytes, set[int]] = {}
        for saving in savings_of(spool, attempt_id):
            others = set(saving.ranks) - {rank}
            if others:
                kept[canonical(saving.record)] = others
        kept.setdefault(canonical(record), set()).add(rank)
        savings = tuple(
            Saving(ranks=tuple(sorted(ranks)), record=msgspec.json.decode(text))
            for text, ranks in sorted(kept.items())
        )
        text = _text(savings)
        if len(text) > SAVINGS_BYTES_MAX:
            msg = f"records of one node take more than {SAVINGS_BYTES_MAX} bytes: {row.name!r}"
            raise FullError(msg, subject=row.name)
        spool.set_meta(_SAVINGS.format(attempt=row.id), text)
        return row


def savings_of(spool: Spool, attempt_id: int) -> tuple[Saving, ...]:
    """What ranks recorded here, in the order of their records' text."""
    text = spool.get_meta(_SAVINGS.format(attempt=attempt_id))
    return msgspec.json.decode(text, type=tuple[Saving, ...]) if text else ()


def give_up(spool: Spool, attempt_id: int, reason: str) -> AttemptRow:
    """Have an undecided attempt aborted for all its members; repeating is harmless.

    Raises:
        MissingError: there is no such attempt.
        RefusedError: EPERM, it is committed.
    """
    with spool.transaction():
        row = _known(spool, attempt_id)
        if row.state in {AttemptState.COMMITTED, AttemptState.REPLACED}:
            msg = f"{row.name!r} is committed already"
            raise RefusedError(msg, subject=row.name)
        if row.state in UNDECIDED:
            key = _GIVEN_UP.format(attempt=row.id)
            spool.set_meta(key, reason[:REASON_CHARS_MAX] or "given up by its writer")
        return row


def given_up(spool: Spool, attempt_id: int) -> str:
    """Why a writer gave it up, "" if none did."""
    return spool.get_meta(_GIVEN_UP.format(attempt=attempt_id)) or ""


def _known(spool: Spool, attempt_id: int) -> AttemptRow:
    row = spool.attempt(attempt_id)
    if row is None:
        msg = f"no attempt with row {attempt_id} in this spool"
        raise MissingError(msg, subject=str(attempt_id), hint="ckptgate status")
    return row


def _undecided(spool: Spool, attempt_id: int) -> AttemptRow:
    """The attempt, if what is said of it can still count."""
    row = _known(spool, attempt_id)
    reason = given_up(spool, attempt_id)
    if row.state in {AttemptState.ABORTED, AttemptState.ABANDONED} or reason:
        # As in a removed directory that somebody still has open.
        msg = f"checkpoint {row.name!r} was given up: {row.reason or reason}"
        raise MissingError(msg, subject=row.name, errno_value=errno.ENOENT)
    if row.state not in UNDECIDED:
        msg = f"attempt {row.attempt or row.name!r} is {row.state}: nothing is recorded of it now"
        raise RefusedError(msg, subject=row.name)
    if row.is_voted:
        msg = f"{row.name!r} is being decided: record before the commit"
        raise BusyError(msg, subject=row.name)
    return row


def _text(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
