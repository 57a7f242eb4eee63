"""Operations on attributes, xattrs and the whole file system. One function an opcode."""

from __future__ import annotations

import errno
import os
import stat

from ckptgate.vfs.interface import Attr, Caller, SetAttr
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.request import EMPTY, Buffer, Context, Reply, Request, mutate
from ckptgate_adapters.fuse.wire import SetAttrFlag

__all__ = [
    "getattr_",
    "getxattr",
    "kill_privileges",
    "listxattr",
    "removexattr",
    "setattr_",
    "setxattr",
    "statfs",
]


def getattr_(context: Context, request: Request) -> Reply:
    """GETATTR."""
    flags, _, fh = wire.GETATTR_IN.unpack_from(request.body)
    known = fh if flags & wire.GETATTR_HAS_FH else None
    attr = context.fs.getattr(request.caller, request.node, known)
    return Reply((wire.attr_out(attr),))


def without_privileges(attr: Attr, caller: Caller) -> int:
    """The mode without setuid, and without setgid where it means a privilege.

    Without the group's right to execute, setgid means mandatory locking: that only root and members
    of the group keep. (Of the caller's groups the kernel tells only one.)
    """
    mode = attr.mode & ~stat.S_ISUID
    is_stranger = caller.uid != 0 and caller.gid != attr.gid
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP or is_stranger else mode


def kill_privileges(context: Context, caller: Caller, ino: int, fh: int | None) -> None:
    """Take setuid and setgid from a file that was written (FUSE_HANDLE_KILLPRIV_V2)."""
    attr = context.fs.getattr(caller, ino, fh)
    mode = without_privileges(attr, caller)
    if mode != attr.mode:
        context.fs.setattr(caller, ino, SetAttr(mode=mode), fh)


def _time(valid: int, bit: int, now_bit: int, given_ns: int, now_ns: int) -> int | None:
    if valid & now_bit:
        return now_ns
    return given_ns if valid & bit else None


def setattr_(context: Context, request: Request) -> Reply:
    """SETATTR: only what its valid bits name; times "now" come from the clock."""
    fields = wire.SETATTR_IN.unpack_from(request.body)
    valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = fields
    fh = handle if valid & SetAttrFlag.FH else None
    now = context.now_ns()
    changes = SetAttr(
        mode=mode & 0o7777 if valid & SetAttrFlag.MODE else None,
        uid=uid if valid & SetAttrFlag.UID else None,
        gid=gid if valid & SetAttrFlag.GID else None,
        size=size if valid & SetAttrFlag.SIZE else None,
        atime_ns=_time(
            valid, SetAttrFlag.ATIME, SetAttrFlag.ATIME_NOW, atime * wire.NS + atime_ns, now
        ),
        mtime_ns=_time(
            valid, SetAttrFlag.MTIME, SetAttrFlag.MTIME_NOW, mtime * wire.NS + mtime_ns, now
        ),
    )
    kills = valid & (SetAttrFlag.UID | SetAttrFlag.GID | SetAttrFlag.KILL_SUIDGID)

    def action(caller: Caller) -> bytes:
        attr = context.fs.setattr(caller, request.node, changes, fh)
        mode = without_privileges(attr, caller)
        is_file = wire.type_bits(attr.kind) == stat.S_IFREG
        if kills and is_file and mode != attr.mode:
            attr = context.fs.setattr(caller, request.node, SetAttr(mode=mode), fh)
        return wire.attr_out(attr)

    return Reply((mutate(context, request, action),))


def statfs(context: Context, request: Request) -> Reply:
    """STATFS."""
    return Reply((wire.statfs_out(context.fs.statfs(request.caller)),))


def _sized(value: Buffer, size: int) -> Reply:
    """The two-step protocol of xattrs: size 0 asks for the length."""
    if size == 0:
        return Reply((wire.GETXATTR_OUT.pack(len(value), 0),))
    if size < len(value):
        msg = f"value has {len(value)} bytes, the caller takes {size}"
        raise OSError(errno.ERANGE, msg)
    return Reply((value,))


def getxattr(context: Context, request: Request) -> Reply:
    """GETXATTR."""
    size, _ = wire.GETXATTR_IN.unpack_from(request.body)
    name = wire.decode_names(request.body[wire.GETXATTR_IN.size :], 1)[0]
    return _sized(context.fs.getxattr(request.caller, request.node, name), size)


def listxattr(context: Context, request: Request) -> Reply:
    """LISTXATTR."""
    size, _ = wire.GETXATTR_IN.unpack_from(request.body)
    names = context.fs.listxattr(request.caller, request.node)
    return _sized(b"".join(os.fsencode(name) + b"\0" for name in names), size)


def setxattr(context: Context, request: Request) -> Reply:
    """SETXATTR."""
    size, flags = wire.SETXATTR_IN.unpack_from(request.body)
    raw_name, _, rest = request.body[wire.SETXATTR_IN.size :].partition(b"\0")
    name, value = wire.decode_name(raw_name), rest[:size]

    def action(caller: Caller) -> bytes:
        context.fs.setxattr(caller, request.node, name, value, flags)
        return b""

    mutate(context, request, action)
    return EMPTY


def removexattr(context: Context, request: Request) -> Reply:
    """REMOVEXATTR."""
    name = wire.decode_names(request.body, 1)[0]

    def action(caller: Caller) -> bytes:
        context.fs.removexattr(caller, request.node, name)
        return b""

    mutate(context, request, action)
    return EMPTY
