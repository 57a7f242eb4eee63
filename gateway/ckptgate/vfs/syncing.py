"""What survives a power loss, and bytes that are not what their writer believes.

Owns two rules. After fsync of a file its bytes, the spool's name for them and every transaction so
far are durable: so are its own name and all that was done before. And a file of which an fsync or a
write failed, with nothing written after it, is not what its writer wanted: it is no part of a
commit until it is written again. Any thread; called where waiting for the disk is allowed.
"""

from __future__ import annotations

import errno
import logging
import os

import msgspec

from ckptgate.errors import MissingError
from ckptgate.model.states import FSYNC_FAILED, WRITE_FAILED, FileState
from ckptgate.ports.spool import NO_FILE
from ckptgate.vfs.context import Context
from ckptgate.vfs.openfiles import OpenFile

__all__ = ["sync", "write_failed"]

_log = logging.getLogger(__name__)

_SYNCED_MAX = 100_000
_UNPROVEN = frozenset({FileState.OPEN, FileState.QUIET})


def sync(ctx: Context, fh: int, *, data_only: bool) -> None:
    """Return when the open file and its name survive a power loss.

    Raises:
        OSError: they may not. The kernel forgets which bytes it could not write, so a repeat that
            succeeds proves nothing; the file has to be written again.
    """
    handle = _handle(ctx, fh)
    if handle.fd >= 0:
        try:
            (os.fdatasync if data_only else os.fsync)(handle.fd)
        except OSError as exc:
            _distrust(ctx, handle, f"{FSYNC_FAILED}: {exc.strerror or exc}")
            raise
        _sync_spool_name(ctx, handle)
    ctx.apply_closes()
    ctx.spool.make_durable()


def write_failed(ctx: Context, fh: int, number: int) -> None:
    """A write of this handle was refused: its writer was told, but may not have listened."""
    _distrust(ctx, _handle(ctx, fh), f"{WRITE_FAILED}: {os.strerror(number)}")


def _handle(ctx: Context, fh: int) -> OpenFile:
    handle = ctx.memory.files.get(fh)
    if handle is None:
        msg = f"handle {fh} is not known"
        raise MissingError(msg, errno_value=errno.EBADF)
    return handle


def _sync_spool_name(ctx: Context, handle: OpenFile) -> None:
    """The directory entry of the spool file; once is enough, it never changes."""
    file = handle.row.file
    if file == NO_FILE or file in ctx.memory.synced:
        return
    fd = os.open(
        os.path.dirname(ctx.spool.data_path(file)),
        os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,
    )
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    with ctx.lock:
        if len(ctx.memory.synced) >= _SYNCED_MAX:
            ctx.memory.synced.clear()
        ctx.memory.synced.add(file)


def _distrust(ctx: Context, handle: OpenFile, problem: str) -> None:
    if handle.row.file == NO_FILE or handle.fd < 0:
        return
    with ctx.change():
        # The times that tell a later write from this state are those at its failure.
        found = os.fstat(handle.fd)
        row = ctx.spool.file(handle.row.file)
        if row is None or row.state not in _UNPROVEN:
            return
        evidence = msgspec.structs.replace(
            row.evidence, problem=f"{problem}: the file must be written again", is_valid=False
        )
        ctx.spool.update_file(
            row.file,
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            evidence=evidence,
        )
    _log.warning("bytes-not-trusted ino=%d problem=%s", handle.row.ino, problem)
