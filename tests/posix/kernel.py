"""System calls that Python has no function for, through ctypes. Linux, little-endian."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_SYMLINK_FOLLOW = 0x400
AT_SYMLINK_NOFOLLOW = 0x100

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4

KEEP_SIZE = 1
PUNCH_HOLE = 2
COLLAPSE_RANGE = 8
ZERO_RANGE = 16
INSERT_RANGE = 32

RESOLVE_NO_SYMLINKS = 4
RESOLVE_BENEATH = 8

UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2

STATX_BTIME = 0x800
STATX_BASIC = 0x7FF
STATX_MNT_ID = 0x1000
STATX_DIOALIGN = 0x2000

F_OFD_GETLK, F_OFD_SETLK = 36, 37
FICLONE = 0x40049409
FS_IOC_GETFLAGS = 0x80086601
FIONREAD = 0x541B

_FLOCK = struct.Struct("hhxxxxqqixxxx")


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(name: str, *args: Any) -> int:
    """A function of libc that returns an int, -1 with errno set."""
    function = getattr(_libc, name)
    function.restype = ctypes.c_int
    return _checked(function(*args))


def syscall(number: int, *args: Any) -> int:
    """A system call by number."""
    _libc.syscall.restype = ctypes.c_long
    return _checked(_libc.syscall(ctypes.c_long(number), *args))


def rename2(old: str, new: str, flags: int) -> None:
    """renameat2(2) from the working directory."""
    call("renameat2", AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2)."""
    call("fallocate", fd, mode, ctypes.c_long(offset), ctypes.c_long(length))


def openat2(path: str, flags: int, *, mode: int = 0, resolve: int = 0, dir_fd: int = -100) -> int:
    """openat2(2)."""
    how = ctypes.create_string_buffer(struct.pack("<QQQ", flags, mode, resolve), 24)
    return syscall(437, dir_fd, os.fsencode(path), how, ctypes.c_size_t(24))


def linkat(old: str, new: str, flags: int = 0, *, old_fd: int = AT_FDCWD) -> None:
    """linkat(2)."""
    call("linkat", old_fd, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def utimensat(path: str, atime: tuple[int, int], mtime: tuple[int, int], flags: int = 0) -> None:
    """utimensat(2) with (seconds, ns) pairs, whose ns may be UTIME_NOW or UTIME_OMIT."""
    times = ctypes.create_string_buffer(struct.pack("<qqqq", *atime, *mtime), 32)
    call("utimensat", AT_FDCWD, os.fsencode(path), times, flags)


def futimens(fd: int, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """futimens(3)."""
    times = ctypes.create_string_buffer(struct.pack("<qqqq", *atime, *mtime), 32)
    call("futimens", fd, times)


def statx(path: str, mask: int, flags: int = AT_SYMLINK_NOFOLLOW) -> dict[str, int]:
    """statx(2): the fields that the tests look at."""
    raw = ctypes.create_string_buffer(256)
    call("statx", AT_FDCWD, os.fsencode(path), flags, mask, raw)
    found, blksize, _, nlink, uid, gid, mode = struct.unpack_from("<IIQIIIH", raw)
    ino, size, blocks = struct.unpack_from("<QQQ", raw, 32)
    btime_s, btime_ns = struct.unpack_from("<qI", raw, 80)
    return {
        "mask": found,
        "blksize": blksize,
        "nlink": nlink,
        "uid": uid,
        "gid": gid,
        "mode": mode,
        "ino": ino,
        "size": size,
        "blocks": blocks,
        "btime_ns": btime_s * 10**9 + btime_ns,
    }


def flock_bytes(kind: int, start: int, length: int) -> bytes:
    """A `struct flock` from the start of the file."""
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def flock_kind(raw: bytes) -> int:
    """The lock kind that F_GETLK wrote into one."""
    kind: int = _FLOCK.unpack(raw[: _FLOCK.size])[0]
    return kind


def telldir_positions() -> list[tuple[int, str]]:
    """(position after it, name) of all entries of the working directory, as telldir(3) says."""
    stream = _opendir()
    try:
        return list(_entries(stream))
    finally:
        _libc.closedir(ctypes.c_void_p(stream))


def names_after(position: int) -> list[str]:
    """Names that readdir(3) gives after seekdir(3) on a stream that has been read to its end."""
    stream = _opendir()
    try:
        list(_entries(stream))
        _libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
        _libc.seekdir(stream, position)
        return [name for _, name in _entries(stream)]
    finally:
        _libc.closedir(ctypes.c_void_p(stream))


def _opendir() -> int:
    _libc.opendir.restype = ctypes.c_void_p
    stream = _libc.opendir(b".")
    assert stream
    return int(stream)


def _entries(stream: int):
    _libc.readdir.restype = ctypes.c_void_p
    _libc.telldir.restype = ctypes.c_long
    while raw := _libc.readdir(ctypes.c_void_p(stream)):
        # struct dirent: d_ino, d_off, d_reclen, d_type, d_name.
        name = ctypes.string_at(raw + 19).decode()
        yield int(_libc.telldir(ctypes.c_void_p(stream))), name


def dirents(fd: int) -> list[tuple[int, int, str]]:
    """(inode, d_type, name) of all entries of an open directory, by getdents64(2)."""
    number = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
    buffer = ctypes.create_string_buffer(32768)
    found = []
    while size := syscall(number, fd, buffer, ctypes.c_size_t(32768)):
        at = 0
        while at < size:
            ino, _, length, kind = struct.unpack_from("<QqHB", buffer, at)
            name = buffer.raw[at + 19 : at + length].split(b"\0", 1)[0]
            found.append((ino, kind, name.decode()))
            at += length
    return found


class Inotify:
    """Events of one watched path."""

    def __init__(self, path: str, mask: int) -> None:
        self.fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
        call("inotify_add_watch", self.fd, os.fsencode(path), mask)

    def names(self) -> list[str]:
        """What happened since the last call, as `EVENT name`."""
        try:
            raw = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        found, at = [], 0
        while at < len(raw):
            _, mask, _, length = struct.unpack_from("<iIII", raw, at)
            name = raw[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            for bit, word in _EVENTS.items():
                if mask & bit:
                    found.append(f"{word} {name}".strip())
            at += 16 + length
        return found

    def close(self) -> None:
        """End."""
        os.close(self.fd)


_EVENTS = {
    0x2: "MODIFY",
    0x4: "ATTRIB",
    0x8: "CLOSE_WRITE",
    0x40: "MOVED_FROM",
    0x80: "MOVED_TO",
    0x100: "CREATE",
    0x200: "DELETE",
    0x400: "DELETE_SELF",
}
IN_ALL = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400
