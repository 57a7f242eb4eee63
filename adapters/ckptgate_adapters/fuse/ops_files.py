"""Operations on open files and directories, except for their bytes. One function an opcode.

The kept reply of an open holds the handle and not how the kernel does its I/O: that is decided
when the reply is sent, because it depends on what is open at that moment.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from typing import Final

from ckptgate.vfs.interface import Caller, Opened
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.ops_attr import kill_privileges
from ckptgate_adapters.fuse.request import EMPTY, Context, Reply, Request, mutate

__all__ = [
    "create",
    "flush",
    "fsync",
    "fsyncdir",
    "open_",
    "opendir",
    "readdir",
    "readdirplus",
    "release",
    "releasedir",
    "syncfs",
    "tmpfile",
]

_log = logging.getLogger(__name__)

_KEPT_HANDLE: Final = struct.Struct("<Q")
_ENTRY_BYTES: Final = wire.ENTRY.size + wire.ATTR.size


def _attach(context: Context, request: Request, ino: int, opened: Opened, flags: int) -> bytes:
    """Register an open file with driver and kernel; returns its `open_out`."""
    context.keep(ino, opened, is_reader=flags & os.O_ACCMODE == os.O_RDONLY)
    request_id = context.session.request_id(request.unique)
    open_flags, backing_id = context.backing.attach(ino, opened, flags, request_id)
    return wire.open_out(opened.fh, open_flags, backing_id)


def _release(context: Context, ino: int, fh: int) -> None:
    context.handles.pop(fh, None)
    context.backing.detach(ino, fh)
    context.fs.release(fh)


def _reopened(context: Context, fh: int) -> Opened:
    """The open file that a previous process left behind."""
    opened = context.fs.reopen(fh)
    if opened is None:
        msg = f"handle {fh} of a kept reply is not open"
        raise OSError(errno.ESTALE, msg)
    return opened


def _let_go(context: Context, made: list[Opened]) -> None:
    """What was opened for a request that fails has no owner."""
    for opened in made:
        context.handles.pop(opened.fh, None)
        context.fs.release(opened.fh)


def open_(context: Context, request: Request) -> Reply:
    """OPEN: an open that may change something is done exactly once."""
    flags, extra = wire.OPEN_IN.unpack_from(request.body)
    ino = request.node
    made: list[Opened] = []

    def action(caller: Caller) -> bytes:
        made.append(context.fs.open(caller, ino, flags))
        if extra & wire.OPEN_KILL_SUIDGID:
            kill_privileges(context, caller, ino, made[0].fh)
        return _KEPT_HANDLE.pack(made[0].fh)

    try:
        if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC:
            action(request.caller)
        else:
            kept = mutate(context, request, action)
            if not made:
                made.append(_reopened(context, _KEPT_HANDLE.unpack(kept)[0]))
        out = _attach(context, request, ino, made[0], flags)
    except BaseException:
        # Whatever ended it, an exit of the thread too: nobody will release them later.
        _let_go(context, made)
        raise
    fh = made[0].fh
    return Reply((out,), undo=lambda: _release(context, ino, fh))


def create(context: Context, request: Request) -> Reply:
    """CREATE: make and open."""
    flags, mode, _, _ = wire.CREATE_IN.unpack_from(request.body)
    name = wire.decode_names(request.body[wire.CREATE_IN.size :], 1)[0]
    made: list[Opened] = []

    def action(caller: Caller) -> bytes:
        entry, opened = context.fs.create(caller, request.node, name, flags, mode & 0o7777)
        made.append(opened)
        return wire.entry_out(entry) + _KEPT_HANDLE.pack(opened.fh)

    try:
        kept = mutate(context, request, action)
        if not made:
            made.append(_reopened(context, _KEPT_HANDLE.unpack_from(kept, _ENTRY_BYTES)[0]))
        ino = wire.ENTRY.unpack_from(kept)[0]
        out = _attach(context, request, ino, made[0], flags)
    except BaseException:
        # Whatever ended it, an exit of the thread too: nobody will release them later.
        _let_go(context, made)
        raise
    fh = made[0].fh

    def undo() -> None:
        _release(context, ino, fh)
        context.fs.forget([(ino, 1)])

    return Reply((kept[:_ENTRY_BYTES], out), settle=(ino,), undo=undo)


def release(context: Context, request: Request) -> Reply:
    """RELEASE: the last descriptor is gone."""
    fh = wire.RELEASE_IN.unpack_from(request.body)[0]
    _release(context, request.node, fh)
    return EMPTY


def flush(context: Context, request: Request) -> Reply:
    """A process closed its descriptor. Repeating it is harmless, so nothing is kept."""
    is_promise = context.fs.flush(request.caller, wire.FLUSH_IN.unpack_from(request.body)[0])
    return Reply(settle=(request.node,) if is_promise else ())


def fsync(context: Context, request: Request) -> Reply:
    """FSYNC."""
    fh, flags, _ = wire.FSYNC_IN.unpack_from(request.body)
    context.fs.fsync(request.caller, fh, data_only=bool(flags & wire.FSYNC_DATA_ONLY))
    return EMPTY


def fsyncdir(context: Context, request: Request) -> Reply:
    """FSYNCDIR."""
    context.fs.fsyncdir(request.caller, request.node)
    return EMPTY


def syncfs(_context: Context, _request: Request) -> Reply:
    """sync(2): nothing is held back here; what is durable when, is said by fsync."""
    return EMPTY


def tmpfile(_context: Context, _request: Request) -> Reply:
    """O_TMPFILE: a file without a name could never become part of a checkpoint."""
    msg = "files without a name are not supported"
    raise OSError(errno.EOPNOTSUPP, msg)


def opendir(context: Context, request: Request) -> Reply:
    """OPENDIR."""
    fh = context.fs.opendir(request.caller, request.node)
    context.directories[fh] = fh

    def undo() -> None:
        context.directories.pop(fh, None)
        context.fs.releasedir(fh)

    return Reply((wire.open_out(fh, 0, 0),), undo=undo)


def _directory(context: Context, request: Request, fh: int) -> int:
    """The `fs` handle of an open directory; one of a previous process is opened anew."""
    known = context.directories.get(fh)
    if known is None:
        known = context.fs.opendir(request.caller, request.node)
        context.directories[fh] = known
    return known


def readdir(context: Context, request: Request) -> Reply:
    """READDIR: as many names as fit."""
    fh, cookie, size = wire.READ_IN.unpack_from(request.body)[:3]
    known = _directory(context, request, fh)
    listing = context.fs.readdir(request.caller, known, cookie, with_entries=False)
    out = bytearray()
    for item in listing:
        record = wire.dirent(item.ino, item.cookie, wire.encode_name(item.name), item.kind)
        if len(out) + len(record) > size:
            break
        out += record
    return Reply((out,))


def readdirplus(context: Context, request: Request) -> Reply:
    """READDIRPLUS: names with their look-ups; those that are sent count."""
    fh, cookie, size = wire.READ_IN.unpack_from(request.body)[:3]
    listing = context.fs.readdir(request.caller, _directory(context, request, fh), cookie)
    out = bytearray()
    counted: list[int] = []
    for item in listing:
        record = wire.dirent(item.ino, item.cookie, wire.encode_name(item.name), item.kind)
        if len(out) + len(wire.NO_ENTRY) + len(record) > size:
            break
        if item.entry is None or item.name in {".", ".."}:
            out += wire.NO_ENTRY
        else:
            out += wire.entry_out(item.entry)
            counted.append(item.entry.number or item.entry.attr.ino)
        out += record
    context.fs.looked_up(counted)
    return Reply((out,), undo=lambda: context.fs.forget([(ino, 1) for ino in counted]))


def releasedir(context: Context, request: Request) -> Reply:
    """RELEASEDIR."""
    fh = wire.RELEASE_IN.unpack_from(request.body)[0]
    known = context.directories.pop(fh, None)
    if known is not None:
        context.fs.releasedir(known)
    return EMPTY
