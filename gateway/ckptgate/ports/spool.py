"""The spool: local staging. Rows of its database as frozen values, and the calls on them.

Thread rule: any thread of any process that has the spool open. A call outside `transaction()` is a
transaction of its own. What a committed transaction wrote survives kill -9 of every process; it
survives a power loss after `make_durable()` returned.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ckptgate.model.documents import Evidence
from ckptgate.model.states import AttemptState, FileState

__all__ = [
    "NO_FILE",
    "AttemptRow",
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
    "Spool",
    "TombstoneRow",
]

ROOT_INO = 1
NO_FILE = 0
"""Stands for the bytes of a handle whose file is only in the store; ids of files begin at 1."""


class NodeKind(enum.StrEnum):
    """What a node is."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file's bytes and what is known of them; several nodes may share one (revisions).

    Attributes:
        file: id; the spool file's name.
        state: how far it is.
        local: what of it is in the spool.
        size, mtime_ns, ctime_ns: the spool file's when it was digested (0 before).
        digest, chunks: BLAKE3 in hex, and 32 raw bytes a chunk; "" and b"" before.
        key: where the store has it (below the store's root), "" before.
        have: one byte a chunk for `partial`: 1 fetched and verified.
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
        event, detail: the commit event that was seen here ("" for none), see `SealEvent`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleRow:
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
        target: checkpoint that a pointer names, "" for a whole file or an unclosed text.
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
        path, to, mode: as in `documents.NameOp`.
    """

    id: int
    attempt: int
    op: str
    path: str
    to: str
    mode: int


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


class Transactions(Protocol):
    """Atomicity and durability."""

    def transaction(self) -> AbstractContextManager[None]:
        """All calls inside are one atomic change, seen by no other process before its end.

        Re-entrant: an inner one joins the outer one. An exception rolls the outermost back.
        """
        ...

    def make_durable(self) -> None:
        """Return when all committed transactions survive a power loss (fsync of the journal)."""
        ...

    def remembered_reply(self, request: int) -> bytes | None:
        """The reply that was stored for this request id, if any."""
        ...

    def remember_reply(self, request: int, reply: bytes) -> None:
        """Store the reply of a mutation in the transaction that made it; old ones are dropped."""
        ...

    def reserve_space(self) -> None:
        """Take room for the database now, so that names can still be changed on a full disk.

        Raises:
            FullError: there is none.
        """
        ...

    def clear_replies(self) -> None:
        """Drop all stored replies: a fresh kernel session numbers its requests anew."""
        ...

    def get_meta(self, key: str) -> str | None:
        """A setting of this spool (`member`, `store`, `session`, ...)."""
        ...

    def set_meta(self, key: str, value: str) -> None:
        """Change a setting."""
        ...


class Nodes(Protocol):
    """Inodes and names. Names are unique in a directory; a node has at most one name.

    The root, a plain directory with the store path "", is there from the spool's creation.
    """

    def node(self, ino: int) -> NodeRow | None: ...
    def add_node(self, node: NodeRow) -> NodeRow:
        """Insert (`ino` 0 means: give it the next number); returns the row with its number."""
        ...

    def update_node(self, ino: int, **changes: object) -> NodeRow:
        """Change the named fields of `NodeRow`; MissingError if it is gone."""
        ...

    def drop_node(self, ino: int) -> None:
        """Remove the node (not its name, not its file); unknown is success."""
        ...

    def child(self, parent: int, name: str) -> NodeRow | None: ...
    def children(self, parent: int) -> list[tuple[str, NodeRow]]:
        """All names of a directory, in the order in which they were made."""
        ...

    def count_children(self, parent: int) -> int: ...
    def link(self, parent: int, name: str, ino: int) -> None:
        """Give *ino* this name; ExistsError if the name is taken."""
        ...

    def unlink(self, parent: int, name: str) -> None:
        """Remove the name (not the node)."""
        ...

    def place(self, ino: int) -> tuple[int, str] | None:
        """(parent, name) of a node; None for the root and for nodes without a name."""
        ...

    def nameless_nodes(self) -> list[NodeRow]:
        """Nodes (other than roots of attempts and pending ones) without a name: to be dropped."""
        ...


class Files(Protocol):
    """Bytes by file id."""

    def add_file(self, *, local: LocalBytes = ..., state: FileState = ...) -> FileRow:
        """A new file row with the next id; its spool file is not made yet."""
        ...

    def file(self, file: int) -> FileRow | None: ...
    def update_file(self, file: int, **changes: object) -> FileRow:
        """Change fields; a change of `state` must be legal (`advance_file`)."""
        ...

    def drop_file(self, file: int) -> None:
        """Remove the row, then the spool file."""
        ...

    def files_of_attempt(self, attempt: int) -> list[tuple[str, NodeRow, FileRow]]:
        """(path in the checkpoint, node, file) of all files in the attempt's tree, by path."""
        ...

    def nodes_of_file(self, file: int) -> list[NodeRow]: ...
    def data_path(self, file: int) -> str:
        """Path of its spool file (parent directories exist)."""
        ...


class Attempts(Protocol):
    """Attempts, ranks, what other members did."""

    def add_attempt(self, attempt: AttemptRow) -> AttemptRow:
        """Insert (`id` 0 means: the next)."""
        ...

    def attempt(self, id: int) -> AttemptRow | None: ...
    def update_attempt(self, id: int, **changes: object) -> AttemptRow:
        """Change fields; a change of `state` must be legal (`advance_attempt`)."""
        ...

    def attempts(
        self,
        *,
        run: str | None = None,
        run_ino: int | None = None,
        name: str | None = None,
        states: Iterable[AttemptState] | None = None,
    ) -> list[AttemptRow]:
        """Those that match all given conditions, oldest first."""
        ...

    def attempt_by_id(self, run: str, attempt: str) -> AttemptRow | None:
        """By its id in the store."""
        ...

    def newest_commit(self, run_ino: int) -> int:
        """The highest SEAL index of a committed attempt of that run directory, -1 for none."""
        ...

    def tree(self, attempt: int) -> list[tuple[str, NodeRow]]:
        """(path, node) of everything below the attempt's root, parents before children."""
        ...

    def add_rank_commit(self, attempt: int, rank: int) -> None: ...
    def rank_commits(self, attempt: int) -> tuple[int, ...]: ...
    def add_writer_rank(self, attempt: int, rank: int) -> None: ...
    def writer_ranks(self, attempt: int) -> tuple[int, ...]: ...
    def seen_count(self, attempt: int, member: str, what: str) -> int:
        """How many of another member's `names` or `votes` were taken over."""
        ...

    def set_seen_count(self, attempt: int, member: str, what: str, count: int) -> None: ...
    def seen_members(self, attempt: int) -> tuple[str, ...]: ...


class Handles(Protocol):
    """Open handles; they outlive the mount process."""

    def add_handle(self, handle: HandleRow) -> None: ...
    def handle(self, fh: int) -> HandleRow | None: ...
    def update_handle(self, fh: int, **changes: object) -> None: ...
    def drop_handle(self, fh: int) -> None: ...
    def handles(self, *, file: int | None = None) -> list[HandleRow]: ...
    def handles_of_attempt(self, attempt: int) -> list[HandleRow]: ...
    def clear_handles(self) -> list[HandleRow]:
        """Drop all handles and return them: after a fresh mount nobody has them open any more."""
        ...

    def next_handle(self) -> int:
        """A number for a new handle (reading ones too), never used again in this spool."""
        ...


class Waiting(Protocol):
    """Pending values, tombstones and the queues towards the store."""

    def add_pending(self, row: PendingRow) -> PendingRow: ...
    def pending(
        self, *, parent: int | None = None, name: str | None = None
    ) -> list[PendingRow]: ...
    def update_pending(self, id: int, **changes: object) -> None: ...
    def drop_pending(self, id: int) -> None: ...
    def add_tombstone(self, row: TombstoneRow) -> TombstoneRow: ...
    def tombstones(self, *, run: str | None = None) -> list[TombstoneRow]: ...
    def drop_tombstone(self, id: int) -> None: ...
    def add_name_op(self, row: NameOpRow) -> NameOpRow: ...
    def name_ops(self, attempt: int) -> list[NameOpRow]: ...
    def drop_name_op(self, id: int) -> None: ...
    def add_plain_op(self, row: PlainOpRow) -> PlainOpRow: ...
    def plain_ops(self) -> Sequence[PlainOpRow]: ...
    def drop_plain_op(self, id: int) -> None: ...
    def watch_run(self, run: str) -> None:
        """The publisher is to follow this run's log."""
        ...

    def watched_runs(self) -> tuple[str, ...]: ...


class Spool(Transactions, Nodes, Files, Attempts, Handles, Waiting, Protocol):
    """All of it."""

    @property
    def path(self) -> str:
        """The spool's directory."""
        ...

    def close(self) -> None:
        """Close this process's connection."""
        ...
