"""Putting the tree of a committed checkpoint into the spool.

It owns the rule that what is visible is exactly the manifest: nodes that aren't in it lose their
names, bytes that aren't its bytes, or that somebody may still write, are not kept. Node numbers of
what stays never change.

Thread rule: any thread of either process; one transaction. A tree that takes no changes any more is
compared before it (`prepare`), as the other process's changes wait behind a transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from ckptgate.engine.leases import has_no_open_writer
from ckptgate.engine.manifests import load_manifest, small_chunks
from ckptgate.engine.sharedtree import DEFAULT_DIR_MODE, TreeWriter
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.ids import check_checkpoint_name
from ckptgate.model.layout import full_key
from ckptgate.model.rules import AttemptView
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.catalog import Invalidations
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes, NodeKind, NodeRow, Spool

__all__ = [
    "Adoption",
    "Unnamed",
    "adopt",
    "adopt_root",
    "fill",
    "load_manifest",
    "prepare",
    "tell_unnamed",
]

_log = logging.getLogger(__name__)

_LOST: Final = frozenset({AttemptState.ABORTED, AttemptState.ABANDONED})
_FILLED_AT_ONCE: Final = 200
"""Entries in one transaction."""
_DIGESTED: Final = frozenset({FileState.DIGESTED, FileState.STORED})


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A node that lost its name by an adoption, and which name that was."""

    ino: int
    parent: int
    name: str


def tell_unnamed(invalidations: Invalidations, unnamed: Iterable[Unnamed]) -> None:
    """Have the kernel look these names up again; after the adoption's transaction."""
    for node in unnamed:
        invalidations.name(node.parent, node.name)
        # Only the mount knows when nobody uses it any more.
        invalidations.node(node.ino)


def adopt(
    spool: Spool,
    run: str,
    run_ino: int,
    manifest: Manifest,
    digest: str,
    *,
    seal_index: int = -1,
    unnamed: list[Unnamed] | None = None,
    prepared: Adoption | None = None,
) -> AttemptRow:
    """Make the committed checkpoint's tree exactly *manifest*; its row, which is committed then.

    Local files whose digest is the manifest's and that nobody can write any more are kept with
    their bytes; all others get a new node and have no bytes here yet. Another committed attempt of
    that name becomes replaced. Idempotent.

    Args:
        spool: where to.
        run: the run's path.
        run_ino: the run's node.
        manifest: as `load_manifest` returned it.
        digest: of the manifest's bytes, as its COMMIT names it.
        seal_index: of its SEAL in the log, -1 to leave what is known.
        unnamed: gets the nodes that lost their names, for `tell_unnamed`.
        prepared: what `prepare` found of the same manifest before.
    """
    with spool.transaction():
        row = spool.attempt_by_id(run, manifest.attempt)
        if row is not None and row.state is AttemptState.COMMITTED and row.manifest == digest:
            return row
        if row is not None and row.state in _LOST:
            # This node gave it up, others committed it: what is here stays as evidence.
            spool.update_attempt(row.id, attempt="")
            row = None
        if row is None:
            newest = max((entry.mtime_ns for entry in manifest.entries), default=0)
            row = _add_row(spool, run, run_ino, manifest, newest)
        for other in spool.attempts(run=run, name=manifest.name, states=(AttemptState.COMMITTED,)):
            if other.id != row.id:
                spool.update_attempt(other.id, state=AttemptState.REPLACED)
        if prepared is None or prepared.row != row:
            prepared = Adoption(spool, row, manifest)
        removed = prepared.fill()
        if unnamed is not None:
            unnamed.extend(removed)
        return spool.update_attempt(
            row.id,
            state=AttemptState.COMMITTED,
            name=check_checkpoint_name(manifest.name),
            manifest=digest,
            format_name=manifest.format_name,
            world_size=manifest.world_size,
            seal_index=seal_index if seal_index >= 0 else row.seal_index,
            reason="",
            missing=(),
        )


def prepare(spool: Spool, run: str, manifest: Manifest) -> Adoption | None:
    """Compare this node's part of a checkpoint with its *manifest*, outside of a transaction.

    What is voted takes no more changes: if its row is still the same later, so is its tree. A
    reader that opens a file meanwhile gets a descriptor that can't write. None if it has no part.
    """
    row = spool.attempt_by_id(run, manifest.attempt)
    if row is None or not row.is_voted or row.state not in UNDECIDED:
        return None
    if spool.node(row.root) is None:
        return None
    return Adoption(spool, row, manifest)


