"""Names outside of checkpoints: their way into the store's plain tree.

It owns the order of that tree's changes: queued operations happen in the order in which they were
made, live files are copied when they changed, and a whole file replaces its old version only once
its bytes are quiet and its container validates. What fails is kept and tried again.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from ckptgate.engine.jobs import Backoff
from ckptgate.engine.node import Node
from ckptgate.errors import ExistsError, InvalidNameError, MissingError, RefusedError
from ckptgate.model.layout import join_key
from ckptgate.model.states import FileState
from ckptgate.ports.spool import (
    ROOT_INO,
    FileRow,
    LocalBytes,
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    PlainOpKind,
    PlainOpRow,
)
from ckptgate.ports.store import PlainKind

__all__ = ["Mirror"]

_log = logging.getLogger(__name__)

WALK_INTERVAL_S: Final = 60.0
"""Between looks at all plain files of the spool (open ones are looked at more often)."""
LINK_KEPT_S: Final = 5.0
"""How long others see a removed pointer to a file, and the file once no pointer names it."""
_QUEUE: Final = "queue"


class Mirror:
    """Brings plain names into the store."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._spool = node.spool
        self._clock = node.clock
        self._events = node.events
        self._invalidations = node.invalidations
        self._live_interval_s = node.settings.live_interval_s
        self._backoff: Backoff[str] = Backoff(
            node.clock, node.settings.retry_first_s, node.settings.retry_max_s
        )
        self._put: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()
        self._live_at = -1e9
        self._walk_at = -1e9
        self._is_behind = False
        self._said: set[tuple[str, str]] = set()
        self._removed_at: dict[int, float] = {}

    def step(self) -> bool:
        """One pass; True if anything was done."""
        did = self._queue()
        if not self._spool.plain_ops():
            did = self._live_files() or did
            did = self._whole_files() or did
        return did

    # The queue

    def _queue(self) -> bool:
        did = False
        if not self._backoff.is_due(_QUEUE):
            return False
        for op in self._spool.plain_ops():
            if not self._try(_QUEUE, f"{op.op} {op.path}", lambda op=op: self._do_or_skip(op)):
                break
            self._spool.drop_plain_op(op.id)
            did = True
        return did

    def _do_or_skip(self, op: PlainOpRow) -> None:
        """As `_do`; what can never be done must not hold up what comes after it."""
        try:
            self._do(op)
        except (ExistsError, InvalidNameError, MissingError, RefusedError) as exc:
            self._events.record("plain-skipped", f"{op.op} {op.path}", str(exc))

    def _do(self, op: PlainOpRow) -> None:
        match op.op:
            case PlainOpKind.MKDIR:
                self._store.plain_mkdir(op.path, op.mode)
            case PlainOpKind.SYMLINK:
                self._store.plain_symlink(op.path, op.to)
            case PlainOpKind.REMOVE:
                self._store.plain_remove(op.path, is_dir=False)
            case PlainOpKind.RMDIR:
                self._store.plain_remove(op.path, is_dir=True)
            case PlainOpKind.RENAME:
                self._rename(op)
            case PlainOpKind.PUT:
                node = self._spool.node(op.ino) if op.ino is not None else None
                if node is not None and self._has_name(node) and not self._is_held(node):
                    # Who writes and closes it during the copy finds it queued still: look again.
                    self._open.add(node.ino)
                    # Under the name that it had then: what became of that since is queued behind.
                    self._put_file(node, op.path)

    def _is_held(self, node: NodeRow) -> bool:
        """Whether it got the name of a pointer or whole file: those are published otherwise."""
        return any(row.ino == node.ino for row in self._spool.pending())

    def _rename(self, op: PlainOpRow) -> None:
        try:
            self._store.plain_rename(op.path, op.to)
        except MissingError:
            # It never came to the store under its old name; it will under its new one.
            _log.info("plain-rename-skipped path=%s to=%s", op.path, op.to)

    def _try(self, key: str, what: str, action: object) -> bool:
        """Run *action*; a failure is recorded once and waited for."""
        assert callable(action)
        try:
            action()
        except OSError as exc:
            self._backoff.failed(key)
            if (what, str(exc)) not in self._said:
                self._said.add((what, str(exc)))
                self._events.record("plain-failed", what, str(exc))
            return False
        self._backoff.succeeded(key)
        return True

    # Live files

    def _live_files(self) -> bool:
        now = self._clock.monotonic()
        opened = {handle.ino for handle in self._spool.handles()}
        closed = self._open - opened
        if now - self._live_at >= self._live_interval_s:
            self._live_at = now
            due = opened | closed
        else:
            due = closed
        did = False
        self._is_behind = False
        if now - self._walk_at >= WALK_INTERVAL_S:
            did = self._walk()
            if not self._is_behind:
                self._walk_at = now
        for ino in sorted(due):
            node = self._spool.node(ino)
            if node is not None and self._has_name(node):
                did = self._put_if_changed(node) or did
        # What had to wait for the queue is still due.
        self._open = opened | due if self._is_behind else opened
        return did

    def _must_wait(self) -> bool:
        """Whether something is queued by now, asked once it is known where a file is.

        Its directory may have got that name by a rename that the store has not done yet: a copy
        would be in the way of that.
        """
        self._is_behind = self._is_behind or bool(self._spool.plain_ops())
        return self._is_behind

    def _has_name(self, node: NodeRow) -> bool:
        """Whether the file was not removed or replaced while somebody has it open.

        Its removal may be done in the store already: a copy that came later would stay for good.
        """
        return self._spool.place(node.ino) is not None

    def _walk(self) -> bool:
        """All plain files that have a name; so that nothing is forgotten over a restart."""
        did = False
        directories = [ROOT_INO]
        while directories:
            for _, node in self._spool.children(directories.pop()):
                if node.attempt is not None:
                    continue
                if node.kind is NodeKind.DIR:
                    directories.append(node.ino)
                else:
                    did = self._put_if_changed(node) or did
        return did

    def _put_if_changed(self, node: NodeRow) -> bool:
        file = self._file_of(node)
        if file is None or not self._backoff.is_due(str(node.ino)):
            return False
        try:
            found = os.stat(self._spool.data_path(file.file))
        except FileNotFoundError:
            return False
        seen = (found.st_size, found.st_mtime_ns)
        if self._put.get(node.ino) == seen:
            return False
        if self._is_held(node) or self._must_wait():
            return False
        path = node.plain_path or ""
        what = f"put {path}"
        is_given = (file.size, file.mtime_ns) == seen
        if node.ino not in self._put and (is_given or self._is_stored(node, seen)):
            self._put[node.ino] = seen
            return False
        return self._try(str(node.ino), what, lambda: self._put_file(node, path))

    def _is_stored(self, node: NodeRow, seen: tuple[int, int]) -> bool:
        """Whether the store has it already (asked once after a restart).

        What it was given once is not asked for: another node may have replaced it since.
        """
        assert node.plain_path is not None
        try:
            there = self._store.plain_stat(node.plain_path)
        except OSError:
            return False
        return there.kind is PlainKind.FILE and (there.size, there.mtime_ns) == seen

    def _file_of(self, node: NodeRow) -> FileRow | None:
        """The bytes of a plain file, None for all else."""
        if node.kind is not NodeKind.FILE or node.attempt is not None or not node.plain_path:
            return None
        file = self._spool.file(node.file) if node.file is not None else None
        return file if file is not None and file.local is LocalBytes.FULL else None

    def _put_file(self, node: NodeRow, path: str) -> None:
        file = self._file_of(node)
        if file is None:
            return
        source = self._spool.data_path(file.file)
        try:
            found = os.stat(source)
        except FileNotFoundError:
            return
        self._store.plain_put(path, source, mode=node.mode, mtime_ns=found.st_mtime_ns)
        # What is written during the copy has another time, and comes with the next one.
        self._put[node.ino] = (found.st_size, found.st_mtime_ns)
        # It may have been removed meanwhile, which is queued behind this.
        with contextlib.suppress(MissingError):
            self._spool.update_file(file.file, size=found.st_size, mtime_ns=found.st_mtime_ns)

    # Whole files

    def _whole_files(self) -> bool:
        did = False
        for pending in self._spool.pending():
            if pending.kind is not PendingKind.WHOLE:
                continue
            path = self._path_of(pending)
            if path is None or not self._backoff.is_due(path):
                continue
            if self._must_wait():
                break
            did = self._whole_file(pending, path) or did
        return did

    def _path_of(self, pending: PendingRow) -> str | None:
        if pending.parent == ROOT_INO:
            return pending.name
        parent = self._spool.node(pending.parent)
        if parent is None or parent.plain_path is None:
            return None
        return join_key(parent.plain_path, pending.name)

    def _whole_file(self, pending: PendingRow, path: str) -> bool:
        if pending.ino is None:
            if self._is_needed(pending):
                return False
            remove = lambda: self._store.plain_remove(path, is_dir=False)  # noqa: E731
            return self._try(path, f"remove {path}", remove) and self._show(pending, path, None)
        node = self._spool.node(pending.ino)
        if node is not None and node.kind is NodeKind.SYMLINK:
            return (
                self._is_there(pending, path, node.target)
                and self._try(
                    path, f"link {path}", lambda: self._store.plain_symlink(path, node.target)
                )
                and self._show(pending, path, None)
            )
        file = self._spool.file(node.file) if node and node.file is not None else None
        if node is None or file is None or file.state is not FileState.DIGESTED:
            return False
        problem = _problem(file)
        if problem:
            if (path, file.digest) not in self._said:
                self._said.add((path, file.digest))
                self._events.record("whole-file-invalid", path, problem)
            return False
        source = self._spool.data_path(file.file)

        def put() -> None:
            self._store.plain_put(path, source, mode=node.mode, mtime_ns=file.mtime_ns)

        if not self._try(path, f"put {path}", put):
            return False
        return self._show(pending, path, file)

    def _is_needed(self, pending: PendingRow) -> bool:
        """Whether what was removed is still to be seen: a pointer, or the file that one names.

        A pointer is usually made again; and other nodes may know its old value for a moment.
        """
        now = self._clock.monotonic()
        if any(
            node.kind is NodeKind.SYMLINK and node.target == pending.name
            for _, node in self._spool.children(pending.parent)
        ):
            self._removed_at[pending.id] = now
        return now - self._removed_at.setdefault(pending.id, now) < LINK_KEPT_S

    def _is_there(self, pending: PendingRow, path: str, target: str) -> bool:
        """Whether the file is published that the pending link names."""
        if any(
            row.ino is not None for row in self._spool.pending(parent=pending.parent, name=target)
        ):
            return False
        if self._spool.child(pending.parent, target) is not None:
            return True
        try:
            self._store.plain_stat(f"{path.rpartition('/')[0]}/{target}".lstrip("/"))
        except OSError:
            return False
        return True

    def _show(self, pending: PendingRow, path: str, file: FileRow | None) -> bool:
        """Make the new version the one that everybody sees."""
        with self._spool.transaction():
            if pending not in self._spool.pending(parent=pending.parent, name=pending.name):
                return False
            if file is not None and self._spool.file(file.file) != file:
                # Written again meanwhile: the next version follows.
                return False
            old = self._spool.child(pending.parent, pending.name)
            if old is not None:
                self._spool.unlink(pending.parent, pending.name)
            if pending.ino is not None:
                self._spool.link(pending.parent, pending.name, pending.ino)
                self._spool.update_node(pending.ino, plain_path=path)
            if pending.ino is not None and file is not None:
                self._spool.update_node(pending.ino, size=file.size, mtime_ns=file.mtime_ns)
                self._spool.update_file(file.file, state=FileState.STORED)
                self._put[pending.ino] = (file.size, file.mtime_ns)
            self._spool.drop_pending(pending.id)
        self._removed_at.pop(pending.id, None)
        self._invalidations.name(pending.parent, pending.name)
        if old is not None and old.ino != pending.ino:
            # Only the mount knows when nobody reads it any more.
            self._put.pop(old.ino, None)
            self._invalidations.node(old.ino)
        _log.info("whole-file path=%s", path)
        return True


def _problem(file: FileRow) -> str:
    """Why a whole file may not be published, "" if it may."""
    evidence = file.evidence
    if evidence.has_hole:
        return "a part of it was never written"
    if evidence.problem:
        return evidence.problem
    if evidence.is_torn and not evidence.is_valid:
        return "its writer died with it open"
    return ""
