"""The kernel's FUSE protocol as bytes: opcodes, flags, structs, and the replies built from values.

Little-endian layouts of `linux/fuse.h` at protocol 7.45; the rule it owns: nobody else writes a
format string. Pure functions, any thread.
"""

from __future__ import annotations

import enum
import errno
import functools
import stat
import struct
from typing import Final, TypeAlias

from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Attr, Entry, FsStats

__all__ = [
    "HEADER_BYTES",
    "Buffer",
    "InitFlag",
    "Notify",
    "Opcode",
    "OpenFlag",
    "SetAttrFlag",
    "attr_out",
    "decode_name",
    "decode_names",
    "dirent",
    "encode_name",
    "entry_out",
    "error_reply",
    "io_size",
    "notification",
    "open_out",
    "reply_header",
    "statfs_out",
    "type_bits",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES: Final = 40
KERNEL_MAJOR: Final = 7
KERNEL_MINOR: Final = 45
OLDEST_MINOR: Final = 31
"""Linux 5.4: anything older lacks what every reply here relies on."""
UNIQUE_RESENT: Final = 1 << 63
NAME_BYTES_MAX: Final = 255

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
IN_HEADER_USED: Final = struct.Struct("<4xIQQIII4x")
"""Opcode, unique, node id, uid, gid, pid."""
OUT_HEADER: Final = struct.Struct("<IiQ")
ATTR: Final = struct.Struct("<QQQqqqIIIIIIIIII")
ENTRY: Final = struct.Struct("<QQQQII")
ATTR_OUT: Final = struct.Struct("<QII" + ATTR.format[1:])
ENTRY_OUT: Final = struct.Struct(ENTRY.format + ATTR.format[1:])
OPEN_OUT: Final = struct.Struct("<QIi")
OPEN_IN: Final = struct.Struct("<II")
CREATE_IN: Final = struct.Struct("<IIII")
MKNOD_IN: Final = struct.Struct("<IIII")
MKDIR_IN: Final = struct.Struct("<II")
RENAME_IN: Final = struct.Struct("<Q")
RENAME2_IN: Final = struct.Struct("<QII")
GETATTR_IN: Final = struct.Struct("<IIQ")
SETATTR_IN: Final = struct.Struct("<IIQQQqqqIIIIIIII")
READ_IN: Final = struct.Struct("<QQIIQII")
WRITE_IN: Final = struct.Struct("<QQIIQII")
IO_AFTER_HEADER: Final = struct.Struct("<40xQQII")
"""Handle, offset, size and flags of a READ or WRITE, from the start of its header."""
WRITE_OUT: Final = struct.Struct("<II")
WRITE_REPLY: Final = struct.Struct("<IiQII")
"""Header and `WRITE_OUT` together."""
RELEASE_IN: Final = struct.Struct("<QIIQ")
FLUSH_IN: Final = struct.Struct("<QIIQ")
FSYNC_IN: Final = struct.Struct("<QII")
FALLOCATE_IN: Final = struct.Struct("<QQQII")
LSEEK_IN: Final = struct.Struct("<QqII")
LSEEK_OUT: Final = struct.Struct("<Q")
COPY_IN: Final = struct.Struct("<QQQQQQQ")
COPY64_OUT: Final = struct.Struct("<Q")
GETXATTR_IN: Final = struct.Struct("<II")
GETXATTR_OUT: Final = struct.Struct("<II")
SETXATTR_IN: Final = struct.Struct("<II")
FORGET_IN: Final = struct.Struct("<Q")
FORGET_ONE: Final = struct.Struct("<QQ")
BATCH_FORGET_IN: Final = struct.Struct("<II")
INTERRUPT_IN: Final = struct.Struct("<Q")
DIRENT: Final = struct.Struct("<QQII")
STATFS_OUT: Final = struct.Struct("<QQQQQIIII24x")
INIT_IN: Final = struct.Struct("<IIII")
INIT_IN_EXT: Final = struct.Struct("<I")
INIT_OUT: Final = struct.Struct("<IIIIHHIIHHIIH22x")
INVAL_INODE: Final = struct.Struct("<Qqq")
INVAL_ENTRY: Final = struct.Struct("<QII")
BACKING_MAP: Final = struct.Struct("<iIQ")
BACKING_ID: Final = struct.Struct("<I")

IOCTL_BACKING_OPEN: Final = 0x4010E501
IOCTL_BACKING_CLOSE: Final = 0x4004E502


class Opcode(enum.IntEnum):
    """What the kernel asks."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


class InitFlag(enum.IntFlag):
    """Capabilities; bits 32 and above travel in `flags2`."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39


class OpenFlag(enum.IntFlag):
    """`open_flags` of an OPEN or CREATE reply."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    PASSTHROUGH = 1 << 7


class SetAttrFlag(enum.IntFlag):
    """`valid` of SETATTR."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    KILL_SUIDGID = 1 << 11


class Notify(enum.IntEnum):
    """Codes of unasked messages to the kernel."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    RESEND = 7


GETATTR_HAS_FH: Final = 1
OPEN_KILL_SUIDGID: Final = 1
WRITE_KILL_SUIDGID: Final = 1 << 2
FSYNC_DATA_ONLY: Final = 1
NS: Final = 1_000_000_000

_TYPE_BITS: Final = {
    NodeKind.FILE: stat.S_IFREG,
    NodeKind.DIR: stat.S_IFDIR,
    NodeKind.SYMLINK: stat.S_IFLNK,
}


def type_bits(kind: NodeKind) -> int:
    """The file type bits of `st_mode`."""
    return _TYPE_BITS[kind]


@functools.lru_cache(maxsize=64)
def _timeout(seconds: float) -> tuple[int, int]:
    ns = max(0, int(seconds * NS))
    return ns // NS, ns % NS


def _attr(attr: Attr) -> tuple[int, ...]:
    """The fields of `ATTR`."""
    atime, mtime, ctime = attr.atime_ns, attr.mtime_ns, attr.ctime_ns
    return (
        attr.ino,
        attr.size,
        attr.blocks,
        atime // NS,
        mtime // NS,
        ctime // NS,
        atime % NS,
        mtime % NS,
        ctime % NS,
        _TYPE_BITS[attr.kind] | (attr.mode & 0o7777),
        attr.nlink,
        attr.uid,
        attr.gid,
        0,
        4096,
        0,
    )


def attr_out(attr: Attr) -> bytes:
    """Reply of GETATTR and SETATTR."""
    return ATTR_OUT.pack(*_timeout(attr.timeout_s), 0, *_attr(attr))


def entry_out(entry: Entry) -> bytes:
    """Reply of LOOKUP and of what makes a name."""
    attr = entry.attr
    name_s, name_ns = _timeout(entry.timeout_s)
    attr_s, attr_ns = _timeout(attr.timeout_s)
    number = entry.number or attr.ino
    return ENTRY_OUT.pack(number, 0, name_s, attr_s, name_ns, attr_ns, *_attr(attr))


NO_ENTRY: Final = bytes(ENTRY.size + ATTR.size)
"""In READDIRPLUS: this name comes without a look-up."""


def open_out(fh: int, flags: int, backing_id: int) -> bytes:
    """Reply of OPEN and OPENDIR, second half of CREATE's."""
    return OPEN_OUT.pack(fh, flags, backing_id)


def dirent(ino: int, cookie: int, name: bytes, kind: NodeKind) -> bytes:
    """One name of READDIR, padded to 8 bytes."""
    head = DIRENT.pack(ino, cookie, len(name), _TYPE_BITS[kind] >> 12)
    return head + name + bytes(-(DIRENT.size + len(name)) % 8)


def statfs_out(stats: FsStats) -> bytes:
    """Reply of STATFS."""
    return STATFS_OUT.pack(
        stats.blocks,
        stats.blocks_free,
        stats.blocks_available,
        stats.files,
        stats.files_free,
        stats.block_size,
        NAME_BYTES_MAX,
        stats.fragment_size,
        0,
    )


def io_size(head: Buffer) -> int:
    """Of how many bytes a READ or WRITE is, from what begins with its header."""
    size: int = IO_AFTER_HEADER.unpack_from(head)[2]
    return size


def reply_header(unique: int, body_bytes: int) -> bytes:
    """What precedes *body_bytes* bytes of a successful reply."""
    return OUT_HEADER.pack(OUT_HEADER.size + body_bytes, 0, unique)


def error_reply(unique: int, number: int) -> bytes:
    """A reply that carries an errno."""
    return OUT_HEADER.pack(OUT_HEADER.size, -number, unique)


def notification(code: Notify, body: bytes = b"") -> bytes:
    """An unasked message to the kernel."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), code, 0) + body


def decode_name(raw: bytes) -> str:
    """A name from the kernel, without its NUL.

    Raises:
        OSError: EILSEQ, it is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        msg = f"name is not UTF-8: {raw!r}"
        raise OSError(errno.EILSEQ, msg) from exc


def decode_names(raw: bytes, count: int) -> list[str]:
    """*count* NUL-terminated names one after the other.

    Raises:
        OSError: EILSEQ, one is not UTF-8; EINVAL, there are fewer.
    """
    if count == 1 and raw.find(b"\0") == len(raw) - 1 >= 0:
        return [decode_name(raw[:-1])]
    parts = raw.split(b"\0", count)
    if len(parts) <= count:
        msg = f"request has {len(parts) - 1} names, {count} are needed"
        raise OSError(errno.EINVAL, msg)
    return [decode_name(part) for part in parts[:count]]


def encode_name(name: str) -> bytes:
    """A name for the kernel.

    Raises:
        OSError: EILSEQ, it has no UTF-8 form.
    """
    try:
        return name.encode()
    except UnicodeEncodeError as exc:
        msg = f"name has no UTF-8 form: {name!r}"
        raise OSError(errno.EILSEQ, msg) from exc
