"""Operations on names: look-ups, directories, links, renames. One function an opcode."""

from __future__ import annotations

import errno
import os
import stat

from ckptgate.vfs.interface import Caller
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.request import EMPTY, SILENT, Context, Reply, Request, mutate

__all__ = [
    "batch_forget",
    "forget",
    "link",
    "lookup",
    "mkdir",
    "mknod",
    "readlink",
    "rename",
    "rename2",
    "rmdir",
    "symlink",
    "unlink",
]


def _entry(context: Context, raw: bytes, *settle: int) -> Reply:
    """A reply that counts as a look-up; taken back if it does not reach the kernel."""
    ino = wire.ENTRY.unpack_from(raw)[0]
    return Reply((raw,), settle=settle, undo=lambda: context.fs.forget([(ino, 1)]))


def lookup(context: Context, request: Request) -> Reply:
    """LOOKUP: a name that can't be made isn't there."""
    try:
        name = wire.decode_names(request.body, 1)[0]
    except OSError as exc:
        number = errno.ENOENT if exc.errno == errno.EILSEQ else exc.errno
        raise OSError(number, str(exc)) from exc
    entry = context.fs.lookup(request.caller, request.node, name)
    return _entry(context, wire.entry_out(entry))


def forget(context: Context, request: Request) -> Reply:
    """FORGET: look-ups that the kernel dropped."""
    context.fs.forget([(request.node, wire.FORGET_IN.unpack_from(request.body)[0])])
    return SILENT


def batch_forget(context: Context, request: Request) -> Reply:
    """BATCH_FORGET."""
    count = wire.BATCH_FORGET_IN.unpack_from(request.body)[0]
    start = wire.BATCH_FORGET_IN.size
    pairs = request.body[start : start + count * wire.FORGET_ONE.size]
    context.fs.forget([(ino, times) for ino, times in wire.FORGET_ONE.iter_unpack(pairs)])
    return SILENT


def readlink(context: Context, request: Request) -> Reply:
    """READLINK."""
    target = context.fs.readlink(request.caller, request.node)
    return Reply((os.fsencode(target),))


def symlink(context: Context, request: Request) -> Reply:
    """SYMLINK."""
    name, target = wire.decode_names(request.body, 2)

    def action(caller: Caller) -> bytes:
        return wire.entry_out(context.fs.symlink(caller, request.node, name, target))

    return _entry(context, mutate(context, request, action))


def mkdir(context: Context, request: Request) -> Reply:
    """MKDIR."""
    mode, _ = wire.MKDIR_IN.unpack_from(request.body)
    name = wire.decode_names(request.body[wire.MKDIR_IN.size :], 1)[0]

    def action(caller: Caller) -> bytes:
        return wire.entry_out(context.fs.mkdir(caller, request.node, name, mode & 0o7777))

    raw = mutate(context, request, action)
    return _entry(context, raw, wire.ENTRY.unpack_from(raw)[0])


def mknod(context: Context, request: Request) -> Reply:
    """A regular file is created and closed; devices, pipes and sockets have no place here."""
    mode, _, _, _ = wire.MKNOD_IN.unpack_from(request.body)
    name = wire.decode_names(request.body[wire.MKNOD_IN.size :], 1)[0]
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        msg = f"only files, directories and symlinks can be made: {name!r}"
        raise OSError(errno.EPERM, msg)
    handles: list[int] = []

    def action(caller: Caller) -> bytes:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        entry, opened = context.fs.create(caller, request.node, name, flags, mode & 0o7777)
        handles.append(opened.fh)
        return wire.entry_out(entry)

    raw = mutate(context, request, action)
    for fh in handles:
        context.fs.release(fh)
    return _entry(context, raw)


def unlink(context: Context, request: Request) -> Reply:
    """UNLINK."""
    name = wire.decode_names(request.body, 1)[0]

    def action(caller: Caller) -> bytes:
        context.fs.unlink(caller, request.node, name)
        return b""

    mutate(context, request, action)
    return EMPTY


def rmdir(context: Context, request: Request) -> Reply:
    """RMDIR."""
    name = wire.decode_names(request.body, 1)[0]

    def action(caller: Caller) -> bytes:
        context.fs.rmdir(caller, request.node, name)
        return b""

    mutate(context, request, action)
    return Reply(settle=(request.node,))


def _rename(context: Context, request: Request, new_parent: int, flags: int, names: bytes) -> Reply:
    old, new = wire.decode_names(names, 2)

    def action(caller: Caller) -> bytes:
        context.fs.rename(caller, request.node, old, new_parent, new, flags)
        return b""

    mutate(context, request, action)
    parents = (request.node,) if request.node == new_parent else (request.node, new_parent)
    return Reply(settle=parents)


def rename(context: Context, request: Request) -> Reply:
    """RENAME."""
    (new_parent,) = wire.RENAME_IN.unpack_from(request.body)
    return _rename(context, request, new_parent, 0, request.body[wire.RENAME_IN.size :])


def rename2(context: Context, request: Request) -> Reply:
    """RENAME2: with the flags of renameat2(2)."""
    new_parent, flags, _ = wire.RENAME2_IN.unpack_from(request.body)
    return _rename(context, request, new_parent, flags, request.body[wire.RENAME2_IN.size :])


def link(_context: Context, _request: Request) -> Reply:
    """Hard links are refused: two names of a file cannot belong to two checkpoints."""
    msg = "hard links are not supported"
    raise OSError(errno.EPERM, msg)
