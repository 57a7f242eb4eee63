"""Objects by their keys: looked at, listed, removed; small ones read and put under a condition.

Owns the rule that a listed key is only ours to use as the server gave it: nothing here splits or
normalises keys, so that `a//b`, `.` and control characters are what they are. What is asked for
again after a lost answer gives the same result, or is resolved by looking. Coroutines run on the
session's loop.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from ckptgate.errors import (
    CkptError,
    MissingError,
    TransientStoreError,
    UnusableError,
)
from ckptgate_adapters.s3_store.attributes import Attributes, read_attributes, time_ns
from ckptgate_adapters.s3_store.checksums import crc64, encode
from ckptgate_adapters.s3_store.failures import (
    ConditionFailedError,
    ConflictError,
    DeniedError,
)
from ckptgate_adapters.s3_store.session import Session

__all__ = [
    "Found",
    "Listed",
    "bare",
    "delete",
    "delete_each",
    "delete_if_same",
    "each",
    "first_below",
    "get_small",
    "head",
    "inner",
    "list_all",
    "list_names",
    "listed_in",
    "put_small",
    "told",
]

_BATCH: Final = 1000
"""Keys in one DeleteObjects."""
_GONE: Final = frozenset({"NoSuchKey", "404"})
_FOR_NOW: Final = frozenset({
    "InternalError", "SlowDown", "ServiceUnavailable", "OperationAborted", "RequestTimeout",
    "Throttling", "ServerBusy",
})  # fmt: skip
_CONFLICT_TRIES: Final = 8
_CONFLICT_WAIT_S: Final = 0.05
_NOT_XML: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""A key with one of these can't be named in the body of a request."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An object as a listing has it.

    Attributes:
        key: in the bucket.
        size: bytes.
        etag: without its quotes.
        stored_ns: by the server's clock.
    """

    key: str
    size: int
    etag: str
    stored_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object as an answer about it alone has it.

    Attributes:
        key, size, etag, stored_ns: as `Listed`.
        answered_ns: by the server's clock; 0 where it doesn't say.
        metadata: the user's, as it is.
        checksum: the whole object's by the store, as (algorithm, value); ("", "") for none.
        body: what was read of it.
    """

    key: str
    size: int
    etag: str
    stored_ns: int
    answered_ns: int
    metadata: Mapping[str, str]
    checksum: tuple[str, str] = ("", "")
    body: bytes = b""

    @property
    def attributes(self) -> Attributes:
        """What the metadata says."""
        return read_attributes(self.metadata)


def listed_in(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What an answer lists under *name*; nothing where it has no such list."""
    found: list[dict[str, Any]] | None = answer.get(name)
    return found or []


def told(session: Session, key: str) -> str:
    """How an error names a key: as users do, below the store's root."""
    start = session.location.below("")
    return key.removeprefix(start)


