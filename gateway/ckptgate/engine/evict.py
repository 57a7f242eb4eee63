"""Room in the spool: what is published is in the store, so its local copy is the first to go.

It owns the rule which local copies may be given up: of files that the store has, verified, that
nobody has open, and that only committed and published checkpoints name. What is undecided and what
was given up (it is evidence) stays, however short the room. Replaced ones go first, as nobody finds
them any more; of the others the one that was not used for longest.

Thread rule: `step` belongs to the publisher's one thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from ckptgate.engine.fetch import drop_copy
from ckptgate.engine.node import Node
from ckptgate.errors import CkptError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.reserve import reserved_bytes
from ckptgate.ports.spool import ROOM_META, AttemptRow, FileRow, LocalBytes, SpoolRoom

__all__ = ["Evictor", "Room", "room_of"]

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
_PAUSE_FACTOR: Final = 20
"""A look at very many files takes its time: it is done less often then."""
_LOG_AGE_MAX_S: Final = 10.0
_BLOCK_BYTES: Final = 512
_COUNT_SHARE: Final = 0.002
"""By how much of its limit the spool must grow until that is written down."""
_DECIDED: Final = (AttemptState.REPLACED, AttemptState.COMMITTED)
"""Whose copies may go, in this order."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a file system: all, and those that are free for us."""

    total: int
    free: int


def room_of(path: str) -> Room:
    """The room of the file system that *path* is on.

    Raises:
        OSError: it can't be asked.
    """
    found = os.statvfs(path)
    return Room(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize)


