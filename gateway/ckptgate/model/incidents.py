"""Every kind of incident: how grave it is, and what a person can do about it. Pure.

It owns the rule that an incident has a kind from this list, since hooks, metrics and alerts count
by it: nothing that a user or a trainer names ever becomes a kind. `EVENTS.md` has the same list.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["INCIDENTS", "UNKNOWN", "IncidentKind", "Severity", "incident_kind"]


class Severity(enum.StrEnum):
    """How grave it is."""

    NOTICE = "notice"
    """As it should be; kept so that a person finds it. No hook runs for it."""
    WARNING = "warning"
    """Nothing is lost, but somebody should look."""
    CRITICAL = "critical"
    """A save is lost, bytes are wrong, or nothing goes on until somebody acts."""


@dataclass(frozen=True, slots=True)
class IncidentKind:
    """What is known of all incidents of one kind.

    Attributes:
        severity: how grave.
        hint: the next step, where possible a command.
    """

    severity: Severity
    hint: str


_SHOWN: Final = "ckptgate status PATH says what is missing; save again"
_ROOM: Final = "free room there, or raise the limit; nothing is lost, it goes on by itself"
_AGAIN: Final = "have its writer write it again, or ckptgate abort PATH"
_TRIED: Final = "it is tried again by itself; look at the error if it goes on"

INCIDENTS: Final[Mapping[str, IncidentKind]] = MappingProxyType({
    "abandoned": IncidentKind(Severity.CRITICAL, _SHOWN),
    "aborted": IncidentKind(Severity.CRITICAL, _SHOWN),
    "cancelled": IncidentKind(Severity.NOTICE, "as the one who is named wanted it"),
    "changed-after-digest": IncidentKind(
        Severity.WARNING, "a mapping or leaked descriptor writes there; it is digested again"
    ),
    "changed-after-vote": IncidentKind(
        Severity.WARNING, "what was committed is whole; find out who still writes there"
    ),
    "digest-failed": IncidentKind(Severity.WARNING, "look at the spool's disk; " + _TRIED),
    "evicted": IncidentKind(Severity.NOTICE, "room.free_min_share says when copies go"),
    "fsync-failed": IncidentKind(Severity.CRITICAL, "look at the spool's disk; " + _AGAIN),
    "late-member": IncidentKind(
        Severity.CRITICAL, "its files are kept in its spool; save again with all ranks"
    ),
    "not-copied": IncidentKind(
        Severity.WARNING, "use shorter names or a shorter prefix; its manifest names all its bytes"
    ),
    "not-reclaimed": IncidentKind(
        Severity.WARNING, "give the permission or release the lock that the error names"
    ),
    "plain-failed": IncidentKind(Severity.WARNING, _TRIED),
    "plain-skipped": IncidentKind(
        Severity.WARNING, "the store has something else at that path; move it and copy again"
    ),
    "pointer-conflict": IncidentKind(
        Severity.WARNING, "ranks wrote different pointers; let one rank write it"
    ),
    "pointer-stale": IncidentKind(Severity.WARNING, "an old start of the job still writes"),
    "power-lost": IncidentKind(Severity.CRITICAL, _SHOWN),
    "reclaimed": IncidentKind(Severity.NOTICE, "ckptgate gc --dry-run says what would go next"),
    "seal-refused": IncidentKind(Severity.CRITICAL, "a newer start of the job owns the run"),
    "spool-full": IncidentKind(Severity.CRITICAL, _ROOM),
    "spool-low": IncidentKind(Severity.WARNING, _ROOM),
    "spool-moved": IncidentKind(
        Severity.NOTICE, "see to it that the other machine no longer uses this spool"
    ),
    "spool-room": IncidentKind(Severity.NOTICE, "there is room again"),
    "step-failed": IncidentKind(Severity.WARNING, _TRIED),
    "store-away": IncidentKind(
        Severity.WARNING, "look at the network and the store; saves are kept and go on then"
    ),
    "store-back": IncidentKind(Severity.NOTICE, "it was away; what waited goes on by itself"),
    "store-full": IncidentKind(Severity.CRITICAL, _ROOM),
    "too-sparse": IncidentKind(Severity.CRITICAL, _AGAIN),
    "torn-committed": IncidentKind(
        Severity.WARNING, "ckptgate verify PATH, and load it, before you rely on it"
    ),
    "upload-failed": IncidentKind(Severity.WARNING, _TRIED),
    "upload-mismatch": IncidentKind(
        Severity.CRITICAL, "the way to the store or its disk changes bytes; it was not committed"
    ),
    "verify-failed": IncidentKind(
        Severity.CRITICAL, "ckptgate verify PATH, then restore an older one or a backup"
    ),
    "whole-file-invalid": IncidentKind(Severity.WARNING, "it isn't published; write it again"),
})  # fmt: skip

UNKNOWN: Final = IncidentKind(Severity.WARNING, "")
"""Of a kind that another release wrote down."""


def incident_kind(kind: str) -> IncidentKind:
    """What is known of *kind*."""
    return INCIDENTS.get(kind, UNKNOWN)
