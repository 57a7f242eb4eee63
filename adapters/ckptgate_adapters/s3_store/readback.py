"""Reading an object back to compare its digests: what proves it whatever the store says.

Ranges are got side by side into the shared buffers and digested in order, all of one version of the
object. Loop only.
"""

from __future__ import annotations

import asyncio
from typing import Final

import blake3

from ckptgate.errors import IntegrityError
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.ports.store import DigestedFile
from ckptgate_adapters.s3_store.buffers import Place
from ckptgate_adapters.s3_store.failures import first_error
from ckptgate_adapters.s3_store.ranges import read_bytes, read_into, size_of
from ckptgate_adapters.s3_store.session import Session

__all__ = ["read_back"]

_DIGEST_BYTES: Final = 32
_SMALL_BYTES: Final = 1024 * 1024


async def read_back(session: Session, key: str, source: DigestedFile) -> None:
    """Compare all bytes of *key* with the digests of *source*.

    Raises:
        IntegrityError: size or digest differ.
        MissingError: nothing is there.
        TransientStoreError: unknown.
    """
    path = session.location.path(key)
    digests = _Digests(path, source)
    first = min(source.size, _SMALL_BYTES)
    # One byte more, so that a longer object is noticed even where its size isn't told.
    data, answer = await read_bytes(session, key, 0, first + 1)
    found = size_of(answer) if answer is not None else 0
    if found != source.size:
        msg = f"{path!r} has {found} bytes in the store, wanted {source.size}"
        raise IntegrityError(msg, subject=path)
    digests.take(memoryview(data)[:first])
    if answer is not None and source.size > first:
        rest = _read_rest(session, key, first, source.size, answer.get("ETag", ""), digests)
        await first_error(rest)
    digests.finish()


async def _read_rest(
    session: Session, key: str, offset: int, size: int, etag: str, digests: _Digests
) -> None:
    loop, buffers = asyncio.get_running_loop(), session.buffers
    ready: asyncio.Queue[asyncio.Task[tuple[Place, memoryview]] | None] = asyncio.Queue()

    async def get(place: Place, start: int, length: int) -> tuple[Place, memoryview]:
        try:
            view = place.view(length)
            await read_into(session, key, start, view, etag=etag)
        except BaseException:
            # A read that was cancelled may go on beside the loop, into this buffer.
            place.free(may_reuse=False)
            raise
        return place, view

    async def ask(group: asyncio.TaskGroup) -> None:
        for start in range(offset, size, buffers.size):
            place = await buffers.place()
            length = min(buffers.size, size - start)
            ready.put_nowait(group.create_task(get(place, start, length)))
        ready.put_nowait(None)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask(group))
        while (task := await ready.get()) is not None:
            place, view = await task
            try:
                await loop.run_in_executor(None, digests.take, view)
            finally:
                place.free(may_reuse=False)


class _Digests:
    """Of the chunks and of the whole, as the bytes come."""

    def __init__(self, path: str, source: DigestedFile) -> None:
        self._path = path
        self._source = source
        self._whole = blake3.blake3()
        self._chunk = blake3.blake3()
        self._done = 0

    def take(self, view: memoryview) -> None:
        """The next bytes."""
        while view:
            piece = view[: CHUNK_BYTES - self._done % CHUNK_BYTES]
            self._whole.update(piece)
            self._chunk.update(piece)
            self._done += len(piece)
            view = view[len(piece) :]
            if self._done % CHUNK_BYTES == 0:
                self._end_chunk()

    def finish(self) -> None:
        """After the last byte."""
        if self._done % CHUNK_BYTES:
            self._end_chunk()
        if self._whole.hexdigest() != self._source.digest:
            msg = f"{self._path!r} differs in the store"
            raise IntegrityError(msg, subject=self._path)

    def _end_chunk(self) -> None:
        index = (self._done - 1) // CHUNK_BYTES
        wanted = self._source.chunks[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
        if self._source.chunks and self._chunk.digest() != wanted:
            msg = f"chunk {index} of {self._path!r} differs in the store"
            raise IntegrityError(msg, subject=self._path)
        self._chunk = blake3.blake3()
