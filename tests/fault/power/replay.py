"""What a disk may hold after a power loss, from the recorded system calls of the process before it.

A state of the disk consists of everything that was synced by that moment, and of any part of the
rest: each page of a write, each change of a directory. Two kinds of disk: a *journaling* one, where
any fsync makes all earlier changes of directories durable (ext4, XFS), and a *strict* one, where
only an fsync of the directory does (all that POSIX promises).

Paths below `far` are on another machine: what was done there by that moment is there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fault.power.trace import Call, calls, decoded

PAGE = 4096


@dataclass
class Inode:
    """A file: its writes (number of the call, offset, bytes; None: cut to that length)."""

    writes: list[tuple[int, int, bytes | None]] = field(default_factory=list)

    def bytes_now(self) -> bytes:
        return build(self.writes)


def build(writes: list[tuple[int, int, bytes | None]]) -> bytes:
    """The bytes that these writes leave."""
    data = bytearray()
    for _, offset, piece in writes:
        end = offset if piece is None else offset + len(piece)
        if len(data) < end:
            data.extend(bytes(end - len(data)))
        if piece is None:
            del data[offset:]
        else:
            data[offset:end] = piece
    return bytes(data)


@dataclass(frozen=True)
class Entry:
    """A change of directories: `new` names an inode now, `old` doesn't any more."""

    at: int
    old: str
    new: str
    inode: int
    target: str = ""


@dataclass(frozen=True)
class Sync:
    """An fsync: what came before the call number `since` is durable once call `at` has ended."""

    at: int
    since: int
    path: str
    inode: int


