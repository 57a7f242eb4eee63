"""The start-up probe: can this bucket do what a store must, may we, and is it ours to read?

It works on objects of its own, `.ckptgate/probe-...` below the prefix, and leaves none behind, nor
those of probes that were killed. Loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from ckptgate.errors import MissingError, TransientStoreError, UnusableError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES, StoreFormat, decode
from ckptgate.model.layout import GATEWAY_DIR, format_key, join_key
from ckptgate_adapters.s3_store.checksums import crc64, encode
from ckptgate_adapters.s3_store.complete import Upload
from ckptgate_adapters.s3_store.failures import (
    PERMISSIONS,
    BadCredentialsError,
    ConditionFailedError,
    ConflictError,
    DeniedError,
)
from ckptgate_adapters.s3_store.session import Answer, Session
from ckptgate_adapters.s3_store.trust import Trust

__all__ = ["Probe"]

_PREFIX_BYTES_MAX: Final = 400
"""What a checkpoint with a name of 240 bytes, in the root, leaves of S3's 1024."""
_RACES: Final = 2
_RACERS: Final = 2
_STALE: Final = datetime.timedelta(hours=1)
_ONE_WRITER: Final = "use single-writer mode, if nobody else ever writes below this prefix"

_log = logging.getLogger(__name__)


