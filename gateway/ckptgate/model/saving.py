"""The saving configuration: what ranks record of how a checkpoint is saved, and how it is merged.

Owns three rules. A record is a JSON object of bounded size and depth, with finite numbers and text
that UTF-8 can hold; the same record has the same bytes, whoever wrote it. Its `rank` says whose it
is and is no part of it. Of several ranks' records each field (at any depth) is what all who said it
agree on; where they don't, no value wins: all are kept, with the ranks that said them. The result
depends on the records only, not on their order. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from ckptgate.errors import UsageError

__all__ = [
    "DEPTH_MAX",
    "RECORD_BYTES_MAX",
    "SavedBy",
    "SavedConflict",
    "SavedValue",
    "Saving",
    "canonical",
    "check_record",
    "merge_savings",
    "parse_record",
]

RECORD_BYTES_MAX: Final = 16 * 1024
"""Of one rank's record, as JSON."""
DEPTH_MAX: Final = 8
"""Objects and lists in one another; the record itself is the first."""
KEY_BYTES_MAX: Final = 255
RANK_KEY: Final = "rank"
NO_RANK: Final = -1
_INT_MAX: Final = 2**63 - 1
_HINT: Final = 'a JSON object such as {"step": 100, "versions": {"torch": "2.13.0"}}'

