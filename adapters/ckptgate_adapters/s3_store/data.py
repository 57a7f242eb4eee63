"""The checkpoints' bytes: sent, proved and read. Any thread.

How an object is proved, once it is sent: the store's own full-object checksum against the one that
was computed while the file was read; or, where the store has none, claims the client's, or the
policy asks for it, by reading all of it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Mapping
from typing import Final

from ckptgate.errors import CkptError
from ckptgate.ports.store import DigestedFile, VerifyMode, check_verify_mode
from ckptgate_adapters.s3_store.complete import look
from ckptgate_adapters.s3_store.direct import DirectReader
from ckptgate_adapters.s3_store.probing import Probe
from ckptgate_adapters.s3_store.proof import Sent, prove
from ckptgate_adapters.s3_store.ranges import ReplacedError, read_bytes
from ckptgate_adapters.s3_store.readback import read_back
from ckptgate_adapters.s3_store.remembered import Remembered
from ckptgate_adapters.s3_store.session import Session
from ckptgate_adapters.s3_store.sources import opened
from ckptgate_adapters.s3_store.trust import Trust
from ckptgate_adapters.s3_store.upload import Uploads

__all__ = ["S3_MODES", "S3Data"]

S3_MODES: Final = frozenset({VerifyMode.CHECKSUM, VerifyMode.READBACK})
"""How objects can be verified: a size proves nothing of what a network carried."""

_SENT_MAX: Final = 4096
_PINNED_MAX: Final = 1024

_log = logging.getLogger(__name__)


class S3Data:
    """`ports.store.DataObjects` on S3."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._uploads = Uploads(session, self._warn)
        self._trust = Trust(session)
        self._sent: Remembered[Sent] = Remembered(_SENT_MAX)
        self._etags: Remembered[str] = Remembered(_PINNED_MAX)
        self._direct = DirectReader(session)
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> list[str]:
        """What a person should know of the bucket, as far as it was met."""
        return list(self._warnings)

    def probe(self) -> None:
        """Prove that the bucket can be a store; leaves nothing behind."""
        self._session.run(Probe(self._session, self._trust, self._warn).run())

    def put(self, key: str, source: DigestedFile) -> None:
        """Store the file under *key*, durably on return."""
        self._session.run(self._put(self._session.key(key), source))

    def verify(self, key: str, source: DigestedFile, mode: VerifyMode) -> None:
        """Prove that *key* holds exactly the bytes of *source*."""
        check_verify_mode(mode, S3_MODES, self._session.location.url)
        self._session.run(self._verify(self._session.key(key), source, mode))

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        """`put` and `verify` each, side by side: two requests for a small file."""
        check_verify_mode(mode, S3_MODES, self._session.location.url)
        return self._session.run(self._put_all(files, mode))

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*."""
        data = bytearray(max(length, 0))
        return bytes(memoryview(data)[: self.read_into(key, offset, memoryview(data))])

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """Up to as many bytes at *offset* as *view* has."""
        full = self._session.key(key)
        if not len(view):
            return 0
        found = self._direct.read_into(full, offset, view, self._etags.get(full) or "")
        if found is not None:
            self._etags.keep(full, found[1])
            return found[0]
        data = self._session.run(self._read(full, offset, len(view)))
        view[: len(data)] = data
        return len(data)

    def pieces(
        self, key: str, offset: int, length: int, buffer: memoryview
    ) -> Generator[memoryview]:
        """Up to *length* bytes at *offset*, in pieces of *buffer*."""
        full = self._session.key(key)
        done = 0
        if length:
            etag = self._etags.get(full) or ""
            with contextlib.closing(
                self._direct.pieces(full, offset, length, buffer, etag)
            ) as found:
                for piece, pinned in found:
                    if not done:
                        self._etags.keep(full, pinned)
                    done += len(piece)
                    yield piece
        # What didn't come that way, if anything: there may be no more.
        while done < length:
            view = buffer[: length - done]
            count = self.read_into(key, offset + done, view)
            if not count:
                return
            yield view[:count]
            done += count

    def close(self) -> None:
        """Close the connections; nothing can be called afterwards."""
        self._direct.close()
        self._session.close()

    def local_path(self, key: str) -> str | None:
        """None: nothing of it is in the local file system."""
        self._session.key(key)
        return None

    async def _put_all(
        self, files: Mapping[str, DigestedFile], mode: VerifyMode
    ) -> dict[str, OSError]:
        failed: dict[str, OSError] = {}

        async def one(path: str, source: DigestedFile) -> None:
            try:
                key = self._session.key(path)
                if await self._put(key, source) and mode is VerifyMode.CHECKSUM:
                    return
                await self._verify(key, source, mode)
            except CkptError as exc:
                failed[path] = exc

        async with asyncio.TaskGroup() as group:
            for path, source in files.items():
                group.create_task(one(path, source))
        return {path: failed[path] for path in files if path in failed}

    async def _put(self, key: str, source: DigestedFile) -> bool:
        """Send it; whether the store's checksum has proved it already."""
        async with self._session.files:
            sent, is_proved = await self._uploads.send(key, source)
        self._sent.keep(key, sent)
        return is_proved and await self._trust.is_earned()

    async def _verify(self, key: str, source: DigestedFile, mode: VerifyMode) -> None:
        if mode is VerifyMode.READBACK or not await self._is_proved(key, source):
            await read_back(self._session, key, source)

    async def _is_proved(self, key: str, source: DigestedFile) -> bool:
        if not await self._trust.is_earned():
            return False
        head = await look(self._session, key)
        if prove(self._session.location.path(key), head, await self._what_was_sent(key, source)):
            return True
        self._trust.say("it tells none")
        return False

    async def _what_was_sent(self, key: str, source: DigestedFile) -> Sent:
        """As it was remembered, or else computed from the file."""
        sent = self._sent.get(key)
        if sent is not None and (sent.digest, sent.size) == (source.digest, source.size):
            return sent
        place = await self._session.buffers.place()
        try:
            async with opened(source) as file:
                crc = await file.skim(source.size, place.view(self._session.buffers.size))
                file.check()
        finally:
            place.free(may_reuse=False)
        sent = Sent(digest=source.digest, size=source.size, crc=crc)
        self._sent.keep(key, sent)
        return sent

    async def _read(self, key: str, offset: int, length: int) -> bytes:
        etag = self._etags.get(key) or ""
        try:
            data, answer = await read_bytes(self._session, key, offset, length, etag=etag)
        except ReplacedError:
            # A put that was repeated: the same bytes, as another version.
            self._etags.forget(key)
            data, answer = await read_bytes(self._session, key, offset, length)
        if answer is not None and answer.get("ETag"):
            self._etags.keep(key, answer["ETag"])
        return data

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings[text] = None
            _log.warning("s3-bucket-warning store=%s problem=%s", self._session.location.url, text)