class Evictor:
    """Gives up local copies of published files when the spool's disk or its limit gets short."""

    def __init__(self, node: Node, *, room: Callable[[str], Room] = room_of) -> None:
        self._spool = node.spool
        self._logs = node.logs
        self._clock = node.clock
        self._events = node.events
        self._settings = node.settings
        self._room = room
        self._due_at: float | None = None
        if not self._settings.spool_max_bytes:
            # Of an earlier mount that had a limit.
            self._spool.drop_meta(ROOM_META)

    def step(self) -> bool:
        """Make room if it is short, at most once a second; True if any was made."""
        began_s = self._clock.monotonic()
        if self._due_at is not None and began_s < self._due_at:
            return False
        self._due_at = began_s + _INTERVAL_S
        reserved = reserved_bytes(self._spool)
        disk, own = self._room(self._spool.path), self._own_room()
        wanted = max(self._wanted(disk, reserved), self._wanted(own, reserved))
        count = freed = 0
        for file in self._candidates() if wanted > 0 else ():
            if freed >= wanted:
                break
            won = self._drop(file)
            count += won > 0
            freed += won
        least = min(disk.free, own.free) if own.total else disk.free
        self._keep_count(own, freed, reserved=reserved, least=least + freed)
        took_s = self._clock.monotonic() - began_s
        self._due_at = began_s + max(_INTERVAL_S, _PAUSE_FACTOR * took_s)
        if count:
            detail = (
                f"{count} published files, {freed} bytes: {disk.free} of {disk.total} bytes of "
                f"the spool's disk were free{_of_limit(own)}; they are read from the store again"
            )
            self._events.record("evicted", self._spool.path, detail)
        return count > 0

    def _wanted(self, room: Room, reserved: int) -> float:
        """Bytes that are to be won, 0 if there is room enough.

        What checkpoints under way will need counts as taken: so it is made before they need it.
        """
        share = self._settings.spool_free_min_share
        # Of 0 is left only what a limit needs: that what is above it goes.
        free = room.free - reserved if share else room.free
        if not room.total or free >= room.total * share:
            return 0
        return room.total * self._settings.spool_free_target_share - free

    def _own_room(self) -> Room:
        """What is left of the spool's limit, as if it were a disk of that size."""
        limit = self._settings.spool_max_bytes
        return Room(total=limit, free=limit - self._spool.allocated()) if limit else Room(0, 0)

    def _keep_count(self, own: Room, freed: int, *, reserved: int, least: int) -> None:
        """Tell the mount what is used, and whether new files can be taken; say so once.

        Args:
            own: the limit as it was before.
            freed: bytes that were won now.
            reserved: bytes that checkpoints under way will still need.
            least: what is free now, of disk or limit.
        """
        before = SpoolRoom.parse(self._spool.get_meta(ROOM_META))
        used = own.total - own.free - freed
        now = SpoolRoom(
            used=used,
            limit=own.total,
            evicted=before.evicted + freed,
            is_full=bool(own.total) and used >= own.total,
            is_low=least < reserved,
            reserved=reserved,
        )
        is_moved = bool(own.total) and abs(now.used - before.used) > own.total * _COUNT_SHARE
        is_other = (now.is_full, now.limit, now.is_low) != (
            before.is_full,
            before.limit,
            before.is_low,
        )
        if not is_other and not is_moved and not (freed and own.total):
            return
        self._spool.set_meta(ROOM_META, msgspec.json.encode(now).decode())
        self._tell(before, now, least)

    def _tell(self, before: SpoolRoom, now: SpoolRoom, least: int) -> None:
        """Record what changed."""
        path, of_limit = self._spool.path, f"{now.used} of {now.limit} bytes (room.spool_max)"
        if now.is_full and not before.is_full:
            detail = (
                f"{of_limit} are taken by what is not published yet: new files are refused until "
                "it is"
            )
            self._events.record("spool-full", path, detail)
        elif before.is_full and not now.is_full:
            self._events.record("spool-room", path, f"{of_limit}: new files are taken again")
        if now.is_low and not before.is_low:
            detail = (
                f"{least} bytes are free, and what is being written will need {now.reserved} more "
                "if it gets as large as the checkpoint before; no published copy is left to give up"
            )
            self._events.record("spool-low", path, detail)
        elif before.is_low and not now.is_low and not now.is_full:
            self._events.record("spool-room", path, f"{least} bytes are free: that will do")

    def _candidates(self) -> Iterator[int]:
        """Files whose local copy may go, the first to go first."""
        unreadable: set[str] = set()
        for state in _DECIDED:
            used: list[tuple[int, int]] = []
            for row in self._spool.attempts(states=(state,)):
                used += [
                    (self._spool.last_use_ns(file), file)
                    for file in self._copies_of(row, unreadable)
                ]
            yield from (file for _, file in sorted(used))

    def _copies_of(self, row: AttemptRow, unreadable: set[str]) -> list[int]:
        """Files of an attempt that may go; runs whose log can't be read get into *unreadable*."""
        if row.run in unreadable:
            return []
        try:
            is_published = self._is_published(row)
        except CkptError as exc:
            # One run's log, or the store: the others' copies can still go.
            unreadable.add(row.run)
            _log.warning("not-evicted run=%s error=%s", row.run, exc)
            return []
        if not is_published:
            return []
        stored = self._spool.files_of_attempt(row.id, states=(FileState.STORED,))
        return [file.file for _, _, file in stored if _is_copy(file)]

    def _is_published(self, row: AttemptRow) -> bool:
        if not self._is_known_published(row):
            self._logs.get(row.run).refresh_if_older(_LOG_AGE_MAX_S)
        return self._is_known_published(row)

    def _is_known_published(self, row: AttemptRow) -> bool:
        """By what was read of the log so far."""
        view = self._logs.get(row.run).look(lambda state: state.attempts.get(row.attempt))
        return row.state in _DECIDED and view is not None and view.is_published

    def _drop(self, file: int) -> int:
        """Give up a local copy; the bytes that this frees, 0 if it has to stay."""
        with self._spool.transaction():
            row = self._spool.file(file)
            if row is None or not _is_copy(row) or self._spool.handles(file=row.file):
                return 0
            for node in self._spool.nodes_of_file(row.file):
                owner = None if node.attempt is None else self._spool.attempt(node.attempt)
                # A revision under way has its base's files too.
                if owner is None or not self._is_known_published(owner):
                    return 0
            try:
                stat = os.stat(self._spool.data_path(row.file), follow_symlinks=False)
            except FileNotFoundError:
                return 0
            if stat.st_nlink > 1 or not stat.st_blocks:
                # Nothing is won: the store shares these bytes, or there are none.
                return 0
            drop_copy(self._spool, row)
            return stat.st_blocks * _BLOCK_BYTES


def _of_limit(own: Room) -> str:
    return f", {own.total - own.free} of {own.total} (room.spool_max) used" if own.total else ""


def _is_copy(file: FileRow) -> bool:
    """Whether the store has what lies here."""
    is_here = file.local is not LocalBytes.NONE
    return is_here and file.state is FileState.STORED and bool(file.key)
