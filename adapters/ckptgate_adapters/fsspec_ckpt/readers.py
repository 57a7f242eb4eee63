"""The file objects of `ckpt://` that are read: what they give is verified.

A file of which all bytes are in the spool is read by its own descriptor; of others the daemon
fetches and verifies what is touched. A forked child's copy has a handle of its own from its first
look at such a file on. A file is one thread's at a time, as any.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from typing import Any, Final

from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.connection import Answered, Client
from ckptgate_adapters.fsspec_ckpt.untyped import AbstractBufferedFile

__all__ = ["CkptReader", "StoredFile", "open_reader"]

_BUFFER_BYTES: Final = 128 << 10
_CHUNK_BYTES: Final = 64 << 20
"""What the daemon verifies at a time."""


class _Reading:
    """A handle of a file that is read, and whose it is."""

    def __init__(self, client: Client, path: str, told: messages.Told) -> None:
        assert told.facts is not None
        self.client = client
        self.path = path
        self.told = told
        self.size = told.facts.size
        self.is_lost = False
        self._pid = os.getpid()
        client.hold(told.fh, self)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy: the handle is its parent's."""
        return self._pid != os.getpid()

    def open_here(self) -> tuple[_Reading, int]:
        """A forked child's own handle of the file, and descriptor."""
        answered = self.client.call(
            messages.Open(id=self.client.next_id(), path=self.path, flags=0)
        )
        return _Reading(self.client, self.path, answered.told), answered.fd

    def release(self) -> None:
        """The file is closed."""
        if self.is_foreign:
            return
        self.client.let_go(self.told.fh)
        # Nothing depends on it: at the latest the end of the process releases it.
        with contextlib.suppress(OSError):
            request = messages.Close(id=self.client.next_id(), fh=self.told.fh)
            self.client.call(request, may_start=False)


class _RawReader(io.FileIO):
    """A descriptor of the spool file, and its handle."""

    def __init__(self, fd: int, reading: _Reading) -> None:
        super().__init__(fd, "rb")
        self._reading = reading

    def close(self) -> None:
        """Close both."""
        if self.closed:
            return
        super().close()
        self._reading.release()


class _RawPartial(io.RawIOBase):
    """The same of a file of which parts are still to be fetched and verified."""

    def __init__(self, fd: int, reading: _Reading) -> None:
        super().__init__()
        self._fd = fd
        self._reading = reading
        self._at = 0
        self._there: set[int] = set()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._reading.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "negative position")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes that are verified."""
        view = memoryview(buffer).cast("B")
        count = self.read_at(view, self._at)
        self._at += count
        return count

    def read_at(self, view: memoryview, offset: int) -> int:
        """Read at a position."""
        length = min(len(view), self._reading.size - offset)
        if length <= 0:
            return 0
        self._ensure(offset, length)
        return os.preadv(self._fd, [view[:length]], offset)

    def _ensure(self, offset: int, length: int) -> None:
        """Have the chunks of this range here; the daemon fetches whole ones."""
        chunks = range(offset // _CHUNK_BYTES, (offset + length - 1) // _CHUNK_BYTES + 1)
        if all(chunk in self._there for chunk in chunks):
            return
        if self._reading.is_foreign:
            self._reading, fd = self._reading.open_here()
            os.close(self._fd)
            self._fd = fd
        client, fh = self._reading.client, self._reading.told.fh
        told = client.call(messages.Ensure(fh=fh, offset=offset, length=length)).told
        if told.spool_ino != os.fstat(self._fd).st_ino:
            # What was there was not what it should be, and was fetched anew.
            answered = client.call(messages.Reopen(fh=fh))
            self._there.clear()
            os.close(self._fd)
            self._fd = answered.fd
        self._there.update(chunks)

    def close(self) -> None:
        """Close it."""
        if self.closed:
            return
        super().close()
        os.close(self._fd)
        self._reading.release()


class CkptReader(io.BufferedReader):
    """A file opened `rb`."""

    def __init__(self, raw: _RawReader | _RawPartial, path: str, size: int) -> None:
        super().__init__(raw, _BUFFER_BYTES)
        self.path = self.full_name = path
        self.size = size
        self.is_complete = isinstance(raw, _RawReader)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class StoredFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec is untyped
    """A file outside of checkpoints that only the store has: fsspec's own caches read it."""

    def __init__(self, fs: Any, reading: _Reading, **options: Any) -> None:
        self._reading = reading
        AbstractBufferedFile.__init__(
            self, fs, reading.path, mode="rb", size=reading.size, **options
        )

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._reading.is_foreign:
            self._reading, _ = self._reading.open_here()
        client, fh = self._reading.client, self._reading.told.fh
        parts: list[bytes] = []
        while start < end:
            length = min(end - start, messages.READ_BYTES_MAX)
            part = _bytes_of(client.call(messages.Read(fh=fh, offset=start, length=length)))
            if not part:
                break
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close it."""
        if self.closed:
            return
        AbstractBufferedFile.close(self)
        self._reading.release()


def _bytes_of(answered: Answered) -> bytes:
    if answered.fd < 0:
        return answered.told.data
    with open(answered.fd, "rb", buffering=0) as stream:
        stream.seek(0)
        return stream.readall()


def open_reader(
    fs: Any, client: Client, path: str, answered: Answered, **options: Any
) -> CkptReader | StoredFile:
    """The file object of an answered open for reading; *options* are for a file in the store."""
    reading = _Reading(client, path, answered.told)
    if answered.fd < 0:
        return StoredFile(fs, reading, **options)
    is_complete = answered.told.is_complete
    raw = (_RawReader if is_complete else _RawPartial)(answered.fd, reading)
    return CkptReader(raw, path, reading.size)