class Recording:
    """Everything that was done below *base*."""

    def __init__(self, trace: Path, base: str, *, far: str, noted: str) -> None:
        self.base, self.far, self.noted = base, far, noted
        self.inodes: list[Inode] = []
        self.entries: list[Entry] = []
        self.directories: list[tuple[int, str]] = []
        self.syncs: list[Sync] = []
        self.notes: list[tuple[int, str]] = []
        self.length = 0
        self._names: dict[str, int] = {}
        self._fds: dict[int, tuple[str, int]] = {}
        self._offsets: dict[int, int] = {}
        for number, call in enumerate(calls(trace), 1):
            self.length = number
            handler: Callable[[int, Call], None] | None = getattr(self, f"_do_{call.name}", None)
            if call.result >= 0 and handler is not None:
                handler(number, call)

    # Where

    def _is_ours(self, path: str) -> bool:
        return path.startswith((self.base + "/", self.far + "/")) or path in {self.base, self.far}

    def _path(self, directory: str, name: str) -> str:
        path = os.fsdecode(decoded(name))
        if not path.startswith("/"):
            if directory == "AT_FDCWD":
                return ""
            above = self._fds.get(int(directory), ("", -1))[0]
            path = f"{above}/{path}" if above else ""
        path = os.path.normpath(path) if path else ""
        return path if self._is_ours(path) else ""

    def _file(self, fd: str) -> tuple[str, int]:
        return self._fds.get(int(fd), ("", -1))

    # Opening

    def _do_openat(self, number: int, call: Call) -> None:
        path = self._path(call.arguments[0], call.arguments[1])
        flags = call.arguments[2].split("|")
        self._fds.pop(call.result, None)
        if path == "" and os.fsdecode(decoded(call.arguments[1])) == self.noted:
            path = self.noted
        if not path:
            return
        inode = self._names.get(path, -1)
        if inode < 0 and "O_CREAT" in flags and path != self.noted:
            inode = self._add(number, path)
        elif "O_TRUNC" in flags and inode >= 0:
            self.inodes[inode].writes.append((number, 0, None))
        self._fds[call.result] = path, inode
        self._offsets[call.result] = (
            len(self.inodes[inode].bytes_now()) if "O_APPEND" in flags and inode >= 0 else 0
        )

    def _add(self, number: int, path: str) -> int:
        self.inodes.append(Inode())
        inode = len(self.inodes) - 1
        self._names[path] = inode
        self.entries.append(Entry(number, "", path, inode))
        return inode

    def _do_close(self, number: int, call: Call) -> None:
        self._fds.pop(int(call.arguments[0]), None)

    def _do_dup2(self, number: int, call: Call) -> None:
        self._fds.pop(call.result, None)
        if int(call.arguments[0]) in self._fds:
            self._fds[call.result] = self._fds[int(call.arguments[0])]

    _do_dup = _do_dup3 = _do_dup2

    # Bytes

    def _write(self, number: int, fd: int, offset: int, data: bytes) -> None:
        path, inode = self._fds.get(fd, ("", -1))
        if path == self.noted:
            self.notes += [(number, line) for line in data.decode().splitlines()]
        elif inode >= 0:
            self.inodes[inode].writes.append((number, offset, data))

    def _do_write(self, number: int, call: Call) -> None:
        fd = int(call.arguments[0])
        if fd in self._fds:
            offset = self._offsets.get(fd, 0)
            self._write(number, fd, offset, decoded(call.arguments[1])[: call.result])
            self._offsets[fd] = offset + call.result

    def _do_pwrite64(self, number: int, call: Call) -> None:
        fd = int(call.arguments[0])
        if fd in self._fds:
            data = decoded(call.arguments[1])[: call.result]
            self._write(number, fd, int(call.arguments[3]), data)

    def _do_ftruncate(self, number: int, call: Call) -> None:
        inode = self._file(call.arguments[0])[1]
        if inode >= 0:
            self.inodes[inode].writes.append((number, int(call.arguments[1]), None))

    def _do_truncate(self, number: int, call: Call) -> None:
        inode = self._names.get(self._path("AT_FDCWD", call.arguments[0]), -1)
        if inode >= 0:
            self.inodes[inode].writes.append((number, int(call.arguments[1]), None))

    def _do_copy_file_range(self, number: int, call: Call) -> None:
        self._copy(number, call.arguments[0], call.arguments[2], call.result)

    def _do_sendfile(self, number: int, call: Call) -> None:
        self._copy(number, call.arguments[1], call.arguments[0], call.result)

    def _copy(self, number: int, source: str, target: str, count: int) -> None:
        """Python gives no offsets to either: both positions move."""
        inode = self._file(source)[1]
        start = self._offsets.get(int(source), 0)
        offset = self._offsets.get(int(target), 0)
        if inode >= 0 and count:
            data = self.inodes[inode].bytes_now()[start : start + count]
            self._write(number, int(target), offset, data)
            self._offsets[int(source)] = start + count
            self._offsets[int(target)] = offset + count

    def _do_fsync(self, number: int, call: Call) -> None:
        path, inode = self._file(call.arguments[0])
        if path and path != self.noted:
            self.syncs.append(Sync(number, call.began, path, inode))

    _do_fdatasync = _do_fsync

    # Names

    def _remove(self, number: int, path: str) -> None:
        if path in self._names:
            self.entries.append(Entry(number, path, "", self._names.pop(path)))

    def _do_unlink(self, number: int, call: Call) -> None:
        self._remove(number, self._path("AT_FDCWD", call.arguments[0]))

    def _do_unlinkat(self, number: int, call: Call) -> None:
        self._remove(number, self._path(call.arguments[0], call.arguments[1]))

    def _move(self, number: int, old: str, new: str) -> None:
        if not old or not new:
            return
        for path in [p for p in self._names if p == old or p.startswith(old + "/")]:
            inode = self._names.pop(path)
            moved = new + path[len(old) :]
            self._names[moved] = inode
            self.entries.append(Entry(number, path, moved, inode))
        for _, path in list(self.directories):
            if path == old or path.startswith(old + "/"):
                self.directories.append((number, new + path[len(old) :]))
        self._fds = {
            fd: (new + path[len(old) :] if path == old or path.startswith(old + "/") else path, i)
            for fd, (path, i) in self._fds.items()
        }

    def _do_rename(self, number: int, call: Call) -> None:
        one, two = (self._path("AT_FDCWD", text) for text in call.arguments[:2])
        self._move(number, one, two)

    def _do_renameat(self, number: int, call: Call) -> None:
        at_one, one, at_two, two = call.arguments[:4]
        self._move(number, self._path(at_one, one), self._path(at_two, two))

    _do_renameat2 = _do_renameat

    def _do_linkat(self, number: int, call: Call) -> None:
        at_one, one, at_two, two = call.arguments[:4]
        self._link(number, self._path(at_one, one), self._path(at_two, two))

    def _do_link(self, number: int, call: Call) -> None:
        one, two = (self._path("AT_FDCWD", text) for text in call.arguments[:2])
        self._link(number, one, two)

    def _link(self, number: int, old: str, new: str) -> None:
        if old in self._names and new:
            self._names[new] = self._names[old]
            self.entries.append(Entry(number, "", new, self._names[old]))

    def _do_symlinkat(self, number: int, call: Call) -> None:
        path = self._path(call.arguments[1], call.arguments[2])
        if path:
            inode = self._add(number, path)
            self.entries[-1] = Entry(
                number, "", path, inode, target=os.fsdecode(decoded(call.arguments[0]))
            )

    def _do_mkdir(self, number: int, call: Call) -> None:
        self._made(number, self._path("AT_FDCWD", call.arguments[0]))

    def _do_mkdirat(self, number: int, call: Call) -> None:
        self._made(number, self._path(call.arguments[0], call.arguments[1]))

    def _made(self, number: int, path: str) -> None:
        if path:
            self.directories.append((number, path))


