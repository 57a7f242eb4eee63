"""Taking over what other members of an attempt did: their directories and their closed files.

It owns the rule who wins: a local file or directory is never replaced by another member's; what was
imported from a member follows that member's newest vote, at the paths that its directories have
here: what was said before a rename is followed to where that led (`model.moves`). Two files under
one path with different digests stay two until the merge of the votes refuses them by name.

Thread rule: any thread of either process; each name operation and each vote is one transaction
together with the mark that it was taken over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ckptgate.engine.manifests import load_chunks, small_chunks
from ckptgate.engine.rolls import Rolls
from ckptgate.model.documents import EntryType, FileEntry, NameOp, NameOpKind, Vote
from ckptgate.model.layout import data_key, full_key
from ckptgate.model.moves import Move, place_now, where_now
from ckptgate.model.states import UNDECIDED, FileState
from ckptgate.ports.clock import Clock
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes, NodeKind, NodeRow, Spool
from ckptgate.ports.store import Records

__all__ = ["SharedTree", "TreeWriter", "is_foreign_key"]

_log = logging.getLogger(__name__)

DEFAULT_DIR_MODE: Final = 0o755


def is_foreign_key(run: str, attempt: str, member: str, key: str) -> bool:
    """Whether *key* (full) holds bytes that another member than *member* staged for *attempt*."""
    data = full_key(run, data_key(attempt, "", ""))
    own = full_key(run, data_key(attempt, member, ""))
    return key.startswith(f"{data}/") and not key.startswith(f"{own}/")


class TreeWriter:
    """Nodes of one checkpoint's tree by path. Lives for one transaction; not thread-safe."""

    def __init__(
        self, spool: Spool, attempt: int, root: NodeRow, now_ns: int, nodes: dict[str, NodeRow]
    ) -> None:
        """Write below *root*, where *nodes* (by path) are already."""
        self._spool = spool
        self._attempt = attempt
        self._now_ns = now_ns
        self._root = root
        self.nodes = nodes

    def parent_of(self, path: str, modes: Mapping[str, FileEntry]) -> int | None:
        """Node of the directory that holds *path*, made if need be; None: a file is in the way."""
        above = path.rpartition("/")[0]
        return self._root.ino if not above else self.directory(above, modes)

    def directory(self, path: str, modes: Mapping[str, FileEntry]) -> int | None:
        """Node of the directory *path*, made (with its parents) if need be; None: in the way."""
        present = self.nodes.get(path)
        if present is not None:
            return present.ino if present.kind is NodeKind.DIR else None
        parent = self.parent_of(path, modes)
        if parent is None:
            return None
        entry = modes.get(path)
        if entry is None:
            return self.add(parent, path, kind=NodeKind.DIR, mode=DEFAULT_DIR_MODE).ino
        return self.add_entry(parent, entry, path=path).ino

    def add_entry(
        self, parent: int, entry: FileEntry, file: int | None = None, *, path: str = ""
    ) -> NodeRow:
        """Add what *entry* describes, at another *path* if need be; *file* is its bytes' id."""
        node = NodeRow(
            ino=0,
            kind=NodeKind(entry.type.value),
            attempt=self._attempt,
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            size=entry.size,
            mtime_ns=entry.mtime_ns,
            ctime_ns=entry.mtime_ns,
            target=entry.target,
            file=file,
        )
        return self._link(parent, path or entry.path, node)

    def add(self, parent: int, path: str, *, kind: NodeKind, mode: int) -> NodeRow:
        """Add a node that no entry describes, with the root's owner and the present time."""
        node = NodeRow(
            ino=0,
            kind=kind,
            attempt=self._attempt,
            mode=mode,
            uid=self._root.uid,
            gid=self._root.gid,
            size=0,
            mtime_ns=self._now_ns,
            ctime_ns=self._now_ns,
        )
        return self._link(parent, path, node)

    def remove(self, path: str) -> None:
        """Take the name away; the node lives until nobody knows it any more."""
        place = self._spool.place(self.nodes.pop(path).ino)
        if place is not None:
            self._spool.unlink(*place)

    def _link(self, parent: int, path: str, node: NodeRow) -> NodeRow:
        added = self._spool.add_node(node)
        self._spool.link(parent, path.rpartition("/")[2], added.ino)
        self.nodes[path] = added
        return added


