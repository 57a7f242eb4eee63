"""Whether somebody still writes an attempt, and which attempts nobody may see.

Owns the rule: an open attempt whose writers are all gone is hidden from everybody if a close of it
was torn, if a rank said that it begins and not that it is done, or if it is of a known format and
not whole. Other unknown content that was closed in order stays visible to its incarnation. Any
thread.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping

import msgspec

from ckptgate.errors import CkptError
from ckptgate.formats import registry
from ckptgate.formats.base import Format
from ckptgate.model.closure import is_covered
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.recording import is_left_undone
from ckptgate.ports.spool import (
    WRITERS_META,
    AttemptRow,
    FileRow,
    LocalBytes,
    NodeRow,
    PendingKind,
)
from ckptgate.vfs.context import Context, Who

__all__ = [
    "has_live_writer",
    "is_hidden",
    "is_left_whole",
    "mark_torn",
    "record_writer",
    "sweep_dead_handles",
]

_log = logging.getLogger(__name__)

_TOUCH_INTERVAL_S = 0.2
"""How old `write_ns` of an attempt that is being written may be."""


def _meta_key(attempt: int) -> str:
    return WRITERS_META.format(attempt=attempt)


def _writers(ctx: Context, attempt: int) -> set[tuple[int, int]]:
    """(pid, start) of all processes that wrote the attempt; kept in the spool too."""
    while True:
        with ctx.lock:
            known = ctx.memory.writers.get(attempt)
            forgotten = ctx.memory.forgotten
        if known is not None:
            return known
        # Who changes the spool holds its lock and then takes this one: never the other way round.
        stored: list[list[int]] = json.loads(ctx.spool.get_meta(_meta_key(attempt)) or "[]")
        with ctx.lock:
            if ctx.memory.forgotten == forgotten:
                read = {(pid, start) for pid, start in stored}
                return ctx.memory.writers.setdefault(attempt, read)


def record_writer(ctx: Context, row: AttemptRow, who: Who) -> AttemptRow:
    """Note a change of the attempt by this process; inside a change.

    Of many changes in a row by a process that is known only some are noted.

    Returns:
        The row as it is now.
    """
    known = _writers(ctx, row.id)
    is_new = who.pid != 0 and (who.pid, who.start) not in known
    now = ctx.clock.monotonic()
    with ctx.lock:
        ctx.memory.wholeness.pop(row.id, None)
        last = ctx.memory.touched.get(row.id)
        if not is_new and last is not None and 0 <= now - last < _TOUCH_INTERVAL_S:
            return row
        ctx.memory.touched[row.id] = now
    if is_new:
        with ctx.lock:
            known.add((who.pid, who.start))
            ctx.spool.set_meta(_meta_key(row.id), json.dumps(sorted(known)))
        if who.rank is not None:
            ctx.spool.add_writer_rank(row.id, who.rank)
    changes: dict[str, object] = {"write_ns": ctx.clock.now_ns()}
    if row.world_size is None and who.world_size is not None:
        changes["world_size"] = who.world_size
    return ctx.spool.update_attempt(row.id, **changes)


def has_live_writer(ctx: Context, row: AttemptRow) -> bool:
    """Whether a process that wrote the attempt still runs.

    Where no writer could be identified, this says yes: only time can tell then.
    """
    known = _writers(ctx, row.id)
    with ctx.lock:
        candidates = list(known)
    return not candidates or any(ctx.identify.is_alive(pid, start) for pid, start in candidates)


def is_hidden(ctx: Context, row: AttemptRow, who: Who) -> bool:
    """Whether nobody may see this attempt, not even its incarnation; *who* asks."""
    if row.state is not AttemptState.OPEN or (who.pid, who.start) in _writers(ctx, row.id):
        return False
    if has_live_writer(ctx, row):
        return False
    if is_left_undone(ctx.spool, row):
        return True
    ctx.apply_closes()
    files = ctx.spool.files_of_attempt(row.id)
    if any(_is_torn(ctx, file) for _, _, file in files):
        return True
    if row.base is not None:
        return False
    known = registry.recognise([path for path, _, _ in files], row.name)
    if known is None or _has_live_caller(ctx, row):
        return False
    return not _is_whole(ctx, row, known, files)


def is_left_whole(ctx: Context, row: AttemptRow) -> bool | None:
    """Whether an open attempt that nobody writes any more holds all that its format expects.

    Files of other members count as far as they were taken over; what the format reads of them is
    fetched. May block; nothing may be noted of closes, as this is no place for a change.

    Returns:
        None where a file is torn or no format tells: what other members have changes nothing.
    """
    files = ctx.spool.files_of_attempt(row.id)
    known = registry.recognise([path for path, _, _ in files], row.name)
    if known is None or any(_is_torn(ctx, file) for _, _, file in files):
        return None
    tree = _SpoolTree(ctx, files, is_fetching=True)
    return _is_covered(known, tree, row, of_part=None, wrote=_who_wrote(files))


def _who_wrote(files: list[tuple[str, NodeRow, FileRow]]) -> frozenset[int] | None:
    """The ranks that wrote the files; None where that isn't known of each."""
    ranks = frozenset(file.evidence.rank for _, _, file in files)
    return None if min(ranks, default=-1) < 0 else ranks


