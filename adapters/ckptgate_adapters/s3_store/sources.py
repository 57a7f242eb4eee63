"""The files that are uploaded: opened once, read in order, and digested as they are read.

So what is sent is what the file's digest says, whatever happens to the file meanwhile: other bytes
are noticed before anything is completed. Loop only; reading is done beside it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import aiofiles
import blake3
from aiofiles.threadpool.binary import AsyncFileIO

from ckptgate.errors import CkptError, IntegrityError, MissingError, TransientStoreError
from ckptgate.ports.store import DigestedFile
from ckptgate_adapters.s3_store.checksums import crc64
from ckptgate_adapters.s3_store.parts import Part

__all__ = ["Source", "opened", "pieces"]

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PIECE_BYTES: Final = 1024 * 1024


class Source:
    """A file that is read from its beginning to its end.

    Args:
        file: opened.
        said: what it is said to be.
    """

    def __init__(self, file: AsyncFileIO, said: DigestedFile) -> None:
        self.said = said
        self._file = file
        self._digest = blake3.blake3()

    async def read(self) -> bytes:
        """All of a small file."""
        with _reading(self.said.path):
            data = await self._file.read(self.said.size + 1)
        if len(data) != self.said.size:
            raise _size_error(self.said, len(data))
        self._digest.update(data)
        return data

    async def read_into(self, view: memoryview) -> int:
        """Fill *view* with what follows; returns its checksum."""
        done = 0
        while done < len(view):
            done += await self._read_some(view[done:])
        return await asyncio.get_running_loop().run_in_executor(None, self._take, view)

    async def skim(self, size: int, view: memoryview) -> int:
        """Read the next *size* bytes through *view*, for their checksum only."""
        crc = 0
        while size:
            done = await self._read_some(view[: min(size, len(view))])
            self._digest.update(view[:done])
            crc = crc64(view[:done], crc)
            size -= done
        return crc

    def check(self) -> None:
        """After the last byte: refuse a file that isn't what its digest says.

        Raises:
            IntegrityError: the bytes that were read have another digest.
        """
        found = self._digest.hexdigest()
        if found != self.said.digest:
            msg = f"{self.said.path!r} has digest {found}, it is said to have {self.said.digest}"
            raise IntegrityError(msg, subject=self.said.path)

    async def _read_some(self, view: memoryview) -> int:
        with _reading(self.said.path):
            done = await self._file.readinto(view)
            if not done:
                raise _size_error(self.said, await self._file.tell())
        return done

    def _take(self, view: memoryview) -> int:
        self._digest.update(view)
        return crc64(view)


@asynccontextmanager
async def opened(said: DigestedFile, *, may_grow: bool = False) -> AsyncGenerator[Source]:
    """The file, if it has the size that it is said to have, or more where it *may_grow*.

    Raises:
        MissingError, TransientStoreError: it isn't there, or can't be read.
        IntegrityError: it has another size.
    """
    with _reading(said.path):
        file = await aiofiles.open(said.path, "rb", buffering=0, opener=_open)
    try:
        size = os.fstat(file.fileno()).st_size
        if size < said.size or (size > said.size and not may_grow):
            raise _size_error(said, size)
        yield Source(file, said)
    finally:
        await file.close()


async def pieces(said: DigestedFile, part: Part) -> AsyncIterator[bytes]:
    """The bytes of a part that is too large for a buffer, as they are sent."""
    left = part.size
    async with aiofiles.open(said.path, "rb", buffering=0, opener=_open) as file:
        await file.seek(part.offset)
        while left and (piece := await file.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece


@contextmanager
def _reading(path: str) -> Generator[None]:
    """Let no error of the local file system but the contract's leave the block."""
    try:
        yield
    except CkptError:
        raise
    except FileNotFoundError as exc:
        raise MissingError(f"cannot read {path!r}: it is not there", subject=path) from exc
    except OSError as exc:
        msg = f"cannot read {path!r}: {exc.strerror}"
        raise TransientStoreError(msg, subject=path, errno_value=exc.errno) from exc


def _open(path: str, flags: int) -> int:
    del flags
    return os.open(path, _FLAGS)


def _size_error(said: DigestedFile, size: int) -> IntegrityError:
    msg = f"{said.path!r} has {size} bytes, it is said to have {said.size}"
    return IntegrityError(msg, subject=said.path)