def adopt_root(spool: Spool, run: str, run_ino: int, view: AttemptView) -> AttemptRow | None:
    """The root of a committed checkpoint that this node has no part in; its row.

    Its tree comes with `fill`, should anybody look. None if this node has a part in it: then what
    is here has to become what the manifest says, at once.
    """
    with spool.transaction():
        row = spool.attempt_by_id(run, view.attempt)
        if row is not None and row.state in _LOST:
            # This node gave it up, others committed it: what is here stays as evidence.
            spool.update_attempt(row.id, attempt="")
        elif row is not None:
            return row if row.state is AttemptState.COMMITTED else None
        row = _add_row(spool, run, run_ino, view, _ns_of(view.committed_at))
        for other in spool.attempts(run=run, name=view.name, states=(AttemptState.COMMITTED,)):
            spool.update_attempt(other.id, state=AttemptState.REPLACED)
        return spool.update_attempt(
            row.id, state=AttemptState.COMMITTED, seal_index=view.seal_index
        )


def fill(spool: Spool, attempt: int, manifest: Manifest, digest: str) -> None:
    """Put the tree of *manifest* below a root that `adopt_root` made; idempotent.

    Not in one transaction, as the other process's changes wait behind it: nobody looks in before
    the last one, which notes the manifest. What a crash left of it is gone on with.
    """
    adoption: Adoption | None = None
    for at in range(0, len(manifest.entries), _FILLED_AT_ONCE):
        with spool.transaction():
            row = spool.attempt(attempt)
            if row is None or not row.is_root_only:
                return
            if adoption is None:
                adoption = Adoption(spool, row, manifest)
            adoption.take(manifest.entries[at : at + _FILLED_AT_ONCE])
    with spool.transaction():
        row = spool.attempt(attempt)
        if row is not None and row.is_root_only:
            spool.update_attempt(
                row.id,
                manifest=digest,
                format_name=manifest.format_name,
                world_size=manifest.world_size,
            )


def _ns_of(at: str) -> int:
    """A record's time in ns since the epoch, 0 if it is none: no rule depends on it."""
    try:
        return round(datetime.fromisoformat(at).timestamp() * 1000) * 1_000_000
    except ValueError:
        return 0


def _add_row(
    spool: Spool, run: str, run_ino: int, made: Manifest | AttemptView, time_ns: int
) -> AttemptRow:
    above = spool.node(run_ino)
    root = spool.add_node(
        NodeRow(
            ino=0,
            kind=NodeKind.DIR,
            attempt=None,
            mode=DEFAULT_DIR_MODE if above is None else above.mode,
            uid=0 if above is None else above.uid,
            gid=0 if above is None else above.gid,
            size=0,
            mtime_ns=time_ns,
            ctime_ns=time_ns,
        )
    )
    row = spool.add_attempt(
        AttemptRow(
            id=0,
            run=run,
            run_ino=run_ino,
            name=made.name,
            attempt=made.attempt,
            job_key="",
            generation=made.generation,
            state=AttemptState.OPEN,
            root=root.ino,
            created_ns=time_ns,
            write_ns=time_ns,
        )
    )
    spool.update_node(root.ino, attempt=row.id)
    return row


