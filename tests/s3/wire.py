"""HTTP/1.1 as S3 clients and servers speak it: heads, whole bodies, and what a request asks for."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["Kind", "Reply", "Request", "error_xml", "read_body", "read_reply", "read_request"]

END = b"\r\n\r\n"
BODYLESS = (204, 304)


class Kind(enum.StrEnum):
    """What a request asks for."""

    CREATE_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    UPLOAD_PART_COPY = "UploadPartCopy"
    COMPLETE = "CompleteMultipartUpload"
    ABORT = "AbortMultipartUpload"
    LIST_PARTS = "ListParts"
    LIST_UPLOADS = "ListMultipartUploads"
    PUT = "PutObject"
    COPY = "CopyObject"
    HEAD = "HeadObject"
    GET = "GetObject"
    ATTRIBUTES = "GetObjectAttributes"
    LIST = "ListObjects"
    DELETE = "DeleteObject"
    DELETE_MANY = "DeleteObjects"
    BUCKET = "of the bucket"


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head.

    Attributes:
        head: as it came, with the empty line.
        headers: by lower-case name.
        nth: which one of its kind it is, from 1.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    head: bytes
    nth: int = 0

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def key(self) -> str:
        """The object's, "" for a request of the bucket or of the service."""
        return unquote(urlsplit(self.target).path).lstrip("/").partition("/")[2]

    @property
    def kind(self) -> Kind:
        """By method and query, as the API defines them."""
        query = self.query
        if not self.key:
            return _bucket_kind(self.method, query)
        is_copy = "x-amz-copy-source" in self.headers
        match self.method:
            case "PUT" if "uploadId" in query:
                return Kind.UPLOAD_PART_COPY if is_copy else Kind.UPLOAD_PART
            case "PUT":
                return Kind.COPY if is_copy else Kind.PUT
            case "POST":
                return Kind.CREATE_UPLOAD if "uploads" in query else Kind.COMPLETE
            case "DELETE":
                return Kind.ABORT if "uploadId" in query else Kind.DELETE
            case "HEAD":
                return Kind.HEAD
            case _ if "uploadId" in query:
                return Kind.LIST_PARTS
            case _:
                return Kind.ATTRIBUTES if "attributes" in query else Kind.GET

    def without(self, *names: str) -> Request:
        """The same without some headers (a signed one that is missing breaks the signature)."""
        lines = self.head.split(b"\r\n")
        kept = [
            line for line in lines if line.partition(b":")[0].strip().lower().decode() not in names
        ]
        headers = {name: value for name, value in self.headers.items() if name not in names}
        return replace(self, head=b"\r\n".join(kept), headers=headers)

    def with_length(self, length: int) -> Request:
        """The same for a body of *length* bytes."""
        if "content-length" not in self.headers:
            return self
        head = self.without("content-length").head.removesuffix(b"\r\n")
        head += b"content-length: %d\r\n\r\n" % length
        return replace(self, head=head, headers={**self.headers, "content-length": str(length)})


def _bucket_kind(method: str, query: Mapping[str, str]) -> Kind:
    if method == "POST" and "delete" in query:
        return Kind.DELETE_MANY
    if method == "GET" and "uploads" in query:
        return Kind.LIST_UPLOADS
    is_list = "list-type" in query or "prefix" in query
    return Kind.LIST if method == "GET" and is_list else Kind.BUCKET


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply; its body is never chunked."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    is_head: bool = False
    """To a HEAD: it has a content-length, and no body."""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def with_headers(self, **changes: str | None) -> Reply:
        """Headers replaced, added, or (None) removed; `_` in a name stands for `-`."""
        given = {name.replace("_", "-").lower(): value for name, value in changes.items()}
        kept = [(key, value) for key, value in self.headers if key.lower() not in given]
        kept += [(name, value) for name, value in given.items() if value is not None]
        return replace(self, headers=tuple(kept))

    def with_body(self, body: bytes) -> Reply:
        return replace(self.with_headers(content_length=str(len(body))), body=body)

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} X", *(f"{k}: {v}" for k, v in self.headers)]
        return "\r\n".join(lines).encode("latin-1") + END

    def wire(self) -> bytes:
        return self.head() + (b"" if self.is_head else self.body)

    @staticmethod
    def made(status: int, body: bytes = b"", kind: str = "application/xml", **more: str) -> Reply:
        """One of our own."""
        headers = (("content-type", kind), ("content-length", str(len(body))))
        return Reply(status, (*headers, *((k.replace("_", "-"), v) for k, v in more.items())), body)


def error_xml(code: str, message: str = "injected") -> bytes:
    """S3's error document."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>"
        "<RequestId>0</RequestId></Error>"
    ).encode()


def _headers(lines: list[bytes]) -> list[tuple[str, str]]:
    pairs = (line.decode("latin-1").partition(":") for line in lines if line)
    return [(name.strip(), value.strip()) for name, _, value in pairs]


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request's head. Raises IncompleteReadError at the end of the connection."""
    head = await reader.readuntil(END)
    first, *lines = head.split(b"\r\n")
    method, target, _ = first.decode("latin-1").split(" ", 2)
    headers = {name.lower(): value for name, value in _headers(lines)}
    return Request(method, target, headers, head)


async def read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], *, limit: int = -1
) -> bytes:
    """The body's bytes as they are on the wire (chunks stay chunks); *limit* at most of them."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader, keep_frames=True)
    length = int(headers.get("content-length", "0"))
    return await reader.readexactly(length if limit < 0 else min(length, limit))


async def read_reply(reader: asyncio.StreamReader, *, is_head: bool) -> Reply:
    """A whole reply; interim ones (100) are skipped."""
    while True:
        head = await reader.readuntil(END)
        first, *lines = head.split(b"\r\n")
        status = int(first.split(b" ", 2)[1])
        if status >= 200:
            break
    headers = _headers(lines)
    named = {name.lower(): value for name, value in headers}
    if is_head or status in BODYLESS:
        return Reply(status, tuple(headers), b"", is_head)
    if named.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader, keep_frames=False)
        plain = Reply(status, tuple(headers)).with_headers(transfer_encoding=None)
        return plain.with_body(body)
    if "content-length" not in named:
        return Reply(status, tuple(headers)).with_body(await reader.read())
    return Reply(status, tuple(headers), await reader.readexactly(int(named["content-length"])))


async def _read_chunks(reader: asyncio.StreamReader, *, keep_frames: bool) -> bytes:
    frames, data = bytearray(), bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        frames += line
        size = int(line.split(b";")[0], 16)
        if not size:
            break
        chunk = await reader.readexactly(size + 2)
        frames += chunk
        data += chunk[:-2]
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        frames += line
    frames += line
    return bytes(frames if keep_frames else data)