class SharedTree:
    """Other members' part of an attempt's tree in this spool. Any thread."""

    def __init__(
        self, *, store: Records, spool: Spool, clock: Clock, rolls: Rolls, member: str
    ) -> None:
        self._store = store
        self._spool = spool
        self._clock = clock
        self._rolls = rolls
        self._member = member

    def take_names(self, row: AttemptRow, members: Iterable[str]) -> bool:
        """Apply the directory operations of *members* that are new; whether anything changed."""
        is_changed = False
        lists: dict[str, deque[NameOp]] = {}
        asked = set(members)
        # What an operation came after is in the store before it: so who is waited for has more.
        while asked and sum([self._read_names(row, lists, member) for member in sorted(asked)]):
            did, asked = self._take_ready(row.id, lists)
            is_changed = did or is_changed
        return is_changed

    def take_files(self, row: AttemptRow, votes: Mapping[str, Vote]) -> bool:
        """Import the files of other members' newest *votes*; whether anything changed."""
        is_changed = False
        for member, vote in votes.items():
            if self._spool.seen_count(row.id, member, "imported") > vote.n:
                continue
            if self._not_taken(row.id, member, vote.after):
                # It came after the look at the name operations: its paths are to be read with them.
                continue
            # Read before the transaction: it is never held over a store call.
            tables = self._chunks_of(row.run, vote)
            with self._spool.transaction():
                is_changed = self._take_vote(row.id, member, vote, tables) or is_changed
                self._spool.set_seen_count(row.id, member, "imported", vote.n + 1)
        return is_changed

    # Names

    def _read_names(self, row: AttemptRow, lists: dict[str, deque[NameOp]], member: str) -> int:
        """Add to the member's list in *lists* what is new; how much it was."""
        known = lists.setdefault(member, deque())
        start = known[-1].n + 1 if known else self._spool.seen_count(row.id, member, "names")
        new = self._rolls.name_ops(row.run, row.attempt, member, start)
        known.extend(new)
        return len(new)

    def _take_ready(
        self, attempt: int, lists: Mapping[str, deque[NameOp]]
    ) -> tuple[bool, set[str]]:
        """Apply what comes after nothing that is still to be taken over.

        Returns:
            Whether the tree changed, and whose operations the rest comes after.
        """
        is_changed = False
        while True:
            awaited: set[str] = set()
            did = False
            for ops in lists.values():
                while ops:
                    before = self._not_taken(attempt, ops[0].member, ops[0].after)
                    if before:
                        awaited |= before
                        break
                    is_changed = self._take_name(attempt, ops.popleft()) or is_changed
                    did = True
            if not did:
                return is_changed, awaited

    def _not_taken(self, attempt: int, member: str, after: Mapping[str, int]) -> set[str]:
        """Other members of whose renames *member* knew more than this tree has in it."""
        return {
            other
            for other, count in after.items()
            if other not in {member, self._member}
            and self._spool.seen_count(attempt, other, "names") < count
        }

    def _take_name(self, attempt: int, op: NameOp) -> bool:
        with self._spool.transaction():
            row = self._spool.attempt(attempt)
            if row is None or row.state not in UNDECIDED:
                return False
            if self._spool.seen_count(attempt, op.member, "names") != op.n:
                return False  # the other process was faster
            self._spool.set_seen_count(attempt, op.member, "names", op.n + 1)
            return self._apply_op(row, op)

    def _apply_op(self, row: AttemptRow, op: NameOp) -> bool:
        moves = self._spool.moves(row.id)
        place = place_now(op.path, op.after, moves, by=op.member)
        match op.op:
            case NameOpKind.ROOT_RENAME:
                if row.name == op.to:
                    return False
                self._spool.update_attempt(row.id, name=op.to)
                return True
            case NameOpKind.MKDIR:
                path = where_now(op.path, op.after, moves, by=op.member)
                return self._make_directory(row, path, op.mode) is not None
            case NameOpKind.RMDIR:
                return self._remove_directory(row, place)
            case NameOpKind.RENAME:
                to = place_now(op.to, op.after, moves, by=op.member)
                self._spool.add_move(row.id, Move(member=op.member, n=op.n, path=place, to=to))
                return self._rename_directory(row, place, to)

    def _find(self, row: AttemptRow, path: str) -> NodeRow | None:
        node = self._spool.node(row.root)
        for part in path.split("/") if path else ():
            if node is None or node.kind is not NodeKind.DIR:
                return None
            node = self._spool.child(node.ino, part)
        return node

    def _make_directory(self, row: AttemptRow, path: str, mode: int) -> NodeRow | None:
        """Make the directory and its parents; None if it is there or something is in the way."""
        root = self._spool.node(row.root)
        if root is None or self._find(row, path) is not None:
            return None
        writer = TreeWriter(self._spool, row.id, root, self._clock.now_ns(), self._above(row, path))
        parent = writer.parent_of(path, {})
        if parent is None:
            _log.warning("name-op-conflict attempt=%s op=mkdir path=%s", row.attempt, path)
            return None
        return writer.add(parent, path, kind=NodeKind.DIR, mode=mode)

    def _above(self, row: AttemptRow, path: str) -> dict[str, NodeRow]:
        """The nodes that are there on the way to *path*."""
        found: dict[str, NodeRow] = {}
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            node = self._find(row, above)
            if node is None:
                break
            found[above] = node
        return found

    def _remove_directory(self, row: AttemptRow, path: str) -> bool:
        node = self._find(row, path)
        if node is None or node.kind is not NodeKind.DIR:
            return False
        if self._spool.count_children(node.ino)[0]:
            # Something of ours lies in it: the directory lives on, as the merge will show.
            _log.warning("name-op-conflict attempt=%s op=rmdir path=%s", row.attempt, path)
            return False
        self._unname(node)
        return True

    def _rename_directory(self, row: AttemptRow, old: str, new: str) -> bool:
        source = self._find(row, old)
        if new == old or new.startswith(f"{old}/"):
            return False
        if source is None or source.kind is not NodeKind.DIR:
            # It came from elsewhere, or was renamed here before: what counts is that it is there.
            return self._make_directory(row, new, DEFAULT_DIR_MODE) is not None
        target = self._find(row, new)
        if target is not None:
            return self._merge_into(row, source, target)
        above = new.rpartition("/")[0]
        if above:
            self._make_directory(row, above, DEFAULT_DIR_MODE)
        parent = self._find(row, above)
        if parent is None or parent.kind is not NodeKind.DIR:
            _log.warning("name-op-conflict attempt=%s op=rename path=%s", row.attempt, new)
            return False
        self._unname(source)
        self._spool.link(parent.ino, new.rpartition("/")[2], source.ino)
        return True

    def _merge_into(self, row: AttemptRow, source: NodeRow, target: NodeRow) -> bool:
        """Move what *target* doesn't have from *source* into it; an empty *source* goes."""
        if target.kind is not NodeKind.DIR or target.ino == source.ino:
            _log.warning("name-op-conflict attempt=%s op=rename ino=%d", row.attempt, target.ino)
            return False
        for name, node in self._spool.children(source.ino):
            present = self._spool.child(target.ino, name)
            if present is None:
                self._spool.unlink(source.ino, name)
                self._spool.link(target.ino, name, node.ino)
            elif node.kind is NodeKind.DIR:
                self._merge_into(row, node, present)
        if not self._spool.count_children(source.ino)[0]:
            self._unname(source)
        return True

    def _unname(self, node: NodeRow) -> None:
        """Take the name away; the node lives until nobody knows it any more."""
        place = self._spool.place(node.ino)
        if place is not None:
            self._spool.unlink(*place)

    # Files

    def _chunks_of(self, run: str, vote: Vote) -> dict[str, bytes]:
        return {
            entry.path: load_chunks(self._store, run, entry.chunks, entry.size)
            for entry in vote.entries
            if entry.type is EntryType.FILE and entry.chunks is not None
        }

    def _take_vote(
        self, attempt: int, member: str, vote: Vote, tables: Mapping[str, bytes]
    ) -> bool:
        row = self._spool.attempt(attempt)
        root = self._spool.node(row.root) if row is not None else None
        if row is None or root is None or row.state not in UNDECIDED:
            return False
        writer = TreeWriter(
            self._spool, row.id, root, self._clock.now_ns(), dict(self._spool.tree(row.id))
        )
        theirs = full_key(row.run, data_key(row.attempt, member, ""))
        imported = {
            path: file
            for path, _, file in self._spool.files_of_attempt(row.id)
            if file.key.startswith(f"{theirs}/")
        }
        modes, others = _placed(vote, self._spool.moves(row.id))
        files = {path: entry for path, entry in others.items() if entry.type is EntryType.FILE}
        is_changed = self._forget_stale(writer, imported, files)
        for path, entry in others.items():
            if path in writer.nodes:
                continue
            # A revision's vote names the bytes of its base too. Only a member's own are imported:
            # the others could not be told from what was staged here.
            if entry.key and not full_key(row.run, entry.key).startswith(f"{theirs}/"):
                continue
            parent = writer.parent_of(path, modes)
            if parent is None:
                _log.warning("import-conflict attempt=%s path=%s", row.attempt, path)
                continue
            file = self._add_file(row.run, entry, tables)
            writer.add_entry(parent, entry, file, path=path)
            is_changed = True
        return is_changed

    def _forget_stale(
        self,
        writer: TreeWriter,
        imported: Mapping[str, FileRow],
        files: Mapping[str, FileEntry],
    ) -> bool:
        """Drop what was imported from a member and is not in its newest vote as it was."""
        is_changed = False
        for path, file in imported.items():
            entry = files.get(path)
            if entry is not None and entry.digest == file.digest:
                continue
            writer.remove(path)
            is_changed = True
        return is_changed

    def _add_file(self, run: str, entry: FileEntry, tables: Mapping[str, bytes]) -> int | None:
        if entry.type is not EntryType.FILE:
            return None
        row = self._spool.add_file(local=LocalBytes.NONE, state=FileState.STORED)
        self._spool.update_file(
            row.file,
            size=entry.size,
            digest=entry.digest,
            chunks=tables.get(entry.path) or small_chunks(entry),
            key=full_key(run, entry.key),
            evidence=entry.evidence,
        )
        return row.file


def _placed(vote: Vote, moves: Sequence[Move]) -> tuple[dict[str, FileEntry], dict[str, FileEntry]]:
    """The vote's directories and all else, by the paths that they have in a tree with *moves*."""
    directories: dict[str, FileEntry] = {}
    others: dict[str, FileEntry] = {}
    for entry in vote.entries:
        if entry.type is EntryType.DIR:
            directories[where_now(entry.path, vote.after, moves)] = entry
        else:
            others[place_now(entry.path, vote.after, moves)] = entry
    return directories, others
