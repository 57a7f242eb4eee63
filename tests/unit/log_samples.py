"""Entries of a decision log, for the tests of its rules."""

from __future__ import annotations

from ckptgate.model.documents import PointerKind, PointerValue, digest_of, encode
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Fence,
    LogRecord,
    Point,
    Retire,
    Seal,
    SealEvent,
)
from ckptgate.model.rules import LATEST, RunState

MANIFEST = "0a" * 32


class Log:
    """A log in memory, with the fold of what is in it."""

    def __init__(self, *entries: Entry) -> None:
        self.state = RunState()
        self.stored: list[bytes] = []
        self.entries: list[Entry] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry) -> LogRecord:
        self.state.check(entry)
        record = self.record(entry)
        data = encode(record)
        self.state.apply(record, digest_of(data))
        self.stored.append(data)
        self.entries.append(entry)
        return record

    def record(self, entry: Entry, **changes: object) -> LogRecord:
        fields = {
            "index": self.state.length,
            "previous": self.state.last_digest,
            "write_id": f"{self.state.length:032x}",
            "member": "node-00000001",
            "at": "2026-01-01T00:00:00.000Z",
            "entry": entry,
        }
        return LogRecord(**{**fields, **changes})  # type: ignore[arg-type]


def fence(generation: int, key: str | None = None) -> Fence:
    return Fence(generation=generation, job_key=key or f"run:job-{generation}")


def seal(attempt: str, generation: int = 0, name: str = "") -> Seal:
    return Seal(
        attempt=attempt,
        name=name or attempt.rpartition(".")[0],
        generation=generation,
        event=SealEvent.EXPLICIT,
    )


def pointer(target: str, name: str = LATEST, kind: PointerKind = PointerKind.TEXT) -> PointerValue:
    return PointerValue(pointer=name, kind=kind, target=target, content=target + "\n")


def link(target: str) -> PointerValue:
    return PointerValue(pointer=LATEST, kind=PointerKind.SYMLINK, target=target, content=target)


def commit(attempt: str, *pointers: PointerValue, name: str = "") -> Commit:
    name = name or attempt.rpartition(".")[0]
    return Commit(attempt=attempt, name=name, manifest=MANIFEST, pointers=pointers)


def saved(attempt: str, *pointers: PointerValue, generation: int = 0) -> tuple[Entry, ...]:
    return (seal(attempt, generation), Close(attempt=attempt), commit(attempt, *pointers))


def abort(attempt: str) -> Abort:
    return Abort(attempt=attempt, reason="test", missing=("a file",))


def retire(attempt: str) -> Retire:
    return Retire(name=attempt.rpartition(".")[0], attempt=attempt)


def point(value: PointerValue) -> Point:
    return Point(pointer=value, reason="rollback")


A, B, C = saved("a.0"), saved("b.0"), saved("c.0")
