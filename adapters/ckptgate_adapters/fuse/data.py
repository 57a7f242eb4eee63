"""Bytes of open files, where the kernel does not pass through: READ, WRITE and their kin.

Reads and writes of a complete file go to its descriptor; an incomplete one has the range made whole
first. Counts are complete: a short READ means the end of the file to the kernel.

`read_at_once` and `write_at_once` serve what nearly all of them are about, a known open file that
is whole, without making a request of it: at 4 KiB a call that is half of the work. What is not so,
or does not go well, they leave to `read` and `write`.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Final

from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.channel import fallocate as _fallocate
from ckptgate_adapters.fuse.ops_attr import kill_privileges
from ckptgate_adapters.fuse.request import EMPTY, Buffer, Context, Handle, Reply, Request

__all__ = [
    "copy_file_range",
    "copy_file_range_64",
    "fallocate",
    "lseek",
    "read",
    "read_at_once",
    "write",
    "write_at_once",
]

_log = logging.getLogger(__name__)

COPY_BYTES_MAX: Final = 256 << 20
"""Of one COPY_FILE_RANGE, so that an interrupt is never far; callers go on from there."""


def read_at_once(context: Context, unique: int, head: Buffer) -> list[Buffer] | None:
    """The whole answer to the READ that *head* is; None: `read` is to serve it."""
    fh, offset, size = wire.IO_AFTER_HEADER.unpack_from(head)[:3]
    handle = context.handles.get(fh)
    if handle is None or not handle.is_complete or handle.fd < 0:
        return None
    buffer = context.scratch(size)
    done = os.preadv(handle.fd, [buffer], offset)
    if done != size:
        # The end of the file, or less than there is.
        return None
    return [wire.reply_header(unique, size), buffer]


def write_at_once(
    context: Context, unique: int, head: Buffer, payload: memoryview
) -> list[Buffer] | None:
    """The whole answer to a WRITE; None: `write` is to serve it.

    That then writes again what was written here, if anything: the same bytes to the same place.
    """
    fh, offset, size, flags = wire.IO_AFTER_HEADER.unpack_from(head)
    handle = context.handles.get(fh)
    if handle is None or handle.fd < 0 or flags & wire.WRITE_KILL_SUIDGID or len(payload) != size:
        return None
    done = os.pwrite(handle.fd, payload, offset)
    return (
        [wire.WRITE_REPLY.pack(wire.WRITE_REPLY.size, 0, unique, size, 0)] if done == size else None
    )


def read(context: Context, request: Request) -> Reply:
    """READ."""
    fh, offset, size = wire.READ_IN.unpack_from(request.body)[:3]
    handle = context.handle(request.node, fh)
    if handle.fd < 0:
        return Reply((context.fs.read(request.caller, fh, offset, size),))
    if not handle.is_complete:
        context.fs.ensure(request.caller, fh, offset, size)
    buffer = context.scratch(size)
    done = 0
    while done < size:
        count = os.preadv(handle.fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return Reply((buffer[:done],))


def write(context: Context, request: Request) -> Reply:
    """WRITE: all of it, or as much as fitted."""
    fh, offset, size, flags = wire.WRITE_IN.unpack_from(request.body)[:4]
    handle = _with_fd(context, request.node, fh)
    if flags & wire.WRITE_KILL_SUIDGID:
        kill_privileges(context, request.caller, request.node, fh)
    done, failure = _write_all(handle.fd, request.payload, size, offset)
    if failure is not None:
        _report(context, request, fh, failure)
        if not done:
            raise failure
        # The caller's next write meets the error.
    return Reply((wire.WRITE_OUT.pack(done, 0),))


def _write_all(fd: int, payload: Buffer, size: int, offset: int) -> tuple[int, OSError | None]:
    """How much was written, and what ended it."""
    data = memoryview(payload)[:size]
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], offset + done)
        except OSError as exc:
            return done, exc
    return done, None


def _report(context: Context, request: Request, fh: int, failure: OSError) -> None:
    try:
        context.fs.write_failed(request.caller, fh, failure.errno or errno.EIO)
    except OSError as exc:
        # What the caller must hear is the failure of its write.
        _log.warning("failed-write-not-noted node=%d error=%s", request.node, exc)


def _with_fd(context: Context, ino: int, fh: int) -> Handle:
    handle = context.handle(ino, fh)
    if handle.fd < 0:
        msg = f"handle {fh} of node {ino} has no file of its own"
        raise OSError(errno.EBADF, msg)
    return handle


def lseek(context: Context, request: Request) -> Reply:
    """SEEK_DATA and SEEK_HOLE; the others stay in the kernel."""
    fh, offset, whence, _ = wire.LSEEK_IN.unpack_from(request.body)
    handle = context.handle(request.node, fh)
    if handle.fd >= 0 and handle.is_complete:
        return Reply((wire.LSEEK_OUT.pack(os.lseek(handle.fd, offset, whence)),))
    # What is not here yet looks like a hole in the spool file and is none.
    size = context.fs.getattr(request.caller, request.node, fh).size
    if offset >= size:
        msg = f"offset {offset} is not below the size {size}"
        raise OSError(errno.ENXIO, msg)
    return Reply((wire.LSEEK_OUT.pack(offset if whence == os.SEEK_DATA else size),))


def fallocate(context: Context, request: Request) -> Reply:
    """FALLOCATE."""
    fh, offset, length, mode, _ = wire.FALLOCATE_IN.unpack_from(request.body)
    _fallocate(_with_fd(context, request.node, fh).fd, mode, offset, length)
    return EMPTY


def _copy(context: Context, request: Request) -> int:
    fields = wire.COPY_IN.unpack_from(request.body)
    fh_in, offset_in, node_out, fh_out, offset_out, length, _ = fields
    source = context.handle(request.node, fh_in)
    target = _with_fd(context, node_out, fh_out)
    if source.fd < 0:
        msg = "the source has no file of its own"
        # The kernel then reads and writes.
        raise OSError(errno.EOPNOTSUPP, msg)
    length = min(length, COPY_BYTES_MAX)
    if not source.is_complete:
        context.fs.ensure(request.caller, fh_in, offset_in, length)
    return os.copy_file_range(source.fd, target.fd, length, offset_in, offset_out)


def copy_file_range(context: Context, request: Request) -> Reply:
    """COPY_FILE_RANGE, with a 32-bit count."""
    return Reply((wire.WRITE_OUT.pack(_copy(context, request), 0),))


def copy_file_range_64(context: Context, request: Request) -> Reply:
    """COPY_FILE_RANGE_64."""
    return Reply((wire.COPY64_OUT.pack(_copy(context, request)),))