_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=NO_RANK, le=999_999)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a stored document."""


class Saving(_Part, frozen=True, kw_only=True):
    """A record, and who recorded it.

    Attributes:
        ranks: sorted; -1 for one who didn't say which rank it is.
        record: without `rank`.
    """

    ranks: tuple[_Rank, ...]
    record: dict[str, Any]

    def __post_init__(self) -> None:
        check_record(self.record)


class SavedValue(_Part, frozen=True, kw_only=True):
    """What some ranks said of a field.

    Attributes:
        value: what they said.
        ranks: sorted; -1 for those that didn't say which they are.
    """

    value: Any
    ranks: tuple[_Rank, ...]


class SavedConflict(_Part, frozen=True, kw_only=True):
    """A field of which ranks said different things.

    Attributes:
        field: its name, after those of the objects that it is in.
        values: all of them, in the order of their JSON text.
    """

    field: tuple[str, ...]
    values: tuple[SavedValue, ...]


class SavedBy(_Part, frozen=True, kw_only=True):
    """How a checkpoint was saved, by all who recorded something.

    Attributes:
        record: what all who said it agree on.
        conflicts: fields of which they said different things; these are not in `record`.
    """

    record: dict[str, Any] = {}
    conflicts: tuple[SavedConflict, ...] = ()


def canonical(record: object) -> bytes:
    """The one JSON text of a checked value."""
    return msgspec.json.encode(record, order="deterministic")


def check_record(record: object, *, subject: str = "") -> dict[str, Any]:
    """The record with plain values, if it may be one.

    Args:
        record: any value.
        subject: what it is recorded of, for messages.

    Raises:
        UsageError: EINVAL, it is no object, too large or too deep, has a key that is no text or too
            long, a number that is infinite or beyond 64 bits, or text that isn't UTF-8.
    """
    if not isinstance(record, dict):
        raise _wrong(f"is {type(record).__name__}, not an object", subject)
    found: dict[str, Any] = _plain(record, 1, subject)
    size = len(canonical(found))
    if size > RECORD_BYTES_MAX:
        raise _wrong(f"has {size} bytes, at most {RECORD_BYTES_MAX} are possible", subject)
    return found


def _plain(value: Any, depth: int, subject: str) -> Any:
    """The value as JSON has it; enumerations and versions are texts and numbers in JSON."""
    if _is(value, dict, list, tuple):
        if depth > DEPTH_MAX:
            raise _wrong(f"is nested deeper than {DEPTH_MAX}", subject)
        if _is(value, dict):
            return {
                _key(key, subject): _plain(item, depth + 1, subject) for key, item in value.items()
            }
        return [_plain(item, depth + 1, subject) for item in value]
    if isinstance(value, str):
        return _text(value, subject)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return _number(value, subject)
    raise _wrong(f"has a {type(value).__name__} in it, which JSON has not", subject)


def _is(value: object, *kinds: type) -> bool:
    """`isinstance`, for values whose items have no type."""
    return isinstance(value, kinds)


def _key(key: Any, subject: str) -> str:
    if not isinstance(key, str):
        raise _wrong(f"has a key that is no text: {key!r:.40}", subject)
    text = _text(key, subject)
    if not text or len(text.encode()) > KEY_BYTES_MAX:
        raise _wrong(f"has a key of 0 or more than {KEY_BYTES_MAX} bytes", subject)
    return text


def _number(value: int | float, subject: str) -> int | float:
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
    elif abs(value) <= _INT_MAX:
        return int(value)
    raise _wrong("has a number that is not finite or beyond 64 bits", subject)


def _text(text: str, subject: str) -> str:
    try:
        return text.encode().decode()
    except UnicodeEncodeError as exc:
        raise _wrong("has text that is not UTF-8", subject) from exc


def _wrong(what: str, subject: str) -> UsageError:
    msg = f"the record of how a checkpoint is saved {what}"
    return UsageError(msg, subject=subject, hint=_HINT)


def parse_record(data: bytes, *, subject: str = "") -> tuple[int, dict[str, Any]]:
    """(rank, record without it) of JSON text; rank -1 where it says none.

    Raises:
        UsageError: EINVAL, it isn't JSON, its rank is none, or as `check_record`.
    """
    if len(data) > 2 * RECORD_BYTES_MAX:
        raise _wrong(f"has {len(data)} bytes, at most {RECORD_BYTES_MAX} are possible", subject)
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise _wrong(f"is not JSON: {str(exc)[:80]}", subject) from exc
    record = check_record(found, subject=subject)
    rank = record.pop(RANK_KEY, NO_RANK)
    if type(rank) is not int or not NO_RANK <= rank <= 999_999:
        raise _wrong(f"has a rank that is none: {rank!r:.40}", subject)
    return rank, record


@dataclass(frozen=True, slots=True)
class _Said:
    """A value and who said it."""

    value: Any
    ranks: frozenset[int]


def merge_savings(savings: Iterable[Saving]) -> SavedBy | None:
    """What all records come to; None if there is none."""
    said = [_Said(saving.record, frozenset(saving.ranks)) for saving in savings]
    conflicts: list[SavedConflict] = []
    record = _merged(_distinct(said), (), conflicts)
    if not record and not conflicts:
        return None
    return SavedBy(record=record, conflicts=tuple(conflicts))


def _distinct(said: Iterable[_Said]) -> list[_Said]:
    """Each value once, in the order of its JSON text."""
    found: dict[bytes, _Said] = {}
    for item in said:
        text = canonical(item.value)
        before = found.get(text)
        ranks = item.ranks if before is None else before.ranks | item.ranks
        found[text] = _Said(item.value, ranks)
    return [found[text] for text in sorted(found)]


def _merged(
    said: Sequence[_Said], place: tuple[str, ...], conflicts: list[SavedConflict]
) -> dict[str, Any]:
    """One object of several; what they say differently goes to *conflicts*."""
    merged: dict[str, Any] = {}
    for key in sorted({key for item in said for key in item.value}):
        values = _distinct(_Said(item.value[key], item.ranks) for item in said if key in item.value)
        if len(values) == 1:
            merged[key] = values[0].value
        elif all(isinstance(item.value, dict) for item in values):
            below = _merged(values, (*place, key), conflicts)
            if below:
                merged[key] = below
        else:
            conflicts.append(
                SavedConflict(
                    field=(*place, key),
                    values=tuple(
                        SavedValue(value=item.value, ranks=tuple(sorted(item.ranks)))
                        for item in values
                    ),
                )
            )
    return merged