def _is_torn(ctx: Context, file: FileRow) -> bool:
    if file.evidence.is_torn:
        return True
    # Still open, and all who might close it are dead: the mount did not run when they died.
    return file.state is FileState.OPEN and not any(
        not handle.is_closed and (not handle.pid or ctx.identify.is_alive(handle.pid, handle.start))
        for handle in ctx.spool.handles(file=file.file)
    )


def _has_live_caller(ctx: Context, row: AttemptRow) -> bool:
    """Whether a process of the (shared) job runs that used this mount.

    Shards may be written by short-lived children: between their exit and the commit event only the
    trainer itself is left, which need not have written anything.
    """
    with ctx.lock:
        callers = list(ctx.memory.callers.get(row.job_key, ()))
    dead = {item for item in callers if not ctx.identify.is_alive(*item)}
    if dead:
        with ctx.lock:
            ctx.memory.callers.get(row.job_key, set()).difference_update(dead)
    return len(dead) < len(callers)


class _SpoolView:
    """A spool file for the formats."""

    def __init__(
        self, path: str, size: int, fetch: Callable[[int, int], None] | None = None
    ) -> None:
        self._path = path
        self._fetch = fetch
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        if self._fetch is not None:
            self._fetch(offset, min(length, self.size - offset))
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)


class _SpoolTree:
    """An attempt's files for the formats; of other members' only the names, without fetching."""

    def __init__(
        self,
        ctx: Context,
        files: list[tuple[str, NodeRow, FileRow]],
        *,
        is_fetching: bool = False,
    ) -> None:
        self._ctx = ctx
        self._is_fetching = is_fetching
        self._files = {path: (node, file) for path, node, file in files}

    def files(self) -> Mapping[str, int]:
        return {path: self._size(*pair) for path, pair in self._files.items()}

    def open(self, path: str) -> _SpoolView:
        node, file = self._files[path]
        data = self._ctx.spool.data_path(file.file)
        if file.local is LocalBytes.FULL or not self._is_fetching:
            return _SpoolView(data, os.stat(data).st_size)
        fetch = functools.partial(self._ctx.catalog.fetch, file.file)
        return _SpoolView(data, node.size, fetch)

    def _size(self, node: NodeRow, file: FileRow) -> int:
        if file.local is not LocalBytes.FULL:
            return node.size
        try:
            return os.stat(self._ctx.spool.data_path(file.file)).st_size
        except FileNotFoundError:
            return 0


def _is_whole(
    ctx: Context, row: AttemptRow, known: Format, files: list[tuple[str, NodeRow, FileRow]]
) -> bool:
    """Whether all files that the format expects are there; remembered until the next write."""
    remembered = ctx.memory.wholeness.get(row.id)
    if remembered is not None and remembered[0] == row.write_ns:
        return remembered[1]
    # Where a format speaks of a part only, nobody knows.
    result = bool(_is_covered(known, _SpoolTree(ctx, files), row, of_part=True))
    with ctx.lock:
        ctx.memory.wholeness[row.id] = (row.write_ns, result)
    return result


def _is_covered(
    known: Format,
    tree: _SpoolTree,
    row: AttemptRow,
    *,
    of_part: bool | None,
    wrote: frozenset[int] | None = None,
) -> bool | None:
    """Whether all that is expected is there.

    Args:
        known: the format.
        tree: the files.
        row: the attempt.
        of_part: the answer if the format speaks of a part only.
        wrote: the ranks that wrote something, None where that isn't known.
    """
    try:
        sizes = tree.files()
        expected = registry.expected(known, tree)
    except (CkptError, OSError) as exc:
        _log.info("attempt-not-whole name=%s problem=%s", row.name, exc)
        return False
    if expected.is_partial:
        return of_part
    world_size = row.world_size if expected.world_size is None else expected.world_size
    if expected.every_rank and wrote is not None and not wrote.issuperset(range(world_size or 0)):
        # The names of one rank's files may be complete in themselves.
        return False
    return is_covered(expected, sizes, row.world_size)


def mark_torn(ctx: Context, file: FileRow) -> FileRow:
    """Note that the file's writer died with it open; inside a change."""
    return ctx.spool.update_file(
        file.file, evidence=msgspec.structs.replace(file.evidence, is_torn=True)
    )


def sweep_dead_handles(ctx: Context) -> None:
    """After a start: files whose writers died unseen are torn, and quiet.

    Descriptors that other live processes hold on such a file don't count: their handles are theirs.
    """
    with ctx.change():
        for row in ctx.spool.attempts(states=UNDECIDED):
            for _, _, file in ctx.spool.files_of_attempt(row.id):
                _sweep(ctx, file)
        for pending in ctx.spool.pending():
            if pending.kind is PendingKind.WHOLE and pending.ino is not None:
                node = ctx.spool.node(pending.ino)
                held = None if node is None or node.file is None else ctx.spool.file(node.file)
                if held is not None:
                    _sweep(ctx, held)


def _sweep(ctx: Context, file: FileRow) -> None:
    if file.state is not FileState.OPEN:
        return
    is_held = False
    for handle in ctx.spool.handles(file=file.file):
        if handle.is_closed:
            continue
        if not handle.pid or ctx.identify.is_alive(handle.pid, handle.start):
            is_held = True
        else:
            ctx.spool.update_handle(handle.fh, is_closed=True)
    if not is_held:
        mark_torn(ctx, file)
        ctx.spool.update_file(file.file, state=FileState.QUIET)
