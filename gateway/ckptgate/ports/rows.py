"""Rows of the spool's database as frozen values. No behaviour; see `ports.spool` for the calls."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ckptgate.model.documents import Evidence
from ckptgate.model.states import AttemptState, FileState

__all__ = [
    "BEGAN_META",
    "CONTACT_META",
    "JOINING_META",
    "NO_FILE",
    "PHASES_META",
    "ROOM_META",
    "ROOT_INO",
    "SETTLED_META",
    "STOP_META",
    "VOTED_META",
    "WRITERS_META",
    "AttemptRow",
    "Contact",
    "FileRow",
    "HandleRow",
    "LocalBytes",
    "NameOpRow",
    "NodeKind",
    "NodeRow",
    "PendingKind",
    "PendingRow",
    "PlainOpKind",
    "PlainOpRow",
    "SavePhases",
    "SpoolRoom",
    "StopNotice",
    "TombstoneRow",
]

ROOT_INO = 1
BEGAN_META = "began.{attempt}"
"""Setting with the newest generation that was known when the attempt with that row id began."""
WRITERS_META = "writers.{attempt}"
"""Setting with the [pid, start] of all processes that wrote the attempt with that row id (JSON)."""
SETTLED_META = "settled.{run_ino}.{name}"
"""Setting with the length of a run's log that holds the pointer's value which was pending before:
who no longer finds the pending value must know at least that much of the log."""
VOTED_META = "voted.{attempt}"
"""Setting with the newest node of its pending pointers when the attempt with that row id was voted
finally: a pending pointer with a newer one was written after that."""
JOINING_META = "joining-{attempt}"
"""Setting with the intent that the attempt with that row id is about to have in the store."""
PHASES_META = "phases.{attempt}"
"""Setting with when the phases of the save with that row id ended: a `SavePhases` as JSON."""
ROOM_META = "room"
"""Setting with what the publisher last counted: a `SpoolRoom` as JSON."""
STOP_META = "stop"
"""Setting while the gateway is being stopped or drained: a `StopNotice` as JSON."""
CONTACT_META = "contact"
"""Setting with when the store last answered: a `Contact` as JSON."""
NO_FILE = 0
"""Stands for the bytes of a handle whose file is only in the store; ids of files begin at 1."""


class SpoolRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What the spool takes, as the publisher last counted it.

    Attributes:
        used: allocated bytes.
        limit: what it may take, 0 for no limit.
        evicted: bytes of published copies that were given up for room, ever.
        is_full: it is at its limit, and no published copy is left to give up.
        is_low: what is being written will not fit, if it gets as large as the checkpoint before.
        reserved: bytes that it will still need then.
    """

    used: int = 0
    limit: int = 0
    evicted: int = 0
    is_full: bool = False
    is_low: bool = False
    reserved: int = 0

    @classmethod
    def parse(cls, text: str | None) -> SpoolRoom:
        """The setting's value; an empty one if there is none."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError:
            return cls()


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the store's being there; times by the wall clock, ns.

    Attributes:
        answered_ns: when it last answered, 0 for never.
        away_ns: since when it doesn't, 0: it does.
        error: what it said instead.
    """

    answered_ns: int = 0
    away_ns: int = 0
    error: str = ""

    @classmethod
    def parse(cls, text: str | None) -> Contact:
        """The setting's value; an empty one if there is none."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError:
            return cls()


class StopNotice(msgspec.Struct, frozen=True, kw_only=True):
    """That what is under way is being finished.

    Attributes:
        refuses: no checkpoint may be begun meanwhile.
        until_ns: when that ends whatever became of who wanted it, wall clock; 0: with the mount.
        why: `drain`, `stop` or, for the publisher's own end, `end`; "" where nothing is finished.
        deadline_ns: until when it may take, wall clock.
    """

    refuses: bool = False
    until_ns: int = 0
    why: str = ""
    deadline_ns: int = 0

    @classmethod
    def parse(cls, text: str | None) -> StopNotice:
        """The setting's value; one that refuses nothing if there is none."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError:
            return cls()

    def is_refusing(self, now_ns: int) -> bool:
        """Whether it says so at that time."""
        return self.refuses and self.is_on(now_ns)

    def is_on(self, now_ns: int) -> bool:
        """Whether something is being finished at that time."""
        return bool(self.why) and (not self.until_ns or now_ns < self.until_ns)