def inner(answer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What an answer has under *name*; nothing where it has no such part."""
    found: dict[str, Any] | None = answer.get(name)
    return found or {}


def bare(etag: object) -> str:
    """An ETag without quotes: not every answer has them."""
    return str(etag or "").strip('"')


def _found(key: str, answer: Mapping[str, Any], size: int, body: bytes = b"") -> Found:
    return Found(
        key=key,
        size=size,
        etag=bare(answer.get("ETag")),
        stored_ns=time_ns(answer),
        answered_ns=_answered_ns(answer),
        metadata=dict(inner(answer, "Metadata")),
        checksum=whole_checksum(answer),
        body=body,
    )


def _answered_ns(answer: Mapping[str, Any]) -> int:
    headers = inner(inner(answer, "ResponseMetadata"), "HTTPHeaders")
    try:
        at = email.utils.parsedate_to_datetime(str(headers.get("date") or ""))
    except ValueError:
        return 0
    return int(at.timestamp()) * 1_000_000_000


def whole_checksum(answer: Mapping[str, Any]) -> tuple[str, str]:
    """The checksum over all bytes that an answer has, ("", "") for none."""
    if answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return "", ""
    for name in ("CRC64NVME", "CRC32C", "CRC32", "SHA256", "SHA1"):
        value = str(answer.get(f"Checksum{name}") or "")
        # One of parts' checksums ends with their number.
        if value and "-" not in value:
            return name, value
    return "", ""


async def each(limit: int, items: Iterable[_T], action: Callable[[_T], Awaitable[_R]]) -> list[_R]:
    """What *action* returns for each item, in order; at most *limit* run at a time.

    The first failure ends the rest, and is raised when all of them have ended.
    """
    queue = list(enumerate(items))
    queue.reverse()
    results: dict[int, _R] = {}

    async def work() -> None:
        while queue:
            at, item = queue.pop()
            try:
                results[at] = await action(item)
            except BaseException:
                # A cancellation, too, is the end for all workers: none takes another item.
                queue.clear()
                raise

    workers = [asyncio.ensure_future(work()) for _ in range(min(limit, len(queue)))]
    try:
        await asyncio.gather(*workers)
    finally:
        # None may go on when its caller believes that all is over.
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[at] for at in range(len(results))]


# Looking


async def head(session: Session, key: str, *, bucket: str = "") -> Found | None:
    """The object *key*, None if there is none; of the session's bucket if none is given."""
    place = {"Bucket": bucket} if bucket else {}
    try:
        answer = await session.retried("head_object", Key=key, ChecksumMode="ENABLED", **place)
    except MissingError:
        return None
    return _found(key, answer, int(answer.get("ContentLength") or 0))


async def get_small(session: Session, key: str, limit: int) -> Found | None:
    """The object *key* with its body, None if there is none.

    Raises:
        IntegrityError: it has more than *limit* bytes.
    """
    try:
        got = await session.policy.run(partial(session.body, limit=limit, Key=key), "get_object")
    except MissingError:
        return None
    return _found(key, got.answer, len(got.data), got.data)


async def first_below(session: Session, prefix: str, count: int) -> list[Listed]:
    """The first *count* objects whose keys begin with *prefix*."""
    answer = await session.retried("list_objects_v2", Prefix=prefix, MaxKeys=count)
    return [_listed(item) for item in listed_in(answer, "Contents")]


async def list_all(session: Session, prefix: str) -> AsyncIterator[Listed]:
    """All objects whose keys begin with *prefix*, in the order of their keys."""
    async for page in session.pages("list_objects_v2", Prefix=prefix):
        for item in listed_in(page, "Contents"):
            yield _listed(item)


async def list_names(session: Session, prefix: str) -> tuple[list[Listed], list[str]]:
    """Objects directly below *prefix*, and the beginnings, with `/`, of keys deeper below."""
    objects: list[Listed] = []
    deeper: list[str] = []
    async for page in session.pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
        objects += [_listed(item) for item in listed_in(page, "Contents")]
        deeper += [str(item["Prefix"]) for item in listed_in(page, "CommonPrefixes")]
    return objects, deeper


def _listed(item: Mapping[str, Any]) -> Listed:
    return Listed(
        key=str(item["Key"]),
        size=int(item.get("Size") or 0),
        etag=bare(item.get("ETag")),
        stored_ns=time_ns(item),
    )


# Putting


async def put_small(
    session: Session,
    key: str,
    body: bytes,
    attributes: Attributes,
    *,
    replaces: str | None = None,
    is_new: bool = False,
) -> bool:
    """Put a small object; False if it isn't as the condition says, and not as it was to be.

    A condition is looked at again where the answer was lost: our own bytes there are a success.

    Args:
        session: of the store.
        key: of the object.
        body: its bytes.
        attributes: as metadata.
        replaces: ETag of the object that may be replaced.
        is_new: only if nothing is there.
    """
    condition: dict[str, Any] = {}
    if is_new:
        condition = {"IfNoneMatch": "*"}
    elif replaces is not None:
        condition = {"IfMatch": f'"{replaces}"'}
    put = partial(
        session.retried,
        "put_object",
        Key=key,
        Body=body,
        Metadata=attributes.metadata(),
        ChecksumCRC64NVME=encode(crc64(body)),
    )
    is_ours = partial(_is_there, session, key, body, attributes)
    if not condition:
        await put()
        return True
    try:
        # Where nobody else writes, the service needn't know conditions.
        if not session.options.single_writer:
            return await _put_if(partial(put, **condition), is_ours)
    except DeniedError:
        raise
    except UnusableError:
        # Some services know `If-None-Match` and not `If-Match`.
        if is_new:
            raise
    if not await _holds(session, key, replaces=replaces):
        return await is_ours()
    await put()
    return True


async def _put_if(
    put: Callable[[], Awaitable[object]], is_ours: Callable[[], Awaitable[bool]]
) -> bool:
    """Put under a condition, again after conflicts; whatever the answer, ours there is success."""
    for tries_left in reversed(range(_CONFLICT_TRIES)):
        try:
            await put()
        except (ConditionFailedError, MissingError):
            return await is_ours()
        except ConflictError:
            if await is_ours():
                return True
            if not tries_left:
                raise
            await asyncio.sleep(_CONFLICT_WAIT_S)
        else:
            return True
    return False


async def _holds(session: Session, key: str, *, replaces: str | None) -> bool:
    """Whether what is there is what may be replaced; None: nothing may be there."""
    there = await head(session, key)
    return (None if there is None else there.etag) == replaces


async def _is_there(session: Session, key: str, body: bytes, attributes: Attributes) -> bool:
    """Whether the object is just what was to be put: then it was put."""
    there = await head(session, key)
    if there is None or there.size != len(body):
        return False
    found = await get_small(session, key, len(body))
    return found is not None and found.body == body and found.attributes == attributes


# Removing


async def delete(session: Session, key: str) -> None:
    """Remove the object; nothing there is success."""
    await session.retried("delete_object", Key=key)


async def delete_if_same(session: Session, key: str, etag: str) -> bool:
    """Remove the object if it has this ETag; False if it has another. Nothing there is success."""
    # Looked at first, as many services ignore a condition on a delete.
    there = await head(session, key)
    if there is None or there.etag != etag:
        return there is None
    try:
        await session.retried("delete_object", Key=key, IfMatch=f'"{etag}"')
    except MissingError:
        return True
    except ConditionFailedError:
        return await head(session, key) is None
    except DeniedError:
        raise
    except UnusableError:
        # A service that refuses conditions on a delete.
        await delete(session, key)
    return True


async def delete_each(
    session: Session, keys: Collection[str], limit: int
) -> tuple[set[str], dict[str, str]]:
    """Remove objects; nothing there is success.

    Returns:
        The keys of which the store keeps an older version, so that no byte was won, and the reason
        for each key that could not be removed.

    Raises:
        TransientStoreError: some could not be removed for now; call again.
        CkptError: the request as a whole failed.
    """
    kept: set[str] = set()
    refused: dict[str, str] = {}
    named = [key for key in keys if not _NOT_XML.search(key)]
    batches = [named[at : at + _BATCH] for at in range(0, len(named), _BATCH)]

    async def remove(batch: list[str]) -> None:
        listed = {"Objects": [{"Key": key} for key in batch], "Quiet": False}
        answer = await session.retried("delete_objects", Delete=listed)
        kept.update(
            str(item["Key"]) for item in listed_in(answer, "Deleted") if item.get("DeleteMarker")
        )
        for item in listed_in(answer, "Errors"):
            key, code = str(item.get("Key")), str(item.get("Code"))
            reason = f"{code}: {item.get('Message') or 'no reason given'}"
            if code in _FOR_NOW:
                msg = f"cannot remove {told(session, key)!r}: {reason}"
                raise TransientStoreError(msg, subject=told(session, key))
            if code not in _GONE:
                refused[key] = reason

    async def remove_one(key: str) -> None:
        try:
            await delete(session, key)
        except TransientStoreError:
            raise
        except CkptError as exc:
            refused[key] = str(exc)

    await each(limit, batches, remove)
    await each(limit, [key for key in keys if _NOT_XML.search(key)], remove_one)
    return kept, refused
