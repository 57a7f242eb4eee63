"""Copies that the store makes itself: of any size, of the version that was looked at, proved.

A copy is proved by its size and by the whole object's checksum, where the store tells that of both;
else, where the caller wants it proved, by reading it back and comparing the BLAKE3. Repeating a
copy is harmless: the same bytes are put under the same key. Coroutines run on the session's loop.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any, Final

import blake3

from ckptgate.errors import CkptError, IntegrityError, MissingError, TransientStoreError
from ckptgate_adapters.s3_store.attributes import Attributes
from ckptgate_adapters.s3_store.failures import (
    ConditionFailedError,
    NoSuchUploadError,
)
from ckptgate_adapters.s3_store.objects import Found, Listed, bare, each, head, inner, told
from ckptgate_adapters.s3_store.parts import OBJECT_BYTES_MAX, Part, plan_parts
from ckptgate_adapters.s3_store.session import Session

__all__ = ["Source", "copy_object", "digest_stored", "is_same_etag", "prove_copy"]

_MIB: Final = 1024 * 1024
SINGLE_BYTES_MAX: Final = 256 * _MIB
"""Up to this size one request copies all: a store answers only when it is done, so that a longer
copy could outlast the patience for an answer (S3's own limit is 5 GiB)."""
_MD5: Final = re.compile("[0-9a-f]{32}")
"""An ETag that is a digest, where nothing is encrypted; else it differs between copies."""
_SEVERAL: Final = 8
"""Parts of one copy in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is copied: an object of a bucket, as it was looked at."""

    bucket: str
    key: str
    size: int
    etag: str

    @classmethod
    def of(cls, session: Session, found: Found | Listed) -> Source:
        """An object of the session's own bucket."""
        bucket = session.location.bucket
        return cls(bucket=bucket, key=found.key, size=found.size, etag=found.etag)


async def copy_object(
    session: Session, source: Source, key: str, attributes: Attributes | None = None
) -> None:
    """Copy to *key* in the session's bucket; replaces what is there.

    Args:
        session: of the store that gets it.
        source: of which object; the same credentials must be able to read it.
        key: of the copy.
        attributes: of the copy; None keeps those of the source.

    Raises:
        MissingError: the source isn't there.
        TransientStoreError: the source was changed since it was looked at, or nothing is known.
    """
    try:
        if source.size > SINGLE_BYTES_MAX:
            await _copy_parts(session, source, key, attributes)
            return
        given: dict[str, Any] = {"MetadataDirective": "COPY"}
        if attributes is not None:
            given = {"MetadataDirective": "REPLACE", "Metadata": attributes.metadata()}
        await session.retried("copy_object", Key=key, **given, **_from(source))
    except ConditionFailedError as exc:
        subject = told(session, source.key)
        msg = f"{subject!r} was changed while it was copied"
        raise TransientStoreError(msg, subject=subject) from exc


def _from(source: Source) -> dict[str, Any]:
    return {
        "CopySource": {"Bucket": source.bucket, "Key": source.key},
        "CopySourceIfMatch": f'"{source.etag}"',
    }


async def _copy_parts(
    session: Session, source: Source, key: str, attributes: Attributes | None
) -> None:
    of = await head(session, source.key, bucket=source.bucket)
    if of is None:
        subject = told(session, source.key)
        raise MissingError(f"{subject!r} is not there", subject=subject)
    metadata = dict(of.metadata) if attributes is None else attributes.metadata()
    algorithm, _ = of.checksum
    checked: dict[str, Any] = {}
    if algorithm.startswith("CRC"):
        checked = {"ChecksumAlgorithm": algorithm, "ChecksumType": "FULL_OBJECT"}
    made = await session.retried("create_multipart_upload", Key=key, Metadata=metadata, **checked)
    upload = str(made["UploadId"])
    try:
        parts = await _send_parts(session, source, key, upload, algorithm if checked else "")
        listed = {"Parts": parts}
        await session.retried(
            "complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload=listed
        )
    except NoSuchUploadError:
        # Completed, and the answer was lost, or aborted by others: what is there tells.
        there = await head(session, key)
        if there is None or there.size != source.size or dict(there.metadata) != metadata:
            raise
    except BaseException:
        # A cancellation, too, must not leave parts that are paid for.
        with contextlib.suppress(CkptError):
            await session.retried("abort_multipart_upload", Key=key, UploadId=upload)
        raise


async def _send_parts(
    session: Session, source: Source, key: str, upload: str, algorithm: str
) -> list[dict[str, Any]]:
    async def copy(part: Part) -> dict[str, Any]:
        answer = await session.retried(
            "upload_part_copy",
            Key=key,
            UploadId=upload,
            PartNumber=part.number,
            CopySourceRange=f"bytes={part.offset}-{part.offset + part.size - 1}",
            **_from(source),
        )
        told = inner(answer, "CopyPartResult")
        done = {"PartNumber": part.number, "ETag": f'"{bare(told.get("ETag"))}"'}
        name = f"Checksum{algorithm}"
        if algorithm and told.get(name):
            done[name] = told[name]
        return done

    return await each(_SEVERAL, plan_parts(source.size, SINGLE_BYTES_MAX), copy)


async def prove_copy(
    session: Session, source: Found, key: str, *, digest: str = "", is_strict: bool = False
) -> Found:
    """Compare the copy under *key* with what it was made of.

    Args:
        session: of the store that has the copy.
        source: what was copied.
        key: of the copy.
        digest: BLAKE3 of the bytes, "" where it isn't known: the source is in the session's bucket.
        is_strict: without checksums of both, compare digests of what is read.

    Raises:
        MissingError: there is no copy.
        IntegrityError: it differs.
    """
    made = await head(session, key)
    subject, of = told(session, key), told(session, source.key)
    if made is None:
        msg = f"the copy {subject!r} is not there"
        raise MissingError(msg, subject=subject)
    if made.size != source.size:
        msg = f"the copy {subject!r} has {made.size} bytes, {of!r} has {source.size}"
        raise IntegrityError(msg, subject=subject)
    name, value = made.checksum
    if name and name == source.checksum[0]:
        if value != source.checksum[1]:
            msg = f"the copy {subject!r} has another {name} than {of!r}"
            raise IntegrityError(msg, subject=subject)
    elif is_strict and not is_same_etag(made.etag, source.etag):
        wanted = digest or await digest_stored(session, source.key)
        seen = await digest_stored(session, key)
        if seen != wanted:
            msg = f"the copy {subject!r} has digest {seen}, not {wanted}"
            raise IntegrityError(msg, subject=subject)
    return made


def is_same_etag(one: str, other: str) -> bool:
    """Whether these say that the bytes are the same; of other ETags nothing is known."""
    return one == other and _MD5.fullmatch(one) is not None


async def digest_stored(session: Session, key: str) -> str:
    """BLAKE3 of the object's bytes, read once from beginning to end.

    Raises:
        MissingError: there is none.
        TransientStoreError: it could not be read to its end.
    """

    async def read() -> str:
        hasher = blake3.blake3()
        await session.stream(hasher.update, limit=OBJECT_BYTES_MAX, Key=key)
        return hasher.hexdigest()

    return await session.policy.run(read, "get_object")