class SavePhases(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When each phase of a save ended on this node, ns since the epoch; 0: not yet, or not seen.

    Attributes:
        staged_ns: its commit event was seen, and no file was open for writing any more.
        digested_ns: all its files here were digested.
        stored_ns: the store had all of them, verified.
        voted_ns: this member's vote was final.
        committed_ns: the COMMIT was taken over here.
        files, size: how many files of this node, and their bytes, when it was committed.
    """

    staged_ns: int = 0
    digested_ns: int = 0
    stored_ns: int = 0
    voted_ns: int = 0
    committed_ns: int = 0
    files: int = 0
    size: int = 0

    @classmethod
    def parse(cls, text: str | None) -> SavePhases:
        """The setting's value; an empty one if there is none."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError:
            return cls()

    def seconds(self, created_ns: int) -> dict[str, float]:
        """Of each phase that has ended, in order, the seconds after the one before it had."""
        ends = (
            ("staging", self.staged_ns),
            ("digest", self.digested_ns),
            ("upload", self.stored_ns),
            ("vote", self.voted_ns),
            ("commit", self.committed_ns),
        )
        found: dict[str, float] = {}
        before_ns = created_ns
        for phase, end_ns in ends:
            if not end_ns:
                break
            # The clock of the wall may have been set back.
            found[phase] = max(0, end_ns - before_ns) / 1e9
            before_ns = max(end_ns, before_ns)
        return found


class NodeKind(enum.StrEnum):
    """What a node is."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"


class NodeRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An inode. Its number is the FUSE node id and is never used again.

    Attributes:
        ino: number; 1 is the root.
        kind: file, dir, symlink.
        attempt: row id of the attempt whose tree it is in; None outside checkpoints.
        mode: permission bits.
        uid, gid: owner.
        size: of a file that isn't open for writing (else the spool file's own size counts).
        mtime_ns, ctime_ns: times (for a file being written the spool file's own mtime counts).
        target: of a symlink.
        file: id of its bytes; None for others and for plain files that are only in the store.
        base: the node of which this is a revision's copy, None otherwise.
        plain_path: store path of a plain node (outside checkpoints), None inside.
    """

    ino: int
    kind: NodeKind
    attempt: int | None
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    target: str = ""
    file: int | None = None
    base: int | None = None
    plain_path: str | None = None


class LocalBytes(enum.StrEnum):
    """How much of a file's bytes lies in the spool."""

    FULL = "full"
    PARTIAL = "partial"
    """Some chunks were fetched and verified; `FileRow.have` tells which."""
    NONE = "none"


class FileRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A file's bytes and what is known of them; several nodes may share one (revisions).

    Attributes:
        file: id; the spool file's name.
        state: how far it is.
        local: what of it is in the spool.
        size, mtime_ns, ctime_ns: the spool file's when it was digested (0 before).
        digest, chunks: BLAKE3 in hex, and 32 raw bytes a chunk; "" and b"" before.
        key: where the store has it (below the store's root), "" before.
        have: one byte a chunk of what is fetched, 1 if it was and is verified; b"" for `full` bytes
            that a power loss can't change any more: they were synced.
        evidence: of its completeness, as of the digest (is_torn from the close).
        is_linked: the store shares these bytes: they may never be written again.
    """

    file: int
    state: FileState
    local: LocalBytes = LocalBytes.FULL
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    digest: str = ""
    chunks: bytes = b""
    key: str = ""
    have: bytes = b""
    evidence: Evidence = Evidence()
    is_linked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """An attempt as this spool knows it; also the tree of a committed checkpoint read here.

    Attributes:
        id: row id.
        run: run directory's path in the store.
        run_ino: its node.
        name: the checkpoint's present name (a rename changes it).
        attempt: `<name>.<k>` in the store, "" until joined.
        job_key: `JobKey` as text; "" for one that is only read here.
        generation: of its job in this run, -1 until known.
        state: what is known.
        root: node of its root directory.
        base: row id of the attempt that it revises, None otherwise.
        event, detail: the commit event that was seen here ("" for none), see `SealEvent`; a detail
            without an event is that of an early one, which waits for the expected set.
        is_joined: intent and member objects are in the store.
        is_voted: the final vote is decided: no more writes here.
        votes_count: votes written so far.
        names_count: name operations written so far.
        world_size: None where unknown.
        committed_all: an explicit commit for all ranks.
        seal_index: in the log, -1 before.
        manifest: digest once committed, "" before.
        format_name: framework format, "" where none was recognised.
        created_ns, event_ns, write_ns: when it was made, when the event was seen, when it was last
            written (ns since the epoch).
        reason, missing: why it isn't committed yet or never will be, for people.
    """

    id: int
    run: str
    run_ino: int
    name: str
    attempt: str
    job_key: str
    generation: int
    state: AttemptState
    root: int
    base: int | None = None
    event: str = ""
    detail: str = ""
    is_joined: bool = False
    is_voted: bool = False
    votes_count: int = 0
    names_count: int = 0
    world_size: int | None = None
    committed_all: bool = False
    seal_index: int = -1
    manifest: str = ""
    format_name: str = ""
    created_ns: int = 0
    event_ns: int = 0
    write_ns: int = 0
    reason: str = ""
    missing: tuple[str, ...] = ()

    @property
    def is_root_only(self) -> bool:
        """Whether it is a committed checkpoint of which only the root is here so far."""
        return self.state is AttemptState.COMMITTED and not self.manifest and not self.job_key


class HandleRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An open file description.

    Attributes:
        fh: FUSE file handle.
        ino: the node.
        file: the bytes it was opened on, `NO_FILE` if they are only in the store.
        pid: process (thread group) that opened it to write; 0 of a reader.
        start: that process's start time (ticks), so that a pid used again isn't mistaken.
        rank: of that process, -1 unknown.
        is_closed: that process closed it (FLUSH); a descriptor may live on elsewhere.
    """

    fh: int
    ino: int
    file: int
    pid: int
    start: int
    rank: int = -1
    is_closed: bool = False


class PendingKind(enum.StrEnum):
    """What waits for its publication outside of checkpoints."""

    POINTER = "pointer"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow:
    """A new value of a pointer or whole file, seen only by the incarnation that wrote it.

    Attributes:
        id: row id.
        parent: directory node.
        name: its name.
        ino: the node with the new value (None: it was removed).
        kind: pointer or whole file.
        job_key: who sees it.
        target: checkpoint that a pointer names (a removed one: named), "" for a whole file or an
            unclosed text.
    """

    id: int
    parent: int
    name: str
    ino: int | None
    kind: PendingKind
    job_key: str
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TombstoneRow:
    """A committed checkpoint that a user deleted; hidden from its incarnation at once."""

    id: int
    run: str
    name: str
    attempt: str
    job_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOpRow:
    """A directory operation in an open attempt, to be told to the other members.

    Attributes:
        id: row id, in order.
        attempt: row id of the attempt.
        op: `NameOpKind` as text.
        path, to, mode, after: as in `documents.NameOp`.
    """

    id: int
    attempt: int
    op: str
    path: str
    to: str
    mode: int
    after: Mapping[str, int] = field(default_factory=dict[str, int])


class PlainOpKind(enum.StrEnum):
    """What is still to be done in the store for plain names, in order."""

    MKDIR = "mkdir"
    SYMLINK = "symlink"
    REMOVE = "remove"
    RMDIR = "rmdir"
    RENAME = "rename"
    PUT = "put"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOpRow:
    """One queued operation on the store's plain tree; `ino` is the node for PUT."""

    id: int
    op: PlainOpKind
    path: str
    to: str = ""
    ino: int | None = None
    mode: int = 0
