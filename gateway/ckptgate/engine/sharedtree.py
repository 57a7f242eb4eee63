"""Taking over what other members of an attempt did: their directories and their closed files.

It owns the rule who wins: a local file or directory is never replaced by another member's; what was
imported from a member follows that member's newest vote. Two files under one path with different
digests stay two until the merge of the votes refuses them by name.

Thread rule: any thread of either process; each name operation and each vote is one transaction
together with the mark that it was taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from ckptgate.engine.manifests import load_chunks, small_chunks
from ckptgate.engine.rolls import Rolls
from ckptgate.model.documents import EntryType, FileEntry, NameOp, NameOpKind, Vote
from ckptgate.model.layout import data_key, full_key
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.clock import Clock
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes, NodeKind, NodeRow, Spool
from ckptgate.ports.store import Records

__all__ = ["SharedTree", "TreeWriter", "is_foreign_key"]

_log = logging.getLogger(__name__)

DEFAULT_DIR_MODE: Final = 0o755
_UNDECIDED: Final = frozenset({AttemptState.OPEN, AttemptState.SEALED})


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
        return self.add_entry(parent, entry).ino

    def add_entry(self, parent: int, entry: FileEntry, file: int | None = None) -> NodeRow:
        """Add what *entry* describes; *file* is the id of a file's bytes."""
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
        return self._link(parent, entry.path, node)

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
        for member in members:
            start = self._spool.seen_count(row.id, member, "names")
            for op in self._rolls.name_ops(row.run, row.attempt, member, start):
                is_changed = self._take_name(row.id, op) or is_changed
        return is_changed

    def take_files(self, row: AttemptRow, votes: Mapping[str, Vote]) -> bool:
        """Import the files of other members' newest *votes*; whether anything changed."""
        is_changed = False
        for member, vote in votes.items():
            if self._spool.seen_count(row.id, member, "imported") > vote.n:
                continue
            # Read before the transaction: it is never held over a store call.
            tables = self._chunks_of(row.run, vote)
            with self._spool.transaction():
                is_changed = self._take_vote(row.id, member, vote, tables) or is_changed
                self._spool.set_seen_count(row.id, member, "imported", vote.n + 1)
        return is_changed

    # Names

    def _take_name(self, attempt: int, op: NameOp) -> bool:
        with self._spool.transaction():
            row = self._spool.attempt(attempt)
            if row is None or row.state not in _UNDECIDED:
                return False
            if self._spool.seen_count(attempt, op.member, "names") != op.n:
                return False  # the other process was faster
            self._spool.set_seen_count(attempt, op.member, "names", op.n + 1)
            return self._apply_op(row, op)

    def _apply_op(self, row: AttemptRow, op: NameOp) -> bool:
        match op.op:
            case NameOpKind.ROOT_RENAME:
                if row.name == op.to:
                    return False
                self._spool.update_attempt(row.id, name=op.to)
                return True
            case NameOpKind.MKDIR:
                return self._make_directory(row, op.path, op.mode) is not None
            case NameOpKind.RMDIR:
                return self._remove_directory(row, op.path)
            case NameOpKind.RENAME:
                return self._rename_directory(row, op.path, op.to)

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
        if row is None or root is None or row.state not in _UNDECIDED:
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
        files = {entry.path: entry for entry in vote.entries if entry.type is EntryType.FILE}
        is_changed = self._forget_stale(writer, imported, files)
        modes = {entry.path: entry for entry in vote.entries if entry.type is EntryType.DIR}
        for entry in vote.entries:
            if entry.type is EntryType.DIR or entry.path in writer.nodes:
                continue
            # A revision's vote names the bytes of its base too. Only a member's own are imported:
            # the others could not be told from what was staged here.
            if entry.key and not full_key(row.run, entry.key).startswith(f"{theirs}/"):
                continue
            parent = writer.parent_of(entry.path, modes)
            if parent is None:
                _log.warning("import-conflict attempt=%s path=%s", row.attempt, entry.path)
                continue
            file = self._add_file(row.run, entry, tables)
            writer.add_entry(parent, entry, file)
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