class Adoption:
    """One adoption: found out when it is made, done by `fill` or `take` in a transaction."""

    def __init__(self, spool: Spool, row: AttemptRow, manifest: Manifest) -> None:
        self.row = row
        self._spool = spool
        self._run = row.run
        self._manifest = manifest
        root = spool.node(row.root)
        if root is None:  # its tree was removed: begin with an empty one under the old number
            root = spool.add_node(_empty_root(row))
        self._files = {path: file for path, _, file in spool.files_of_attempt(row.id)}
        self._open = {handle.file for handle in spool.handles_of_attempt(row.id)}
        self._writer = TreeWriter(spool, row.id, root, root.mtime_ns, dict(spool.tree(row.id)))
        self._modes = {e.path: e for e in manifest.entries if e.type is EntryType.DIR}
        self._gone = self._not_staying()
        gone = set(self._gone)
        self._changed = [e for e in manifest.entries if e.path in gone or not self._is_as_it_is(e)]

    def _not_staying(self) -> list[str]:
        """Paths that don't stay, what is in a directory before it."""
        wanted = {entry.path: entry for entry in self._manifest.entries}
        above = {path[:at] for path in wanted for at, c in enumerate(path) if c == "/"}
        paths = sorted(self._writer.nodes, reverse=True)
        return [path for path in paths if not self._stays(path, wanted.get(path), above)]

    def _is_as_it_is(self, entry: FileEntry) -> bool:
        """Whether nothing has to be changed for this entry."""
        node, file = self._writer.nodes.get(entry.path), self._files.get(entry.path)
        if node is None or (file is not None and not self._is_stored_as(file, entry)):
            return False
        return (node.mode, node.uid, node.gid, node.size, node.mtime_ns) == (
            entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_ns
        )  # fmt: skip

    def fill(self) -> list[Unnamed]:
        """Make the tree what the manifest says; the nodes that lost their names by it."""
        removed: list[Unnamed] = []
        for path in self._gone:
            ino = self._writer.nodes[path].ino
            place = self._spool.place(ino)
            if place is not None:
                removed.append(Unnamed(ino, *place))
            self._writer.remove(path)
        self.take(self._changed)
        return removed

    def take(self, entries: Iterable[FileEntry]) -> None:
        """Have these entries in the tree as they are."""
        for entry in entries:
            node = self._writer.nodes.get(entry.path)
            if node is None:
                self._add(entry)
            else:
                self._keep(node, entry)

    def _stays(self, path: str, entry: FileEntry | None, above: set[str]) -> bool:
        node = self._writer.nodes[path]
        if entry is None:
            return node.kind is NodeKind.DIR and path in above
        if node.kind.value != entry.type.value:
            return False
        if entry.type is EntryType.SYMLINK:
            return node.target == entry.target
        file = self._files.get(path)
        return entry.type is EntryType.DIR or (
            file is not None
            and file.state in _DIGESTED
            and file.digest == entry.digest
            and not self._may_be_written(file)
        )

    def _may_be_written(self, file: FileRow) -> bool:
        """Whether a descriptor or mapping is left through which these bytes can change."""
        if file.is_linked or file.local is not LocalBytes.FULL:
            # That was made sure before the store got the link; or only verified bytes come here.
            return False
        return file.file in self._open or not has_no_open_writer(self._spool.data_path(file.file))

    def _keep(self, node: NodeRow, entry: FileEntry) -> None:
        file = self._files.get(entry.path)
        if file is not None:
            self._keep_bytes(file, entry)
        kept = msgspec.structs.replace(
            node,
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            size=entry.size,
            mtime_ns=entry.mtime_ns,
        )
        if kept != node:
            self._spool.update_node(
                node.ino,
                mode=entry.mode,
                uid=entry.uid,
                gid=entry.gid,
                size=entry.size,
                mtime_ns=entry.mtime_ns,
            )

    def _is_stored_as(self, file: FileRow, entry: FileEntry) -> bool:
        return file.state is FileState.STORED and file.key == full_key(self._run, entry.key)

    def _keep_bytes(self, file: FileRow, entry: FileEntry) -> None:
        if not self._is_stored_as(file, entry):
            key = full_key(self._run, entry.key)
            self._spool.update_file(file.file, state=FileState.STORED, key=key)

    def _add(self, entry: FileEntry) -> None:
        parent = self._writer.parent_of(entry.path, self._modes)
        if parent is None:
            # `load_manifest` refuses such a manifest; this one came from somewhere else.
            msg = f"manifest of {self._manifest.attempt!r} has {entry.path!r} below a file"
            raise ValueError(msg)
        file: int | None = None
        if entry.type is EntryType.FILE:
            file = self._spool.add_file(local=LocalBytes.NONE, state=FileState.STORED).file
            self._spool.update_file(
                file,
                size=entry.size,
                digest=entry.digest,
                chunks=small_chunks(entry),
                key=full_key(self._run, entry.key),
                evidence=entry.evidence,
            )
        self._writer.add_entry(parent, entry, file)


def _empty_root(row: AttemptRow) -> NodeRow:
    return NodeRow(
        ino=row.root,
        kind=NodeKind.DIR,
        attempt=row.id,
        mode=DEFAULT_DIR_MODE,
        uid=0,
        gid=0,
        size=0,
        mtime_ns=row.created_ns,
        ctime_ns=row.created_ns,
    )
