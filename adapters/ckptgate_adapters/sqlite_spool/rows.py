"""Rows of the database as the port's frozen values and back. Pure.

Each `Table` knows its columns in the order of the value's fields and builds the statements; a field
is a column of the same name.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import msgspec

from ckptgate.errors import IntegrityError
from ckptgate.model.documents import Evidence, NameOpKind
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import (
    AttemptRow,
    FileRow,
    HandleRow,
    LocalBytes,
    NameOpRow,
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    PlainOpKind,
    PlainOpRow,
    TombstoneRow,
)
from ckptgate_adapters.sqlite_spool.connection import Values

__all__ = [
    "ATTEMPTS",
    "FILES",
    "HANDLES",
    "NAME_OPS",
    "NODES",
    "PENDING",
    "PLAIN_OPS",
    "TOMBSTONES",
    "Table",
]

_R = TypeVar("_R")
_Encode = Callable[[Any], Any]

# A dict is five times faster than calling the enum, and look-ups build one row each.
_NODE_KINDS: Final = {kind.value: kind for kind in NodeKind}
_FILE_STATES: Final = {state.value: state for state in FileState}
_LOCAL: Final = {local.value: local for local in LocalBytes}
_ATTEMPT_STATES: Final = {state.value: state for state in AttemptState}

_NO_EVIDENCE: Final = Evidence()
_NO_EVIDENCE_TEXT: Final = "{}"
_decode_evidence: Final = msgspec.json.Decoder(Evidence).decode


def _text_of(kind: type[enum.StrEnum]) -> _Encode:
    """An encoder to plain str, which refuses what is no member."""

    # SQLite's module asks its adapters first for anything that isn't exactly a str.
    def encode(value: Any) -> str:
        return str(kind(value).value)

    return encode


def _evidence_text(evidence: Evidence) -> str:
    if evidence == _NO_EVIDENCE:
        return _NO_EVIDENCE_TEXT
    return msgspec.json.encode(evidence, order="sorted").decode()


def _evidence(text: str, file: int) -> Evidence:
    if text == _NO_EVIDENCE_TEXT:
        return _NO_EVIDENCE
    try:
        return _decode_evidence(text)
    except msgspec.MsgspecError as exc:
        msg = f"evidence of file {file} in the spool is not valid: {exc}"
        raise IntegrityError(msg, subject=str(file)) from exc


def _lines_text(lines: tuple[str, ...]) -> str:
    return json.dumps(lines) if lines else "[]"


def _lines(text: str) -> tuple[str, ...]:
    return () if text == "[]" else tuple(json.loads(text))


def _counts_text(counts: Mapping[str, int]) -> str:
    return json.dumps(dict(counts), sort_keys=True)


def _field_names(row: type[Any]) -> tuple[str, ...]:
    """In order; those that every request makes are structs, as those are made faster."""
    if issubclass(row, msgspec.Struct):
        return row.__struct_fields__
    return tuple(field.name for field in fields(row))


class Table(Generic[_R]):
    """One table: its statements, and how its rows become values.

    Attributes:
        columns: comma-separated list in the order of the value's fields.
        select: `SELECT columns FROM table`.
        by_key: the same for one key.
        insert: with a parameter for each column.
        delete: of one key.
    """

    def __init__(
        self,
        name: str,
        row: type[_R],
        build: Callable[[Values], _R],
        encoders: Mapping[str, _Encode] = MappingProxyType({}),
    ) -> None:
        # Their first field is the key.
        self._names = _field_names(row)
        self._name = name
        self._row_name = row.__name__
        self._encoders = encoders
        self._updates: dict[tuple[str, ...], str] = {}
        self.key: Final = self._names[0]
        self.build: Final = build
        quoted = tuple(f'"{column}"' for column in self._names)
        marks = ", ".join("?" * len(quoted))
        self.columns: Final = ", ".join(quoted)
        self.select: Final = f"SELECT {self.columns} FROM {name}"  # noqa: S608 - own columns
        self.by_key: Final = f"{self.select} WHERE {self.key} = ?"
        self.insert: Final = f"INSERT INTO {name} ({self.columns}) VALUES ({marks})"  # noqa: S608 - own columns
        self.delete: Final = f"DELETE FROM {name} WHERE {self.key} = ?"  # noqa: S608 - own columns

    def qualified(self, alias: str) -> str:
        """The columns as those of *alias*."""
        return ", ".join(f'{alias}."{column}"' for column in self._names)

    def values(self, row: _R, key: int | None) -> list[Any]:
        """The parameters of `insert`; None as *key* lets the database choose."""
        values = [getattr(row, name) for name in self._names]
        for name, encode in self._encoders.items():
            at = self._names.index(name)
            values[at] = encode(values[at])
        values[0] = key
        return values

    def update(self, changes: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The statement that changes these fields of one row and returns it; values without key.

        Raises:
            TypeError: a field is unknown or the key.
        """
        names = tuple(changes)
        sql = self._updates.get(names)
        if sql is None:
            for name in names:
                if name not in self._names[1:]:
                    msg = f"{self._row_name} has no field {name!r} that may be changed"
                    raise TypeError(msg)
            setters = ", ".join(f'"{name}" = ?' for name in names)
            sql = f"UPDATE {self._name} SET {setters} WHERE {self.key} = ? RETURNING {self.columns}"  # noqa: S608 - own columns
            self._updates[names] = sql
        encoders = self._encoders
        return sql, [
            encoders[name](value) if name in encoders else value for name, value in changes.items()
        ]


