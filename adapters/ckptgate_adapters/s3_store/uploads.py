"""Multipart uploads that were begun and not completed: listed and aborted, below our prefix only.

A bucket may have other people's: nothing whose key isn't below the store's own prefix is ever
shown or touched. Coroutines run on the session's loop.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from ckptgate.errors import TransientStoreError
from ckptgate.ports.uploads import UnfinishedUpload
from ckptgate_adapters.s3_store.failures import NoSuchUploadError
from ckptgate_adapters.s3_store.objects import each, listed_in, told
from ckptgate_adapters.s3_store.session import Session

__all__ = ["S3Uploads", "Started", "abort", "list_started", "progress"]

_ABORT_TRIES: Final = 10
_ABORT_WAIT_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An upload that was begun.

    Attributes:
        key: in the bucket.
        upload_id: by the store.
        started_at: by the server's clock.
    """

    key: str
    upload_id: str
    started_at: datetime


class S3Uploads:
    """`ports.uploads.Uploads` on S3. Any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def uploads(self, *, older_than_s: float = 0.0) -> list[UnfinishedUpload]:
        """All unfinished uploads below the store's root that were begun so long ago."""
        return self._session.run(self._old_uploads(older_than_s))

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort it, until none of its parts is left; one that is not there is success."""
        # As it is: somebody may have begun one under a name that is no path of ours.
        key = self._session.location.below("") + upload.path
        self._session.run(abort(self._session, key, upload.upload_id))

    async def _old_uploads(self, older_than_s: float) -> list[UnfinishedUpload]:
        location = self._session.location
        before = datetime.now(UTC).timestamp() - older_than_s
        started = [
            one
            async for one in list_started(self._session, location.below(""))
            if one.started_at.timestamp() <= before
        ]

        async def look(one: Started) -> UnfinishedUpload | None:
            seen = await progress(self._session, one)
            if seen is None:
                return None
            return UnfinishedUpload(
                path=location.path(one.key),
                upload_id=one.upload_id,
                started_at=one.started_at,
                parts=seen[0],
                size=seen[1],
            )

        found = await each(self._session.options.max_parallel, started, look)
        return [one for one in found if one is not None]


async def list_started(session: Session, prefix: str) -> AsyncIterator[Started]:
    """All uploads whose keys begin with *prefix*; keys that XML can't carry come encoded."""
    marks: dict[str, Any] = {}
    while True:
        page = await session.retried(
            "list_multipart_uploads", Prefix=prefix, EncodingType="url", **marks
        )
        keys: dict[str, str] = {}
        for item in listed_in(page, "Uploads"):
            one = Started(
                key=str(item["Key"]),
                upload_id=str(item["UploadId"]),
                started_at=item["Initiated"],
            )
            if page.get("EncodingType") == "url":
                one = await _decoded(session, one)
            keys[str(item["Key"])] = one.key
            # Whoever answers to another prefix than was asked for must not cost others theirs.
            if one.key.startswith(prefix):
                yield one
        if not page.get("IsTruncated"):
            return
        key = str(page.get("NextKeyMarker") or "")
        upload = str(page.get("NextUploadIdMarker") or "")
        following = {"KeyMarker": keys.get(key, key), "UploadIdMarker": upload}
        if following == marks or not key:
            msg = f"the listing of uploads below {prefix!r} doesn't say how it goes on"
            raise TransientStoreError(msg, subject=prefix)
        marks = {name: value for name, value in following.items() if value}


async def _decoded(session: Session, one: Started) -> Started:
    """With its key as it is: some services say that it is encoded, and it isn't."""
    plain = replace(one, key=urllib.parse.unquote_plus(one.key))
    if plain.key == one.key or await progress(session, plain) is None:
        return one
    return plain


async def progress(session: Session, started: Started) -> tuple[int, int] | None:
    """How many parts, and bytes, the store has of it; None if it is no longer there."""
    count = size = 0
    try:
        async for page in session.pages("list_parts", Key=started.key, UploadId=started.upload_id):
            for part in listed_in(page, "Parts"):
                count += 1
                size += int(part.get("Size") or 0)
    except NoSuchUploadError:
        return None
    return count, size


async def abort(session: Session, key: str, upload_id: str) -> int:
    """Abort an upload until it is gone: a part under way may land after the first abort.

    Returns:
        Bytes of its parts.

    Raises:
        TransientStoreError: it still has parts.
    """
    one = Started(key=key, upload_id=upload_id, started_at=datetime.now(UTC))
    won = 0
    for _ in range(_ABORT_TRIES):
        seen = await progress(session, one)
        if seen is None:
            return won
        won = max(won, seen[1])
        try:
            await session.retried("abort_multipart_upload", Key=key, UploadId=upload_id)
        except NoSuchUploadError:
            return won
        if await progress(session, one) is None:
            return won
        await asyncio.sleep(_ABORT_WAIT_S)
    subject = told(session, key)
    msg = f"the upload {upload_id!r} of {subject!r} still has parts after {_ABORT_TRIES} aborts"
    raise TransientStoreError(msg, subject=subject)
