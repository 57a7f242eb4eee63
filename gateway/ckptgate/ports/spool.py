"""The spool: local staging. The calls on its database, whose rows are in `ports.rows`.

Thread rule: any thread of any process that has the spool open. A call outside `transaction()` is a
transaction of its own. What a committed transaction wrote survives kill -9 of every process; it
survives a power loss after `make_durable()` returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ckptgate.model.moves import Move
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.rows import (
    BEGAN_META,
    CONTACT_META,
    JOINING_META,
    NO_FILE,
    ROOM_META,
    ROOT_INO,
    SETTLED_META,
    VOTED_META,
    WRITERS_META,
    AttemptRow,
    Contact,
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
    SpoolRoom,
    TombstoneRow,
)

__all__ = [
    "BEGAN_META",
    "CONTACT_META",
    "JOINING_META",
    "NO_FILE",
    "ROOM_META",
    "ROOT_INO",
    "SETTLED_META",
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
    "Spool",
    "SpoolRoom",
    "TombstoneRow",
]


class Transactions(Protocol):
    """Atomicity and durability."""

    def transaction(self) -> AbstractContextManager[None]:
        """All calls inside are one atomic change, seen by no other process before its end.

        Re-entrant: an inner one joins the outer one. An exception rolls the outermost back. While
        another process has one, who begins one waits, and others of this process can read.

        Raises:
            BusyError: another process had one for too long.
        """
        ...

    def patience(self, limit_s: float) -> AbstractContextManager[None]:
        """Inside, this thread waits no longer than that for another process's transaction."""
        ...

    def version(self) -> object:
        """A value that is another one after any committed change, whichever process made it."""
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

    def drop_meta(self, key: str) -> None:
        """Forget a setting; unknown is success."""
        ...


class Nodes(Protocol):
    """Inodes and names. Names are unique in a directory; a node has at most one name.

    The root, a plain directory with the store path "", is there from the spool's creation.
    """

    def node(self, ino: int) -> NodeRow | None: ...
    def create_file(self, parent: int, name: str, node: NodeRow, handle: HandleRow) -> NodeRow:
        """A new file with a name, open for writing, all in one.

        Args:
            parent: directory.
            name: its name there.
            node: with its number, and that of the bytes in `file`; both are new.
            handle: on it; its rank is the one that writes the file.

        Raises:
            ExistsError: the name is taken.
        """
        ...

    def next_node(self) -> int:
        """A number for `create_file`."""
        ...

    def close_file(self, fh: int, file: FileRow, node: NodeRow) -> None:
        """A file's only handle is gone and the file is quiet, all in one.

        Args:
            fh: the handle.
            file: its bytes as they are in the spool, OPEN.
            node: the same node with its present size and times.
        """
        ...

    def add_node(self, node: NodeRow) -> NodeRow:
        """Insert (`ino` 0 means: give it the next number); returns the row with its number."""
        ...

    def update_node(self, ino: int, **changes: object) -> NodeRow:
        """Change the named fields of `NodeRow`; MissingError if it is gone."""
        ...

    def drop_node(self, ino: int) -> None:
        """Remove the node and its attributes (not its name nor file); unknown is success."""
        ...

    def child(self, parent: int, name: str) -> NodeRow | None: ...
    def children(self, parent: int) -> list[tuple[str, NodeRow]]:
        """All names of a directory, in the order in which they were made."""
        ...

    def count_children(self, parent: int, *, most: int = 1) -> tuple[int, int]:
        """How many names a directory has, and how many of them are directories.

        Args:
            parent: the directory.
            most: names beyond that many are not looked at.
        """
        ...

    def link(self, parent: int, name: str, ino: int) -> None:
        """Give *ino* this name; ExistsError if the name is taken."""
        ...

    def unlink(self, parent: int, name: str) -> None:
        """Remove the name (not the node)."""
        ...

    def place(self, ino: int) -> tuple[int, str] | None:
        """(parent, name) of a node; None for the root and for nodes without a name."""
        ...

    def xattrs(self, ino: int) -> dict[str, bytes]:
        """The node's extended attributes, by name."""
        ...

    def set_xattr(self, ino: int, name: str, value: bytes) -> None: ...
    def drop_xattr(self, ino: int, name: str) -> None:
        """Unknown is success."""
        ...

    def copy_xattrs(self, source: int, target: int) -> None:
        """Give a new node the attributes of another one."""
        ...

    def nameless_nodes(self) -> list[NodeRow]:
        """Nodes (other than roots of attempts and pending ones) without a name: to be dropped."""
        ...


