"""What a HEAD must say for an object to be what was sent: the proof of an upload. Pure.

The full-object checksum over all bytes, computed by us as they were read, and the size leave
nothing open: parts that are missing, doubled, in another order or of other bytes change it. The
count of parts is compared where the ETag tells it. An ETag's value is opaque (encryption, other
services), so it only ever serves to recognise what we made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptgate.errors import IntegrityError
from ckptgate_adapters.s3_store.checksums import composite, encode

__all__ = ["DIGEST_NAME", "UPLOAD_NAME", "Sent", "etag_of", "is_ours", "prove"]

DIGEST_NAME: Final = "ckptgate-blake3"
UPLOAD_NAME: Final = "ckptgate-upload"
"""Names of an object's user metadata: its digest, and which upload made it."""

_MD5: Final = re.compile('"?([0-9a-f]{32})"?')
_MULTIPART: Final = re.compile('"?[^"]*-([0-9]+)"?')


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent.

    Attributes:
        digest: BLAKE3, hex.
        size: bytes.
        crc: CRC64NVME of all.
        parts: of each part, in order; empty if it was sent in one request.
        etag: what the parts' ETags make of the whole, "" where they aren't MD5s.
        token: of the multipart upload, "".
    """

    digest: str
    size: int
    crc: int
    parts: tuple[int, ...] = ()
    etag: str = ""
    token: str = ""


def etag_of(parts: Sequence[str]) -> str:
    """The ETag of an object of parts with these ETags, "" if they aren't MD5s."""
    found = [_MD5.fullmatch(part) for part in parts]
    digests = [bytes.fromhex(match.group(1)) for match in found if match]
    if len(digests) < len(parts):
        return ""
    # What S3 defines, not a protection.
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(parts)}"


def is_ours(head: Mapping[str, Any], sent: Sent) -> bool:
    """Whether the object was made by this very multipart upload."""
    if head.get("Metadata", {}).get(UPLOAD_NAME) == sent.token:
        return True
    return bool(sent.etag) and head.get("ETag", "").strip('"') == sent.etag


def prove(key: str, head: Mapping[str, Any], sent: Sent) -> bool:
    """Whether the store's own checksum proves that it has what was sent; False if it tells none.

    Raises:
        IntegrityError: it has something else; says in what it differs.
    """
    _same(key, "bytes", head.get("ContentLength"), sent.size)
    digest = head.get("Metadata", {}).get(DIGEST_NAME)
    if digest is not None:
        _same(key, "digest", digest, sent.digest)
    count = _MULTIPART.fullmatch(head.get("ETag", ""))
    if count and sent.parts:
        _same(key, "parts", int(count.group(1)), len(sent.parts))
    found = head.get("ChecksumCRC64NVME")
    if not found:
        return False
    if "-" in found or head.get("ChecksumType") == "COMPOSITE":
        return bool(sent.parts) and found == composite(sent.parts)
    _same(key, "CRC64NVME", found, encode(sent.crc))
    return True


def _same(key: str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        msg = f"{key!r} has {found} {what} in the store, wanted {wanted}"
        if what in {"digest", "CRC64NVME"}:
            msg = f"{key!r} has the {what} {found} in the store, wanted {wanted}"
        raise IntegrityError(msg, subject=key)
