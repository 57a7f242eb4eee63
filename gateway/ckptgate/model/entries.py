"""The decision log's entries. What they may say in which state is in `rules`."""

from __future__ import annotations

import enum
from typing import TypeAlias

from ckptgate.errors import IntegrityError
from ckptgate.model.documents import FORMAT_VERSION, Document, PointerValue, decode
from ckptgate.model.ids import check_attempt_id, check_checkpoint_name, check_digest

__all__ = [
    "Abort",
    "Close",
    "Commit",
    "Entry",
    "Fence",
    "Hold",
    "LogRecord",
    "Pin",
    "Point",
    "Published",
    "Quarantine",
    "Reclaim",
    "Retire",
    "Seal",
    "SealEvent",
    "decode_record",
]


class SealEvent(enum.StrEnum):
    """What said that a checkpoint gets no more writes."""

    EXPLICIT = "explicit"
    RENAME = "rename"
    FORMAT = "format"
    QUIESCENCE = "quiescence"


class Fence(Document, frozen=True, kw_only=True, tag="FENCE"):
    """A new incarnation starts: older generations can't seal any more."""

    generation: int
    job_key: str


class Seal(Document, frozen=True, kw_only=True, tag="SEAL"):
    """The attempt gets no more writes.

    Attributes:
        attempt: which one.
        name: the checkpoint's final name (a rename may have changed it).
        generation: the newest one.
        event: what said so.
        detail: the format's event (`dcp-metadata`), or "".
    """

    attempt: str
    name: str
    generation: int
    event: SealEvent
    detail: str = ""

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        check_checkpoint_name(self.name)


class Close(Document, frozen=True, kw_only=True, tag="CLOSE"):
    """Closure held on what the author read after the SEAL: nobody may join any more."""

    attempt: str

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)


class Commit(Document, frozen=True, kw_only=True, tag="COMMIT"):
    """The checkpoint consists of exactly this manifest, for ever.

    Attributes:
        attempt: which one.
        name: the checkpoint.
        manifest: digest of its manifest.
        base: the attempt that it is a revision of, whose bytes its manifest may name; "" for none.
        pointers: that moved with it.
        implies_latest: whether the gateway's own `latest` moves with it.
    """

    attempt: str
    name: str
    manifest: str
    base: str = ""
    pointers: tuple[PointerValue, ...] = ()
    implies_latest: bool = True

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        if self.base:
            check_attempt_id(self.base)
        check_checkpoint_name(self.name)
        check_digest(self.manifest)


class Abort(Document, frozen=True, kw_only=True, tag="ABORT"):
    """The attempt never becomes a checkpoint.

    Attributes:
        attempt: which one.
        reason: one line for people.
        missing: what was missing and who owed it, one line each.
    """

    attempt: str
    reason: str
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)


class Published(Document, frozen=True, kw_only=True, tag="PUBLISHED"):
    """The committed state is in the store under its own name."""

    attempt: str

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)


class Retire(Document, frozen=True, kw_only=True, tag="RETIRE"):
    """The checkpoint is deleted by policy or by a user."""

    name: str
    attempt: str
    reason: str = ""

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)
        check_attempt_id(self.attempt)


class Reclaim(Document, frozen=True, kw_only=True, tag="RECLAIM"):
    """From here on the bytes of these attempts are being removed from the store.

    Nothing that is committed after it may be a revision of one of them.

    Attributes:
        attempts: committed once, and replaced or retired since.
        reason: one line for people.
    """

    attempts: tuple[str, ...]
    reason: str = ""

    def __post_init__(self) -> None:
        for attempt in self.attempts:
            check_attempt_id(attempt)


class Point(Document, frozen=True, kw_only=True, tag="POINT"):
    """A pointer is set by decision, not by a COMMIT; the only way for it to go back."""

    pointer: PointerValue
    reason: str


class Pin(Document, frozen=True, kw_only=True, tag="PIN"):
    """Keep this checkpoint whatever policies say, or (`is_on` false) stop doing so."""

    name: str
    is_on: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)


class Hold(Document, frozen=True, kw_only=True, tag="HOLD"):
    """Freeze the run: nothing is retired, or (`is_on` false) stop doing so."""

    is_on: bool = True
    reason: str = ""


class Quarantine(Document, frozen=True, kw_only=True, tag="QUARANTINE"):
    """The checkpoint isn't to be used, or (`is_on` false) may be again."""

    name: str
    is_on: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)


Entry: TypeAlias = (
    Fence
    | Seal
    | Close
    | Commit
    | Abort
    | Published
    | Retire
    | Reclaim
    | Point
    | Pin
    | Hold
    | Quarantine
)


class LogRecord(Document, frozen=True, kw_only=True):
    """`log/<index>.json`: one entry in its slot.

    Attributes:
        index: its slot, from 0.
        previous: digest of the previous record's bytes, "" for the first.
        write_id: kept over retries, so that a read-back tells whether a slot is ours.
        member: who wrote it.
        at: UTC by the writer's clock, RFC 3339; informative only.
        entry: the decision.
    """

    format: int = FORMAT_VERSION
    index: int
    previous: str
    write_id: str
    member: str
    at: str
    entry: Entry


def decode_record(data: bytes, *, index: int, previous: str, subject: str) -> LogRecord:
    """The record in slot *index*, checked against its place in the chain.

    Raises:
        IntegrityError: torn, edited, or not the successor of *previous*.
        FormatVersionError: of another format version.
    """
    record = decode(data, LogRecord, subject=subject)
    if record.index != index:
        msg = f"log record {subject} says index {record.index}, its slot is {index}"
        raise IntegrityError(msg, subject=subject)
    if record.previous != previous:
        msg = f"log record {subject} does not follow its predecessor (edited log?)"
        raise IntegrityError(
            msg, subject=subject, hint="compare the log with another node's or a backup's"
        )
    return record
