"""Sending files: one request for a small one, a multipart upload for others.

Parts of all files share one set of buffers, so memory is bounded whatever is uploaded, and a file's
next part is read while others are sent. Each request carries the checksum of its bytes, so what
arrives with a flipped bit is refused by the store and sent again. Loop only.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from ckptgate.errors import IntegrityError
from ckptgate.ports.store import DigestedFile
from ckptgate_adapters.s3_store.bodies import FlowBody, Moving, ViewBody
from ckptgate_adapters.s3_store.buffers import Place
from ckptgate_adapters.s3_store.checksums import combine, crc64, encode
from ckptgate_adapters.s3_store.complete import Upload, abort, complete
from ckptgate_adapters.s3_store.failures import (
    BadBytesError,
    InvalidPartError,
    NoSuchUploadError,
    first_error,
)
from ckptgate_adapters.s3_store.parts import Part, PartPlan, plan_parts
from ckptgate_adapters.s3_store.proof import DIGEST_NAME, UPLOAD_NAME, Sent, etag_of
from ckptgate_adapters.s3_store.session import Answer, Session
from ckptgate_adapters.s3_store.sources import Source, opened, pieces

__all__ = ["SMALL_BYTES", "Uploads"]

SMALL_BYTES: Final = 1024 * 1024
"""Up to here a file is sent from memory of its own, beside the buffers."""

_STARTS_MAX: Final = 3
"""How often a multipart upload is begun: a rule of the bucket, or a person, may abort one."""

_NO_MORE: Final[Mapping[str, str]] = MappingProxyType({})

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Parts:
    """What is known of the parts that were sent, by number."""

    crcs: dict[int, int] = field(default_factory=dict[int, int])
    etags: dict[int, str] = field(default_factory=dict[int, str])
    sizes: dict[int, int] = field(default_factory=dict[int, int])

    def in_order(self) -> list[dict[str, Any]]:
        """As Complete names them."""
        return [
            {
                "PartNumber": number,
                "ETag": self.etags[number],
                "ChecksumCRC64NVME": encode(self.crcs[number]),
            }
            for number in sorted(self.crcs)
        ]

    def sent(self, source: DigestedFile, token: str) -> Sent:
        """All of it."""
        numbers = sorted(self.crcs)
        crc = 0
        for number in numbers:
            crc = combine(crc, self.crcs[number], self.sizes[number])
        return Sent(
            digest=source.digest,
            size=source.size,
            crc=crc,
            parts=tuple(self.crcs[number] for number in numbers),
            etag=etag_of([self.etags[number] for number in numbers]),
            token=token,
        )


class Uploads:
    """All that is sent on one session.

    Args:
        session: the connection.
        warn: gets what a person should know of the bucket.
    """

    def __init__(self, session: Session, warn: Callable[[str], None]) -> None:
        self._session = session
        self._warn = warn

    async def send(
        self,
        key: str,
        source: DigestedFile,
        *,
        more: Mapping[str, str] = _NO_MORE,
        may_grow: bool = False,
    ) -> tuple[Sent, bool]:
        """Store the file under *key*; what was sent, and whether the store proved that it has it.

        A file that was sent in one request isn't looked at here.

        Args:
            key: of the object.
            source: the file.
            more: user metadata beside the digest.
            may_grow: if it is longer now, what it is said to be is sent.

        Raises:
            IntegrityError: the file isn't what it is said to be, or arrived as something else.
            MissingError: the file isn't there.
            TransientStoreError: nothing is known.
        """
        plan = plan_parts(source.size, self._session.options.part_bytes)
        metadata = {**more, DIGEST_NAME: source.digest}
        if plan.count == 1:
            return await self._send_whole(key, source, metadata, may_grow=may_grow), False
        for starts_left in reversed(range(_STARTS_MAX)):
            try:
                return await self._send_parts(key, source, plan, metadata, may_grow=may_grow)
            except (NoSuchUploadError, InvalidPartError, BadBytesError) as exc:
                if not starts_left:
                    msg = f"the upload was lost {_STARTS_MAX} times: {exc}"
                    raise IntegrityError(msg, subject=exc.subject) from exc
                _log.warning("s3-upload-starts-over key=%s error=%s", key, exc)
        raise AssertionError("unreachable")

    # In one request

    async def _send_whole(
        self, key: str, source: DigestedFile, metadata: Mapping[str, str], *, may_grow: bool
    ) -> Sent:
        async with opened(source, may_grow=may_grow) as file:
            if source.size <= SMALL_BYTES:
                data = await file.read()
                crc = crc64(data)
                file.check()
                await self._put(key, metadata, crc, lambda: data)
            else:
                crc = await self._put_from_place(key, metadata, file)
        return Sent(digest=source.digest, size=source.size, crc=crc)

    async def _put_from_place(self, key: str, metadata: Mapping[str, str], file: Source) -> int:
        place = await self._session.buffers.place()
        is_done = False
        try:
            view = place.view(file.said.size)
            crc = await file.read_into(view)
            file.check()
            await self._put(key, metadata, crc, lambda: ViewBody(view))
            is_done = True
        finally:
            place.free(may_reuse=is_done)
        return crc

    async def _put(
        self, key: str, metadata: Mapping[str, str], crc: int, body: Callable[[], bytes | ViewBody]
    ) -> None:
        async def once() -> None:
            answer = await self._session.call(
                "put_object",
                Key=key,
                Body=body(),
                ChecksumCRC64NVME=encode(crc),
                Metadata=dict(metadata),
            )
            self._check(key, answer, crc)

        await self._session.policy.run(once, f"put {key}")

    # In parts

    async def _send_parts(
        self,
        key: str,
        source: DigestedFile,
        plan: PartPlan,
        metadata: Mapping[str, str],
        *,
        may_grow: bool,
    ) -> tuple[Sent, bool]:
        token = uuid.uuid4().hex
        upload = await self._begin(key, {**metadata, UPLOAD_NAME: token})
        try:
            parts = _Parts()
            async with opened(source, may_grow=may_grow) as file:
                await first_error(self._send_all(upload, file, plan, parts))
                file.check()
            sent = parts.sent(source, token)
            is_proved = await complete(self._session, upload, parts.in_order(), sent)
        except BaseException:
            # A cancellation, too, must not leave parts that are paid for.
            await abort(self._session, upload)
            raise
        return sent, is_proved

    async def _begin(self, key: str, metadata: Mapping[str, str]) -> Upload:
        # One whose answer is lost leaves an upload without parts; it is removed by its age.
        answer = await self._session.retried(
            "create_multipart_upload",
            Key=key,
            ChecksumAlgorithm="CRC64NVME",
            ChecksumType="FULL_OBJECT",
            Metadata=dict(metadata),
        )
        if answer.get("AbortDate"):
            self._warn(
                f"the bucket's rule {answer.get('AbortRuleId', '')!r} aborts uploads that take too "
                f"long: this one at {answer['AbortDate']}"
            )
        is_whole = answer.get("ChecksumType") == "FULL_OBJECT"
        return Upload(key=key, id=answer["UploadId"], is_whole=is_whole)

    async def _send_all(self, upload: Upload, file: Source, plan: PartPlan, parts: _Parts) -> None:
        buffers = self._session.buffers
        async with asyncio.TaskGroup() as group:
            for part in plan:
                place = await buffers.place()
                try:
                    if part.size <= buffers.size:
                        view = place.view(part.size)
                        crc = await file.read_into(view)
                        make: Callable[[], Moving] = partial(ViewBody, view)
                    else:
                        crc = await file.skim(part.size, place.view(buffers.size))
                        make = partial(_flow, file.said, part)
                except BaseException:
                    # A read that was cancelled goes on beside the loop, into this buffer.
                    place.free(may_reuse=False)
                    raise
                parts.crcs[part.number], parts.sizes[part.number] = crc, part.size
                group.create_task(self._send_part(upload, part, crc, make, place, parts))

    async def _send_part(
        self,
        upload: Upload,
        part: Part,
        crc: int,
        body: Callable[[], Moving],
        place: Place,
        parts: _Parts,
    ) -> None:
        async def once() -> Answer:
            answer = await self._session.call(
                "upload_part",
                **upload.place,
                PartNumber=part.number,
                ContentLength=part.size,
                Body=body(),
                ChecksumCRC64NVME=encode(crc),
            )
            self._check(upload.key, answer, crc)
            return answer

        is_done = False
        try:
            answer = await self._session.policy.run(once, f"part {part.number} of {upload.key}")
            parts.etags[part.number] = answer.get("ETag", "")
            is_done = True
        finally:
            place.free(may_reuse=is_done)

    def _check(self, key: str, answer: Answer, crc: int) -> None:
        """Refuse an answer that has the checksum of other bytes."""
        found = answer.get("ChecksumCRC64NVME")
        if found and found != encode(crc):
            path = self._session.location.path(key)
            msg = f"{path!r} arrived with the CRC64NVME {found}, sent was {encode(crc)}"
            raise BadBytesError(msg, subject=path)


def _flow(source: DigestedFile, part: Part) -> Moving:
    return FlowBody(pieces(source, part), part.size)