class Probe:
    """One probe of one store.

    Args:
        session: the connection.
        trust: finds out what the store's checksums mean.
        warn: gets what a person should know of the bucket.
    """

    def __init__(self, session: Session, trust: Trust, warn: Callable[[str], None]) -> None:
        self._session = session
        self._trust = trust
        self._warn = warn
        self._url = session.location.url
        self._start = session.key(join_key(GATEWAY_DIR, "probe-"))
        self._name = f"{self._start}{uuid.uuid4().hex}"
        self._lacking: dict[str, None] = {}

    async def run(self) -> None:
        """Prove that the bucket can be a store.

        Raises:
            UnusableError: the message says what it lacks, the hint the remedy.
            FormatVersionError: written by another version.
        """
        self._check_room()
        try:
            await self._reach()
            await self._check_format()
            try:
                await self._check_objects()
                await self._check_uploads()
            finally:
                await self._remove()
        except UnusableError:
            raise
        except TransientStoreError as exc:
            msg = f"the store {self._url!r} can't be reached: {exc}"
            hint = "check the endpoint, the region and the network"
            raise UnusableError(msg, subject=self._url, hint=hint) from exc
        if self._lacking:
            lacking = ", ".join(self._lacking)
            msg = f"the credentials for {self._url!r} aren't allowed: {lacking}"
            hint = f"allow {lacking} below {self._start.removesuffix('probe-')!r}"
            raise UnusableError(msg, subject=self._url, hint=hint, errno_value=errno.EACCES)

    def _check_room(self) -> None:
        """A key has but so many bytes, and what is put below the prefix takes its part."""
        size = len(self._session.location.prefix.encode())
        if size > _PREFIX_BYTES_MAX:
            msg = f"the prefix of {self._url!r} has {size} bytes, at most {_PREFIX_BYTES_MAX} do"
            raise UnusableError(
                msg, subject=self._url, hint="s3://BUCKET/PREFIX with a shorter one"
            )

    @asynccontextmanager
    async def _allowed(self, operation: str) -> AsyncGenerator[None]:
        """Note a permission that is missing, so that all of them are told at once."""
        try:
            yield
        except BadCredentialsError:
            raise
        except DeniedError:
            self._lacking[PERMISSIONS[operation]] = None

    async def _reach(self) -> None:
        """The first request: an answer that isn't S3's, no such bucket, wrong credentials."""
        try:
            async with self._allowed("list_objects_v2"):
                answer = await self._session.retried(
                    "list_objects_v2", Prefix=self._start, MaxKeys=1
                )
                if "Name" not in answer:
                    raise self._not_s3()
        except MissingError as exc:
            raise self._not_s3() from exc
        except TransientStoreError as exc:
            if _is_no_answer_of_s3(exc):
                raise self._not_s3() from exc
            raise

    def _not_s3(self) -> UnusableError:
        where = self._session.options.endpoint_url or "the endpoint"
        msg = f"{where} doesn't answer as an S3 service does (bucket {self._url!r})"
        return UnusableError(msg, subject=self._url, hint="check the endpoint's URL")

    async def _check_format(self) -> None:
        key = format_key("")
        async with self._allowed("get_object"):
            with contextlib.suppress(MissingError):
                found = await self._session.body(
                    Key=self._session.key(key), limit=MAX_DOCUMENT_BYTES
                )
                decode(found.data, StoreFormat, subject=key)

    # Objects

    async def _check_objects(self) -> None:
        first = await self._put("", b"first")
        if first is None:
            return
        if first.get("VersionId", "null") != "null":
            self._warn("the bucket keeps versions: what ckptgate removes goes on taking room there")
        if not self._session.options.single_writer:
            await self._check_put_if_absent()
        async with self._allowed("get_object"):
            there = await self._session.body(Key=self._name, limit=100)
            if there.data != b"first":
                msg = f"the store {self._url!r} gives back other bytes than it was given"
                raise UnusableError(msg, subject=self._url)
        async with self._allowed("head_object"):
            head = await self._session.retried("head_object", Key=self._name)
            if head.get("ObjectLockMode"):
                until = head.get("ObjectLockRetainUntilDate")
                self._warn(f"the bucket locks objects: nothing can be reclaimed before {until}")
        async with self._allowed("list_objects_v2"):
            listed = [found async for found in self._listed()]
            if self._name not in listed:
                msg = f"the store {self._url!r} doesn't list at once what was written"
                hint = "use a service with strongly consistent listings"
                raise UnusableError(msg, subject=self._url, hint=hint)
        async with self._allowed("put_object"):
            await self._trust.is_earned()

    async def _put(self, name: str, data: bytes) -> Answer | None:
        """Create an object of the probe's; None if that isn't allowed."""
        condition = {} if self._session.options.single_writer else {"IfNoneMatch": "*"}
        answer: Answer | None = None
        async with self._allowed("put_object"):
            try:
                answer = await self._session.retried(
                    "put_object", Key=self._name + name, Body=data, **_checksum(data), **condition
                )
            except ConditionFailedError:
                # Sent twice: the first answer was lost.
                answer = {}
            except UnusableError as exc:
                if condition and not isinstance(exc, DeniedError):
                    raise self._no_put_if_absent(f"refuses If-None-Match: {exc}") from exc
                raise
        return answer

    async def _check_put_if_absent(self) -> None:
        """Create an object twice, and let writers race: one may win each time."""
        wins = [await self._wins(self._name, b"second")]
        races = [self._race(number) for number in range(_RACES)]
        wins += [count > 1 for count in await asyncio.gather(*races)]
        if any(wins):
            raise self._no_put_if_absent("lets two writers create the same object")

    async def _race(self, number: int) -> int:
        key = f"{self._name}-race-{number}"
        racers = [self._wins(key, b"%d" % racer) for racer in range(_RACERS)]
        return sum(await asyncio.gather(*racers))

    async def _wins(self, key: str, data: bytes) -> bool:
        try:
            await self._session.call(
                "put_object", Key=key, Body=data, IfNoneMatch="*", **_checksum(data)
            )
        except (ConditionFailedError, ConflictError):
            return False
        return True

    def _no_put_if_absent(self, why: str) -> UnusableError:
        msg = f"the store {self._url!r} {why} (no put-if-absent)"
        return UnusableError(msg, subject=self._url, hint=_ONE_WRITER)

    # Multipart uploads

    async def _check_uploads(self) -> None:
        key = f"{self._name}-parts"
        async with self._allowed("create_multipart_upload"):
            made = await self._session.retried("create_multipart_upload", Key=key)
            if made.get("AbortDate"):
                self._warn(
                    f"the bucket's rule {made.get('AbortRuleId', '')!r} aborts uploads that take "
                    f"too long: one that begins now at {made['AbortDate']}"
                )
            upload = Upload(key=key, id=made["UploadId"], is_whole=False)
            async with self._allowed("list_multipart_uploads"):
                await self._session.retried("list_multipart_uploads", Prefix=key, MaxUploads=1)
            async with self._allowed("list_parts"):
                await self._session.retried("list_parts", **upload.place, MaxParts=1)
            async with self._allowed("abort_multipart_upload"):
                await self._session.retried("abort_multipart_upload", **upload.place)

    # What it leaves

    async def _listed(self) -> AsyncGenerator[str]:
        async for page in self._session.pages("list_objects_v2", Prefix=self._start):
            for found in page.get("Contents", ()):
                yield found["Key"]

    async def _remove(self) -> None:
        """Remove this probe's objects, and those of probes that were killed an hour ago."""
        ours: set[str] = {self._name, *(f"{self._name}-race-{n}" for n in range(_RACES))}
        try:
            async with self._allowed("delete_object"):
                for key in ours | await self._stale():
                    await self._session.retried("delete_object", Key=key)
        except (MissingError, TransientStoreError) as exc:
            _log.warning("s3-probe-left-behind key=%s error=%s", self._name, exc)

    async def _stale(self) -> set[str]:
        found: list[dict[str, Any]] = []
        async with self._allowed("list_objects_v2"):
            async for page in self._session.pages("list_objects_v2", Prefix=self._start):
                found += page.get("Contents", ())
        newest = max((each["LastModified"] for each in found), default=None)
        return {each["Key"] for each in found if newest - each["LastModified"] > _STALE}


def _checksum(data: bytes) -> dict[str, str]:
    """Each request carries it; a bucket that locks objects takes none without."""
    return {"ChecksumCRC64NVME": encode(crc64(data))}


def _is_no_answer_of_s3(exc: TransientStoreError) -> bool:
    """Whether something answered, but nothing that S3 says.

    The client takes an unreadable answer with status 200 for an internal error.
    """
    cause = exc.__cause__
    if isinstance(cause, ClientError):
        answer: dict[str, Any] = getattr(cause, "response", {})
        code = str(answer.get("Error", {}).get("Code", ""))
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return (not code or code.isdigit()) and "x-amz-request-id" not in headers
    return isinstance(cause, ResponseParserError)