def _node(values: Values) -> NodeRow:
    ino, kind, attempt, mode, uid, gid, size, mtime, ctime, target, file, base, path = values
    return NodeRow(
        ino=ino,
        kind=_NODE_KINDS[kind],
        attempt=attempt,
        mode=mode,
        uid=uid,
        gid=gid,
        size=size,
        mtime_ns=mtime,
        ctime_ns=ctime,
        target=target,
        file=file,
        base=base,
        plain_path=path,
    )


def _file(values: Values) -> FileRow:
    file, state, local, size, mtime, ctime, digest, chunks, key, have, evidence, linked = values
    return FileRow(
        file=file,
        state=_FILE_STATES[state],
        local=_LOCAL[local],
        size=size,
        mtime_ns=mtime,
        ctime_ns=ctime,
        digest=digest,
        chunks=chunks,
        key=key,
        have=have,
        evidence=_evidence(evidence, file),
        is_linked=bool(linked),
    )


_ATTEMPT_FIELDS: Final = tuple(field.name for field in fields(AttemptRow))


def _attempt(values: Values) -> AttemptRow:
    named: dict[str, Any] = dict(zip(_ATTEMPT_FIELDS, values, strict=True))
    named["state"] = _ATTEMPT_STATES[named["state"]]
    named["is_joined"] = bool(named["is_joined"])
    named["is_voted"] = bool(named["is_voted"])
    named["committed_all"] = bool(named["committed_all"])
    named["missing"] = _lines(named["missing"])
    return AttemptRow(**named)


def _handle(values: Values) -> HandleRow:
    fh, ino, file, pid, start, rank, is_closed = values
    return HandleRow(
        fh=fh, ino=ino, file=file, pid=pid, start=start, rank=rank, is_closed=bool(is_closed)
    )


def _pending(values: Values) -> PendingRow:
    id_, parent, name, ino, kind, job_key, target = values
    return PendingRow(
        id=id_,
        parent=parent,
        name=name,
        ino=ino,
        kind=PendingKind(kind),
        job_key=job_key,
        target=target,
    )


def _tombstone(values: Values) -> TombstoneRow:
    id_, run, name, attempt, job_key = values
    return TombstoneRow(id=id_, run=run, name=name, attempt=attempt, job_key=job_key)


def _name_op(values: Values) -> NameOpRow:
    id_, attempt, op, path, to, mode, after = values
    return NameOpRow(
        id=id_, attempt=attempt, op=op, path=path, to=to, mode=mode, after=json.loads(after)
    )


def _plain_op(values: Values) -> PlainOpRow:
    id_, op, path, to, ino, mode = values
    return PlainOpRow(id=id_, op=PlainOpKind(op), path=path, to=to, ino=ino, mode=mode)


NODES: Final = Table("nodes", NodeRow, _node, {"kind": _text_of(NodeKind)})
FILES: Final = Table(
    "files",
    FileRow,
    _file,
    {
        "state": _text_of(FileState),
        "local": _text_of(LocalBytes),
        "evidence": _evidence_text,
        "is_linked": int,
    },
)
ATTEMPTS: Final = Table(
    "attempts",
    AttemptRow,
    _attempt,
    {
        "state": _text_of(AttemptState),
        "is_joined": int,
        "is_voted": int,
        "committed_all": int,
        "missing": _lines_text,
    },
)
HANDLES: Final = Table("handles", HandleRow, _handle, {"is_closed": int})
PENDING: Final = Table("pending", PendingRow, _pending, {"kind": _text_of(PendingKind)})
TOMBSTONES: Final = Table("tombstones", TombstoneRow, _tombstone)
NAME_OPS: Final = Table(
    "name_ops", NameOpRow, _name_op, {"op": _text_of(NameOpKind), "after": _counts_text}
)
PLAIN_OPS: Final = Table("plain_ops", PlainOpRow, _plain_op, {"op": _text_of(PlainOpKind)})
