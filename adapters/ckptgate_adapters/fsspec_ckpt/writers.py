"""The file objects of `ckpt://` that are written.

Owns the rules: bytes go to and from the spool file by its own descriptor. What is written counts
once `close` returned; an exception in the `with` block, a write that failed, and a file that is
merely forgotten are no close: nothing of it is ever published. A forked child's copy of a file
means nothing to the parent's. A file is one thread's at a time, as any.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import inspect
import io
import logging
import os
from abc import abstractmethod
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, Final

from ckptgate.errors import UnusableError
from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.connection import Client
from ckptgate_adapters.fsspec_ckpt.untyped import OpenFile

__all__ = ["CkptUpdater", "CkptWriter", "Discardable", "Written", "is_cut_short"]

_log = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 128 << 10
_EXIT: Final[CodeType] = OpenFile.__exit__.__code__
_FRAMES: Final = 8


class Written:
    """A file that is open for writing, as the daemon has it."""

    def __init__(
        self,
        client: Client,
        path: str,
        told: messages.Told,
        *,
        is_synced: bool,
        after: Callable[[str], None],
    ) -> None:
        """Register it.

        Args:
            client: whose it is.
            path: its name.
            told: what the daemon said of it.
            is_synced: its close is to return when it survives a power loss.
            after: called when it is closed.
        """
        self.client = client
        self.path = path
        self.is_lost = False
        self._pid = os.getpid()
        self._told = told
        self._is_synced = is_synced
        self._after = after
        self._is_done = False
        client.hold(told.fh, self)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy."""
        return self._pid != os.getpid()

    def commit(self) -> None:
        """It is written: what `close` means.

        Raises:
            OSError: it does not count; the message says why.
        """
        if self._is_done:
            return
        self._is_done = True
        fh = self._told.fh
        try:
            if self.is_lost:
                raise self._gone()
            request = messages.Close(
                id=self.client.next_id(),
                fh=fh,
                path=self.path,
                part=self._told.part,
                is_synced=self._is_synced,
            )
            self.client.call(request)
            if self.is_lost:
                raise self._gone()
        finally:
            self.client.let_go(fh)
        self._after(self.path)

    def discard(self) -> None:
        """It is not wanted: what was there before stays."""
        if self._is_done:
            return
        self._is_done = True
        is_removed = self._told.is_new
        try:
            if not self.is_lost:
                request = messages.GiveUp(fh=self._told.fh, is_removed=is_removed)
                # A daemon that is started anew gives it up by itself.
                with contextlib.suppress(UnusableError):
                    self.client.call(request, may_start=False)
        finally:
            self.client.let_go(self._told.fh)

    def _gone(self) -> OSError:
        msg = "the daemon was started anew while this file was being written: write it again"
        return OSError(errno.EIO, msg, self.path)


def is_cut_short() -> bool:
    """Whether `with fsspec.open(...)` is left by an exception, of which its file isn't told."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return False
        if frame.f_code is _EXIT:
            arguments = frame.f_locals.get("args") or (None,)
            return arguments[0] is not None
    return False


class Discardable(io.IOBase):
    """A file of which nothing is wanted if an exception ends its `with` block."""

    @abstractmethod
    def discard(self) -> None:
        """Close without a meaning; done already is fine."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class _RawWriter(io.FileIO):
    """The descriptor; nothing is written any more once the file is given up."""

    is_off = False

    def write(self, data: Any) -> int:
        """Write, or don't."""
        if self.is_off:
            return memoryview(data).nbytes
        return super().write(data)


class _Writing(Discardable, io.BufferedIOBase):
    """What a file for writing adds to one of Python's buffered files, which comes after it."""

    written: Written
    autocommit: bool
    _descriptor: _RawWriter
    _failure: OSError | None = None

    def _prepare(self, descriptor: _RawWriter, written: Written, *, autocommit: bool) -> None:
        self.written = written
        self.autocommit = autocommit
        self._descriptor = descriptor

    @property
    def path(self) -> str:
        """Its name in the store."""
        return self.written.path

    full_name = path

    def write(self, data: Any) -> int:
        """Write bytes."""
        try:
            return super().write(data)
        except OSError as exc:
            self._failure = exc
            raise

    def flush(self) -> None:
        """Give the bytes to the spool file."""
        try:
            super().flush()
        except OSError as exc:
            self._failure = exc
            raise

    def fileno(self) -> int:
        """The descriptor of the spool file, which has all that was written until now."""
        if not self.closed:
            self.flush()
        return super().fileno()

    def commit(self) -> None:
        """In a transaction: what was written counts from now on."""
        self.autocommit = True
        if self.closed:
            self.written.commit()
        else:
            self.close()

    def discard(self) -> None:
        """Close without a meaning: nothing of what was written is wanted."""
        self._descriptor.is_off = True
        self._close_bytes()
        if not self.written.is_foreign:
            self.written.discard()

    def close(self) -> None:
        """The file is written."""
        if self.closed:
            return
        if self.written.is_foreign:
            self._descriptor.is_off = True
            self._close_bytes()
            return
        if self._descriptor.is_off or self._failure is not None or is_cut_short():
            failure = self._failure
            self.discard()
            if failure is not None:
                number = failure.errno or errno.EIO
                msg = f"a write failed ({failure.strerror}): the file is not kept"
                raise OSError(number, msg, self.path) from failure
            return
        try:
            self.flush()
        except BaseException:
            # An interrupted flush, too: part of the bytes is missing.
            with contextlib.suppress(OSError):
                self.discard()
            raise
        self._close_bytes()
        if self.autocommit:
            self.written.commit()

    def _close_bytes(self) -> None:
        """Close the descriptor; what is still in the buffer goes where it is wanted, or nowhere."""
        if not self.closed:
            super().close()

    def __del__(self) -> None:
        # Forgetting a file isn't closing it. (At the end of the interpreter anything may be gone.)
        if getattr(self, "written", None) is None or self.closed:
            return
        with contextlib.suppress(Exception):
            _log.warning("file-not-closed path=%s: nothing of it is kept", self.path)
        with contextlib.suppress(Exception):
            self.discard()


class CkptWriter(_Writing, io.BufferedWriter):
    """A file opened `wb`, `xb` or `ab`."""

    def __init__(self, fd: int, written: Written, *, is_appended: bool, autocommit: bool) -> None:
        if is_appended:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        descriptor = _RawWriter(fd, "ab" if is_appended else "wb")
        self._prepare(descriptor, written, autocommit=autocommit)
        io.BufferedWriter.__init__(self, descriptor, _BUFFER_BYTES)


class CkptUpdater(  # pyright: ignore[reportIncompatibleVariableOverride]  # a C class
    _Writing, io.BufferedRandom
):
    """A file opened `r+b`: its bytes are changed in place, or in a new version of it."""

    def __init__(self, fd: int, written: Written, *, autocommit: bool) -> None:
        descriptor = _RawWriter(fd, "r+b")
        self._prepare(descriptor, written, autocommit=autocommit)
        io.BufferedRandom.__init__(self, descriptor, _BUFFER_BYTES)