class Files(Protocol):
    """Bytes by file id."""

    def add_file(self, *, local: LocalBytes = ..., state: FileState = ...) -> FileRow:
        """A new file row with the next id; its spool file is not made yet."""
        ...

    def next_file(self) -> int:
        """An id for `create_file`."""
        ...

    def file(self, file: int) -> FileRow | None: ...
    def update_file(self, file: int, **changes: object) -> FileRow:
        """Change fields; a change of `state` must be legal (`advance_file`)."""
        ...

    def drop_file(self, file: int) -> None:
        """Remove the row, and the spool file once a power loss can't bring the row back."""
        ...

    def files_in(self, states: Iterable[FileState]) -> list[FileRow]:
        """All files in *states*, oldest first."""
        ...

    def fetched_files(self) -> list[FileRow]:
        """Those with bytes that were fetched (`FileRow.have`), oldest first; looks at all files."""
        ...

    def files_of_attempt(
        self, attempt: int, *, states: Iterable[FileState] | None = None
    ) -> list[tuple[str, NodeRow, FileRow]]:
        """(path in the checkpoint, node, file) of the attempt's files in *states*, by path."""
        ...

    def waiting_files(
        self, attempt: int, state: FileState, *, after: int, limit: int
    ) -> list[tuple[str, NodeRow, FileRow]]:
        """Up to *limit* of the attempt's named files in *state*, by file id, of ids above *after*.

        As `files_of_attempt`, but its cost grows with what waits (`quiet`, `digested`) and with
        *limit*, not with the tree.
        """
        ...

    def count_files(
        self, attempt: int, *, foreign: str = "", own: str = ""
    ) -> dict[FileState, tuple[int, int]]:
        """State -> (number, bytes) of the attempt's files, without building their rows.

        With *foreign*, files whose key begins with it and not with *own* are left out.
        """
        ...

    def count_ranks(
        self, attempt: int, *, foreign: str = "", own: str = ""
    ) -> dict[int, dict[FileState, tuple[int, int]]]:
        """As `count_files`, by the rank that wrote them; -1 where that is unknown."""
        ...

    def nodes_of_file(self, file: int) -> list[NodeRow]: ...
    def finish_removals(self) -> None:
        """Return when the bytes of all files that this process dropped are gone, or can't be."""
        ...

    def unreferenced_files(self) -> list[int]:
        """Files that no node and no handle has: a crash left them, or somebody is at them now."""
        ...

    def allocated(self) -> int:
        """Bytes of its disk that the spool takes; cheap enough to be asked each second."""
        ...

    def stray_files(self) -> list[tuple[str, int]]:
        """(path, allocated bytes) of spool files without a row, which survives a power loss.

        Whoever stages a file may make it before its row is committed: see `drop_stray`.
        """
        ...

    def drop_stray(self, path: str) -> bool:
        """Remove a spool file unless it has a row by now; whether it was removed."""
        ...

    def drop_orphans(self) -> int:
        """Remove spool files without a row, and rows that nothing refers to; returns how many.

        Only for a process that holds the spool's lock, before anybody else has the spool open.
        """
        ...

    def data_path(self, file: int) -> str:
        """Path of its spool file (parent directories exist)."""
        ...

    def note_use(self, fd: int, at_ns: int) -> None:
        """The spool file open as *fd*, which nobody writes, is read from now on."""
        ...

    def last_use_ns(self, file: int) -> int:
        """When its spool file was last read, fetched or made, as far as is known; 0: not here."""
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

    def drop_attempt(self, id: int) -> None:
        """Remove the attempt's row and all that is kept by its number (not its nodes and files)."""
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

    def note_close(self, fh: int, *, is_released: bool) -> bool:
        """Keep, cheaply, that a handle was closed or released until `forget_close`.

        Returns:
            False if no more can be noted: change the rows instead.
        """
        ...

    def noted_closes(self) -> list[tuple[int, bool]]:
        """(handle, whether it was released) of all that is noted, also by a process before this."""
        ...

    def forget_close(self, fh: int) -> None:
        """A committed transaction says what was noted."""
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
    def add_move(self, attempt: int, move: Move) -> None: ...
    def moves(self, attempt: int) -> list[Move]:
        """What was renamed in the tree, by whomever, in order."""
        ...

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
