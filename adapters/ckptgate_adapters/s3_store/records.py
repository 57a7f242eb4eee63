"""Small immutable objects: put-if-absent by `If-None-Match: *`, read back after any doubt.

Any thread.
"""

from __future__ import annotations

from functools import partial

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FullError,
    IntegrityError,
    MissingError,
    TransientStoreError,
    UnusableError,
)
from ckptgate.model.documents import MAX_DOCUMENT_BYTES
from ckptgate.model.layout import TEMP_PREFIX
from ckptgate_adapters.s3_store.checksums import crc64, encode
from ckptgate_adapters.s3_store.failures import ConditionFailedError
from ckptgate_adapters.s3_store.session import Session

__all__ = ["S3Records"]


class S3Records:
    """`ports.store.Records` on S3."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(self, key: str, data: bytes) -> None:
        """Store *data* under *key* if nothing is there; equal bytes there are success."""
        self._session.run(self._create(self._session.key(key), bytes(data)))

    def get(self, key: str, *, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        """The bytes under *key*, fresh."""
        return self._session.run(self._get(self._session.key(key), limit))

    def children(self, prefix: str) -> list[str]:
        """Names directly below *prefix*, sorted, without those of unfinished writes."""
        return self._session.run(self._children(self._session.location.below(prefix)))

    async def _create(self, key: str, data: bytes) -> None:
        # Done again by us as by any caller: the same bytes in the same place are the same record.
        doubt: list[CkptError] = []
        once = partial(self._create_once, key, data, doubt)
        try:
            await self._session.policy.run(once, f"create {key}")
        except (FullError, UnusableError) as exc:
            if not doubt:
                raise
            # The last answer was a no, but an earlier one was lost.
            path = self._session.location.path(key)
            msg = f"unknown whether {path!r} was stored: {exc}"
            raise TransientStoreError(msg, subject=path) from exc

    async def _create_once(self, key: str, data: bytes, doubt: list[CkptError]) -> None:
        condition = {"IfNoneMatch": "*"}
        if self._session.options.single_writer:
            if await self._is_there(key, data):
                return
            condition = {}
        try:
            await self._session.call(
                "put_object", Key=key, Body=data, ChecksumCRC64NVME=encode(crc64(data)), **condition
            )
        except (ConditionFailedError, FullError, TransientStoreError, UnusableError) as exc:
            if isinstance(exc, TransientStoreError):
                doubt.append(exc)
            await self._settle(key, data, exc)

    async def _settle(self, key: str, data: bytes, exc: CkptError) -> None:
        """Decide by what is there: the record may have landed although the answer says no, or none.

        A failed condition may be this very record's doing, too, and a refusal that of credentials
        which ended meanwhile: whoever sent it twice (a layer below, an earlier call) gets the
        answer to the second.
        """
        path = self._session.location.path(key)
        try:
            is_there = await self._is_there(key, data)
        except UnusableError as unseen:
            msg = f"unknown whether {path!r} was stored: {exc}"
            raise TransientStoreError(msg, subject=path, hint=exc.hint) from unseen
        if is_there:
            return
        if isinstance(exc, ConditionFailedError):
            msg = f"{path!r} was there and is not: nothing is known"
            raise TransientStoreError(msg, subject=path) from exc
        raise exc

    async def _is_there(self, key: str, data: bytes) -> bool:
        """Whether *data* is there; ExistsError if something else is."""
        try:
            there = await self._session.body(Key=key, limit=len(data) + 1)
            is_same = there.data == data
        except MissingError:
            return False
        except IntegrityError:
            is_same = False
        if not is_same:
            path = self._session.location.path(key)
            msg = f"other bytes are already stored under {path!r}"
            raise ExistsError(msg, subject=path)
        return True

    async def _get(self, key: str, limit: int) -> bytes:
        body = await self._session.policy.run(
            partial(self._session.body, Key=key, limit=limit), f"get {key}"
        )
        return body.data

    async def _children(self, start: str) -> list[str]:
        names: set[str] = set()
        pages = self._session.pages("list_objects_v2", Prefix=start, Delimiter="/")
        async for page in pages:
            found = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
            found += [item["Key"] for item in page.get("Contents", ())]
            names.update(key[len(start) :].rstrip("/") for key in found)
        return sorted(name for name in names if name and not name.startswith(TEMP_PREFIX))