@dataclass(frozen=True)
class Loss:
    """A power loss: after call *at*; *keeps* decides which of the unsynced changes survive."""

    at: int
    is_strict: bool
    keeps: str
    seed: int = 0

    def chooser(self) -> Callable[[], bool]:
        if self.keeps != "some":
            return lambda: self.keeps == "all"
        chance = random.Random(f"{self.at} {self.seed}")
        share = chance.choice((0.1, 0.5, 0.9))
        return lambda: chance.random() < share


def restore(recording: Recording, loss: Loss, target: Path) -> None:
    """Make the disk and the far machine as they are after *loss*, below *target*."""
    keep = loss.chooser()
    syncs = [sync for sync in recording.syncs if sync.at <= loss.at]
    names: dict[str, Entry] = {}
    for at, path in recording.directories:
        # The directories of a spool are made and synced before anything else.
        if at <= loss.at:
            _place(recording, path, target).mkdir(parents=True, exist_ok=True)
    for entry in recording.entries:
        is_far = (entry.new or entry.old).startswith(recording.far + "/")
        if entry.at > loss.at or not (is_far or _is_durable(entry, syncs, loss) or keep()):
            continue
        names.pop(entry.old, None)
        if entry.new:
            names[entry.new] = entry
    for path, entry in sorted(names.items()):
        place = _place(recording, path, target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if entry.target:
            place.symlink_to(entry.target)
            continue
        if path.endswith("-shm"):
            continue
        is_far = path.startswith(recording.far + "/")
        place.write_bytes(_surviving(recording, entry.inode, loss, syncs, keep, is_far=is_far))


def _place(recording: Recording, path: str, target: Path) -> Path:
    for name, root in (("far", recording.far), ("disk", recording.base)):
        if path == root or path.startswith(root + "/"):
            return target / name / path[len(root) + 1 :]
    raise AssertionError(path)


def _is_durable(entry: Entry, syncs: list[Sync], loss: Loss) -> bool:
    if not loss.is_strict:
        return any(entry.at <= sync.since for sync in syncs)
    folders = {os.path.dirname(path) for path in (entry.old, entry.new) if path}
    done = {sync.path for sync in syncs if entry.at <= sync.since}
    return folders <= done


def _surviving(
    recording: Recording,
    inode: int,
    loss: Loss,
    syncs: list[Sync],
    keep: Callable[[], bool],
    *,
    is_far: bool,
) -> bytes:
    upto = max((sync.since for sync in syncs if sync.inode == inode), default=0)
    kept: list[tuple[int, int, bytes | None]] = []
    for at, offset, data in recording.inodes[inode].writes:
        if at > loss.at:
            break
        if is_far or at <= upto:
            kept.append((at, offset, data))
        elif data is None:
            if keep():
                kept.append((at, offset, data))
        else:
            # Each page goes to the disk by itself.
            end = offset + len(data)
            start = offset
            while start < end:
                stop = min(end, (start // PAGE + 1) * PAGE)
                if keep():
                    kept.append((at, start, data[start - offset : stop - offset]))
                start = stop
    return build(kept)


def losses(recording: Recording, count: int, seed: int) -> list[Loss]:
    """*count* moments, around each sync first, and what may survive then; the same for a seed."""
    chance = random.Random(seed)
    moments = {at for sync in recording.syncs for at in (sync.at - 1, sync.at, sync.since)}
    moments |= {at for at, _ in recording.notes}
    moments |= set(chance.choices(range(1, recording.length), k=len(moments)))
    every = [
        Loss(at, is_strict, keeps, seed)
        for at in sorted(moments)
        for is_strict in (False, True)
        for keeps in ("none", "all", "some")
    ]
    return every if count >= len(every) else chance.sample(every, count)


__all__ = ["Loss", "Recording", "losses", "restore"]
