"""What the null S3 server remembers: small bodies, and of large ones what was said of them."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TypeAlias
from urllib.parse import unquote
from xml.sax.saxutils import escape

from ckptgate_adapters.s3_store.checksums import crc64, encode

__all__ = ["Answer", "Ask", "NullStore"]

CHECKSUM = "x-amz-checksum-"
META = "x-amz-meta-"
PAGE = 1000


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request. `body` is empty where it was thrown away; `size` counts the wire's bytes."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size: int = 0
    body: bytes = b""


@dataclass(slots=True, kw_only=True)
class Answer:
    """A reply; without a body, *length* bytes of the content from *offset*."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    offset: int = 0
    length: int = 0


@dataclass(slots=True, kw_only=True)
class _Object:
    size: int
    etag: str
    body: bytes | None
    """None: it was thrown away."""
    headers: dict[str, str]
    at: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class _Upload:
    key: str
    headers: dict[str, str]
    parts: dict[int, _Object] = field(default_factory=dict)


_Act: TypeAlias = Callable[[Ask], Answer]


class NullStore:
    """All buckets; one lock, so that everything is atomic."""

    def __init__(self, content_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self._content_bytes = content_bytes
        self._objects: dict[tuple[str, str], _Object] = {}
        self._uploads: dict[str, _Upload] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def answer(self, ask: Ask) -> Answer:
        """Do what is asked."""
        with self._lock:
            if not ask.bucket:
                return _document(json.dumps(self.counts), kind="application/json")
            name, act = self._action(ask)
            self.counts[name] += 1
            return act(ask)

    def _action(self, ask: Ask) -> tuple[str, _Act]:
        query = ask.query
        if not ask.key:
            return self._bucket_action(ask)
        match ask.method:
            case "PUT" if "uploadId" in query:
                return "UploadPart", self._put_part
            case "PUT":
                is_copy = "x-amz-copy-source" in ask.headers
                return ("CopyObject", self._copy) if is_copy else ("PutObject", self._put)
            case "POST" if "uploads" in query:
                return "CreateMultipartUpload", self._create_upload
            case "POST":
                return "CompleteMultipartUpload", self._complete
            case "DELETE" if "uploadId" in query:
                return "AbortMultipartUpload", self._abort
            case "DELETE":
                return "DeleteObject", self._delete
            case "HEAD":
                return "HeadObject", self._get
            case _ if "uploadId" in query:
                return "ListParts", self._list_parts
            case _:
                return "GetObject", self._get

    def _bucket_action(self, ask: Ask) -> tuple[str, _Act]:
        if ask.method == "POST":
            return "DeleteObjects", self._delete_many
        if ask.method == "GET" and "uploads" in ask.query:
            return "ListMultipartUploads", self._list_uploads
        if ask.method == "GET" and ("list-type" in ask.query or "prefix" in ask.query):
            return "ListObjects", self._list
        return "of the bucket", self._bucket

    def _bucket(self, ask: Ask) -> Answer:
        if ask.method in ("HEAD", "PUT"):
            return Answer()
        return _document("<Configuration/>")

    def _put(self, ask: Ask) -> Answer:
        found = self._objects.get((ask.bucket, ask.key))
        if found is not None and ask.headers.get("if-none-match") == "*":
            return _error(412, "PreconditionFailed")
        if "if-match" in ask.headers and (found is None or found.etag != ask.headers["if-match"]):
            return _error(412 if found else 404, "PreconditionFailed" if found else "NoSuchKey")
        stored = _stored(ask)
        if not _is_whole(stored):
            return _error(400, "BadDigest")
        if stored.body is None and "content-md5" not in ask.headers:
            # Not an MD5 of what nobody has looked at: no client may take it for one.
            stored.etag = f'{stored.etag[:-1]}-1"'
        self._objects[ask.bucket, ask.key] = stored
        return Answer(headers={"ETag": stored.etag, **_checksums(stored.headers)})

    def _copy(self, ask: Ask) -> Answer:
        source = unquote(ask.headers["x-amz-copy-source"].partition("?")[0])
        bucket, _, key = source.lstrip("/").partition("/")
        found = self._objects.get((bucket, key))
        if found is None:
            return _error(404, "NoSuchKey")
        self._objects[ask.bucket, ask.key] = found
        return _document(f"<CopyObjectResult><ETag>{found.etag}</ETag></CopyObjectResult>")

    def _get(self, ask: Ask) -> Answer:
        found = self._objects.get((ask.bucket, ask.key))
        if found is None:
            return _error(404, "NoSuchKey")
        if ask.headers.get("if-match", found.etag) != found.etag:
            return _error(412, "PreconditionFailed")
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.at, usegmt=True),
            "Accept-Ranges": "bytes",
            **{name: value for name, value in found.headers.items() if name.startswith(META)},
        }
        if "x-amz-checksum-mode" in ask.headers and "range" not in ask.headers:
            headers |= _checksums(found.headers)
        first, last = _range(ask.headers.get("range", ""), found.size)
        status, length = 200, last - first + 1
        if "range" in ask.headers:
            if first >= found.size:
                return _error(416, "InvalidRange")
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{found.size}"
        if found.body is not None:
            body = found.body[first : last + 1]
            return Answer(status=status, headers=headers, body=body, length=length)
        if last >= self._content_bytes:
            return _error(500, "NotEnoughContent")
        return Answer(status=status, headers=headers, offset=first, length=length)

    def _delete(self, ask: Ask) -> Answer:
        self._objects.pop((ask.bucket, ask.key), None)
        return Answer(status=204)

    def _delete_many(self, ask: Ask) -> Answer:
        for key in re.findall(r"<Key>([^<]*)</Key>", ask.body.decode()):
            self._objects.pop((ask.bucket, key), None)
        return _document("<DeleteResult/>")

    def _create_upload(self, ask: Ask) -> Answer:
        upload = f"u{next(self._ids)}"
        kept = {n: v for n, v in ask.headers.items() if n.startswith((META, CHECKSUM))}
        self._uploads[upload] = _Upload(key=ask.key, headers=kept)
        answer = _document(
            f"<InitiateMultipartUploadResult><Bucket>{ask.bucket}</Bucket>"
            f"<Key>{escape(ask.key)}</Key><UploadId>{upload}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )
        answer.headers |= {n: v for n, v in kept.items() if n.startswith(CHECKSUM)}
        return answer

    def _put_part(self, ask: Ask) -> Answer:
        upload = self._uploads.get(ask.query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        stored = _stored(ask)
        if not _is_whole(stored):
            return _error(400, "BadDigest")
        upload.parts[int(ask.query["partNumber"])] = stored
        return Answer(headers={"ETag": stored.etag, **_checksums(stored.headers)})

    def _complete(self, ask: Ask) -> Answer:
        upload = self._uploads.get(ask.query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        numbers = [int(n) for n in re.findall(r"<PartNumber>(\d+)</PartNumber>", ask.body.decode())]
        if not numbers or any(number not in upload.parts for number in numbers):
            return _error(400, "InvalidPart")
        parts = [upload.parts[number] for number in numbers]
        size = sum(part.size for part in parts)
        if int(ask.headers.get("x-amz-mp-object-size", size)) != size:
            return _error(400, "InvalidRequest")
        digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
        etag = f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'
        said = {n: v for n, v in ask.headers.items() if n.startswith(CHECKSUM)}
        meta = {n: v for n, v in upload.headers.items() if n.startswith(META)}
        made = _Object(size=size, etag=etag, body=None, headers=meta | said)
        if all(part.body is not None for part in parts):
            made.body = b"".join(part.body or b"" for part in parts)
        self._objects[ask.bucket, ask.key] = made
        del self._uploads[ask.query["uploadId"]]
        checksums = "".join(
            f"<{tag}>{value}</{tag}>" for tag, value in _checksum_tags(said).items()
        )
        return _document(
            f"<CompleteMultipartUploadResult><Bucket>{ask.bucket}</Bucket>"
            f"<Key>{escape(ask.key)}</Key><ETag>{escape(etag)}</ETag>{checksums}"
            "</CompleteMultipartUploadResult>"
        )

    def _abort(self, ask: Ask) -> Answer:
        gone = self._uploads.pop(ask.query["uploadId"], None)
        return Answer(status=204) if gone else _error(404, "NoSuchUpload")

    def _list_parts(self, ask: Ask) -> Answer:
        upload = self._uploads.get(ask.query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        after = int(ask.query.get("part-number-marker") or 0)
        numbers = sorted(number for number in upload.parts if number > after)
        rows = ""
        for number in numbers[:PAGE]:
            part = upload.parts[number]
            sums = "".join(
                f"<{tag}>{value}</{tag}>" for tag, value in _checksum_tags(part.headers).items()
            )
            rows += (
                f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
                f"<Size>{part.size}</Size>{sums}</Part>"
            )
        more = str(len(numbers) > PAGE).lower()
        last = numbers[:PAGE][-1] if numbers else after
        return _document(
            f"<ListPartsResult><IsTruncated>{more}</IsTruncated>"
            f"<NextPartNumberMarker>{last}</NextPartNumberMarker>{rows}</ListPartsResult>"
        )

    def _list_uploads(self, ask: Ask) -> Answer:
        prefix = ask.query.get("prefix", "")
        rows = "".join(
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{name}</UploadId></Upload>"
            for name, upload in self._uploads.items()
            if upload.key.startswith(prefix)
        )
        return _document(
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>"
            f"{rows}</ListMultipartUploadsResult>"
        )

    def _list(self, ask: Ask) -> Answer:
        prefix, delimiter = ask.query.get("prefix", ""), ask.query.get("delimiter", "")
        after = ask.query.get("continuation-token") or ask.query.get("start-after") or ""
        rows: dict[str, str] = {}
        for bucket, key in sorted(self._objects):
            if bucket != ask.bucket or not key.startswith(prefix):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + 1]
            if name > after and name not in rows:
                rows[name] = self._list_row(bucket, name, is_prefix=cut >= 0)
        most = min(int(ask.query.get("max-keys") or PAGE), PAGE)
        names = list(rows)[:most]
        more = len(rows) > most
        token = (
            f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>" if more else ""
        )
        return _document(
            f"<ListBucketResult><Name>{ask.bucket}</Name><KeyCount>{len(names)}</KeyCount><MaxKeys>{most}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{''.join(rows[name] for name in names)}</ListBucketResult>"
        )

    def _list_row(self, bucket: str, name: str, *, is_prefix: bool) -> str:
        if is_prefix:
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        found = self._objects[bucket, name]
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.at))
        return (
            f"<Contents><Key>{escape(name)}</Key><ETag>{escape(found.etag)}</ETag>"
            f"<Size>{found.size}</Size><LastModified>{at}</LastModified></Contents>"
        )


def _stored(ask: Ask) -> _Object:
    """Of a body on the wire, what it says it holds."""
    kept = {n: v for n, v in ask.headers.items() if n.startswith((META, CHECKSUM))}
    size, body = ask.size, ask.body
    if "aws-chunked" in ask.headers.get("content-encoding", ""):
        size = int(ask.headers["x-amz-decoded-content-length"])
        body, trailer = _decoded(body)
        kept |= trailer
    is_kept = len(body) == size
    if "content-md5" in ask.headers:
        digest = base64.b64decode(ask.headers["content-md5"]).hex()
    elif is_kept:
        digest = hashlib.md5(body).hexdigest()
    else:
        digest = hashlib.md5(json.dumps([size, kept]).encode()).hexdigest()
    return _Object(size=size, etag=f'"{digest}"', body=body if is_kept else None, headers=kept)


def _is_whole(stored: _Object) -> bool:
    """Whether a body that was kept has the CRC64NVME that was said, if one was."""
    said = stored.headers.get(f"{CHECKSUM}crc64nvme")
    return said is None or stored.body is None or said == encode(crc64(stored.body))


def _decoded(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Data and trailer of a body in aws-chunked encoding (nothing of one that is thrown away)."""
    data, trailer = bytearray(), {}
    while body:
        line, _, body = body.partition(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if not size:
            for each in body.decode().splitlines():
                name, _, value = each.partition(":")
                if value and name.startswith(CHECKSUM):
                    trailer[name] = value.strip()
            break
        data += body[:size]
        body = body[size + 2 :]
    return bytes(data), trailer


def _range(text: str, size: int) -> tuple[int, int]:
    """First and last byte."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", text)
    if not found:
        return 0, size - 1
    first, last = found.groups()
    if not first:
        return max(size - int(last), 0), size - 1
    return int(first), min(int(last or size - 1), size - 1)


def _checksums(headers: dict[str, str]) -> dict[str, str]:
    """As headers of a reply: values, and their type."""
    found = {n: v for n, v in headers.items() if n.startswith(CHECKSUM)}
    found.pop(f"{CHECKSUM}algorithm", None)
    if found:
        found.setdefault(f"{CHECKSUM}type", "FULL_OBJECT")
    return found


def _checksum_tags(headers: dict[str, str]) -> dict[str, str]:
    return {
        "ChecksumType" if name == f"{CHECKSUM}type"
        else f"Checksum{name.removeprefix(CHECKSUM).upper()}": value
        for name, value in _checksums(headers).items()
    }  # fmt: skip


def _document(text: str, kind: str = "application/xml") -> Answer:
    body = text.encode()
    return Answer(headers={"Content-Type": kind}, body=body, length=len(body))


def _error(status: int, code: str) -> Answer:
    answer = _document(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")
    answer.status = status
    return answer
