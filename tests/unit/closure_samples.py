"""Votes and what of them is missing, for the tests of closure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ckptgate.model.closure import (
    ExpectedSet,
    closure,
)
from ckptgate.model.documents import EntryType, Evidence, FileEntry, Member, Vote
from ckptgate.model.entries import SealEvent

A = "alpha-00000001"
B = "beta-00000002"
WHOLE = Evidence(container="torch-zip", is_valid=True)
PLAIN = Evidence()


def digest(text: str) -> str:
    return text.encode().hex().ljust(64, "0")[:64]


def file(path: str, evidence: Evidence = WHOLE, *, size: int = 10, content: str = "") -> FileEntry:
    return FileEntry(
        path=path,
        type=EntryType.FILE,
        mode=0o644,
        mtime_ns=1,
        size=size,
        digest=digest(content or path),
        key=f"data/{path}",
        evidence=evidence,
    )


def directory(path: str, **changes: Any) -> FileEntry:
    fields: dict[str, Any] = {"path": path, "type": EntryType.DIR, "mode": 0o755, "mtime_ns": 1}
    return FileEntry(**{**fields, **changes})


def symlink(path: str, target: str) -> FileEntry:
    return FileEntry(path=path, type=EntryType.SYMLINK, mode=0o777, mtime_ns=1, target=target)


def vote(member: str, *entries: FileEntry, **changes: Any) -> Vote:
    fields: dict[str, Any] = {
        "attempt": "step-1.0",
        "member": member,
        "n": 0,
        "is_final": True,
        "entries": entries,
    }
    return Vote(**{**fields, **changes})


def member(member: str, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "attempt": "step-1.0",
        "member": member,
        "host": member.partition("-")[0],
        "joined_at": "t",
    }
    return Member(**{**fields, **changes})


def missing(
    event: SealEvent,
    votes: Iterable[Vote],
    *,
    members: Mapping[str, Member] | None = None,
    expected: ExpectedSet | None = None,
    previous: Iterable[str] | None = None,
) -> list[str]:
    """What closure misses, as texts."""
    by_member = {one.member: one for one in votes}
    registered = {name: member(name) for name in by_member} if members is None else members
    found = closure(
        event=event,
        members=registered,
        votes=by_member,
        expected=expected,
        previous_paths=None if previous is None else frozenset(previous),
    )
    return [str(one) for one in found]


def has(found: list[str], *words: str) -> bool:
    return any(all(word in text for word in words) for text in found)


EVENTS = list(SealEvent)


EXPECTED = ExpectedSet("dcp", {"__0_0.distcp": 10, "__1_0.distcp": 0}, source=".metadata")


TORN = Evidence(is_torn=True)
TORN_WHOLE = Evidence(container="torch-zip", is_valid=True, is_torn=True)


def revised(member: str, *entries: FileEntry) -> Vote:
    return vote(member, *entries, base="step-1.0", attempt="step-1.1")


def written(path: str, content: str) -> FileEntry:
    return msgspec.structs.replace(file(path, content=content), key=f"new/{path}")
