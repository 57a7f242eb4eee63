"""A bucket in memory behind a real `Session`: for faults at every request, where a server is slow.

It answers as S3 does what the store's tree parts ask. Whether S3 is like that, the contract's tests
on real servers say.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ckptgate.errors import IntegrityError, MissingError, TransientStoreError
from ckptgate_adapters.s3_store.checksums import crc64, encode
from ckptgate_adapters.s3_store.failures import (
    ConditionFailedError,
    DeniedError,
    NoSuchUploadError,
    OutOfRangeError,
)
from ckptgate_adapters.s3_store.location import S3Location, S3Options
from ckptgate_adapters.s3_store.retry import RetryPolicy
from ckptgate_adapters.s3_store.session import Session

__all__ = ["Bucket", "Faults", "PretendSession"]

CHANGES = frozenset({
    "put_object", "copy_object", "delete_object", "delete_objects", "create_multipart_upload",
    "upload_part", "upload_part_copy", "complete_multipart_upload", "abort_multipart_upload",
})  # fmt: skip


@dataclass
class Object:
    data: bytes
    metadata: dict[str, str]
    at: datetime
    etag: str

    def answer(self, age_s: float) -> dict[str, Any]:
        date = email.utils.format_datetime(self.at + timedelta(seconds=age_s))
        return {
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
            "ETag": f'"{self.etag}"',
            "LastModified": self.at,
            "ContentLength": len(self.data),
            "Metadata": dict(self.metadata),
            "ChecksumCRC64NVME": encode(crc64(self.data)),
            "ChecksumType": "FULL_OBJECT",
        }


@dataclass
class Bucket:
    """What the service has."""

    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    page: int = 1000
    locked: set[str] = field(default_factory=set)
    """Keys whose removal is refused."""
    age_s: float = 3600.0
    """How long ago everything was stored, as the answers say."""
    ticks: Any = field(default_factory=lambda: itertools.count(1_700_000_000))
    requests: list[str] = field(default_factory=list)

    def keys(self) -> list[str]:
        return sorted(self.objects)

    def tree(self) -> dict[str, bytes]:
        return {key: found.data for key, found in sorted(self.objects.items())}

    def put(self, key: str, data: bytes, **metadata: str) -> None:
        self._store(key, data, metadata)

    def do(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self.requests.append(operation)
        words = {name: value for name, value in params.items() if name != "Bucket"}
        return getattr(self, f"_{operation}")(**words)

    # What is asked

    def _find(self, key: str) -> Object:
        if key not in self.objects:
            raise MissingError(f"{key!r} is not there", subject=key)
        return self.objects[key]

    def _check(self, key: str, words: Mapping[str, Any]) -> None:
        there = self.objects.get(key)
        if words.get("IfNoneMatch") == "*" and there is not None:
            raise ConditionFailedError("412", subject=key)
        if "IfMatch" in words and (there is None or f'"{there.etag}"' != words["IfMatch"]):
            raise ConditionFailedError("412", subject=key)

    def _store(self, key: str, data: bytes, metadata: Mapping[str, str], tail: str = "") -> Object:
        at = datetime.fromtimestamp(next(self.ticks), UTC)
        etag = hashlib.md5(data).hexdigest() + tail
        self.objects[key] = Object(bytes(data), dict(metadata), at, etag)
        return self.objects[key]

    def _head_object(self, Key: str, **_: Any) -> dict[str, Any]:
        return self._find(Key).answer(self.age_s)

    def _get_object(self, Key: str, **words: Any) -> dict[str, Any]:
        found = self._find(Key)
        if "IfMatch" in words:
            self._check(Key, words)
        data = found.data
        if "Range" in words:
            first, last = words["Range"].removeprefix("bytes=").split("-")
            if int(first) >= len(data):
                raise OutOfRangeError("416", subject=Key)
            data = data[int(first) : int(last) + 1]
        return found.answer(self.age_s) | {"ContentLength": len(data), "data": data}

    def _put_object(self, Key: str, Body: Any, Metadata: Any = None, **words: Any) -> Any:
        self._check(Key, words)
        data = Body if isinstance(Body, bytes) else Body.read()
        return self._store(Key, data, Metadata or {}).answer(self.age_s)

    def _delete_object(self, Key: str, **words: Any) -> dict[str, Any]:
        if "IfMatch" in words and Key in self.objects:
            self._check(Key, words)
        if Key in self.locked:
            raise DeniedError("AccessDenied: locked", subject=Key)
        self.objects.pop(Key, None)
        return {}

    def _delete_objects(self, Delete: Any) -> dict[str, Any]:
        errors = []
        for item in Delete["Objects"]:
            key = item["Key"]
            if key in self.locked:
                errors.append({"Key": key, "Code": "AccessDenied", "Message": "locked"})
            else:
                self.objects.pop(key, None)
        return {"Errors": errors}

    def _list_objects_v2(self, Prefix: str, **words: Any) -> dict[str, Any]:
        after = words.get("ContinuationToken", words.get("StartAfter", ""))
        most = min(words.get("MaxKeys", self.page), self.page)
        contents: list[dict[str, Any]] = []
        common: list[str] = []
        last = ""
        for key in self.keys():
            name = key
            if words.get("Delimiter") and "/" in key[len(Prefix) :]:
                name = Prefix + key[len(Prefix) :].partition("/")[0] + "/"
            if not key.startswith(Prefix) or name <= after or name in common:
                continue
            if len(contents) + len(common) >= most:
                listed = [{"Prefix": one} for one in common]
                token = {"IsTruncated": True, "NextContinuationToken": last}
                return {"Contents": contents, "CommonPrefixes": listed, **token}
            last = name
            if name is key:
                found = self.objects[key]
                contents.append({
                    "Key": key, "Size": len(found.data), "ETag": f'"{found.etag}"',
                    "LastModified": found.at,
                })  # fmt: skip
            else:
                common.append(name)
        return {"Contents": contents, "CommonPrefixes": [{"Prefix": one} for one in common]}

    def _copy_object(self, Key: str, CopySource: Any, **words: Any) -> dict[str, Any]:
        source = self._source(CopySource, words)
        is_new = words.get("MetadataDirective") == "REPLACE"
        tail = source.etag[32:]
        made = self._store(Key, source.data, words["Metadata"] if is_new else source.metadata, tail)
        return {"CopyObjectResult": {"ETag": f'"{made.etag}"'}}

    def _source(self, place: Any, words: Mapping[str, Any]) -> Object:
        source = self._find(place["Key"])
        if words.get("CopySourceIfMatch", f'"{source.etag}"') != f'"{source.etag}"':
            raise ConditionFailedError("412", subject=place["Key"])
        return source

    # Multipart

    def _create_multipart_upload(self, Key: str, Metadata: Any, **_: Any) -> dict[str, Any]:
        upload = f"u{next(self.ticks)}"
        self.uploads[upload] = (Key, dict(Metadata), {})
        return {"UploadId": upload, "ChecksumType": "FULL_OBJECT"}

    def _parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self.uploads:
            raise NoSuchUploadError("no such upload", subject=upload)
        return self.uploads[upload][2]

    def _upload_part_copy(self, UploadId: str, PartNumber: int, **words: Any) -> dict[str, Any]:
        source = self._source(words["CopySource"], words)
        first, last = words["CopySourceRange"].removeprefix("bytes=").split("-")
        data = source.data[int(first) : int(last) + 1]
        self._parts(UploadId)[PartNumber] = data
        etag = hashlib.md5(data).hexdigest()
        return {"CopyPartResult": {"ETag": etag, "ChecksumCRC64NVME": encode(crc64(data))}}

    def _complete_multipart_upload(self, UploadId: str, MultipartUpload: Any, **_: Any) -> Any:
        parts = self._parts(UploadId)
        key, metadata, _parts = self.uploads.pop(UploadId)
        numbers = [part["PartNumber"] for part in MultipartUpload["Parts"]]
        self._store(key, b"".join(parts[n] for n in numbers), metadata, f"-{len(numbers)}")
        return {}

    def _abort_multipart_upload(self, UploadId: str, **_: Any) -> dict[str, Any]:
        self._parts(UploadId)
        del self.uploads[UploadId]
        return {}

    def _list_multipart_uploads(self, Prefix: str, **_: Any) -> dict[str, Any]:
        at = datetime.fromtimestamp(1_700_000_000, UTC)
        return {
            "Uploads": [
                {"Key": key, "UploadId": upload, "Initiated": at}
                for upload, (key, _, _) in sorted(self.uploads.items())
                if key.startswith(Prefix)
            ]
        }

    def _list_parts(self, UploadId: str, **_: Any) -> dict[str, Any]:
        parts = self._parts(UploadId)
        return {"Parts": [{"PartNumber": n, "Size": len(parts[n])} for n in sorted(parts)]}


@dataclass
class Faults:
    """The *at*-th request, from 1, gets no answer: `before` it arrives, or `after` it was done."""

    at: int = 0
    when: str = "before"
    is_lasting: bool = False
    count: int = 0
    on_request: Callable[[str], None] = lambda _operation: None

    @property
    def is_spent(self) -> bool:
        return 0 < self.at <= self.count

    def hits(self) -> bool:
        self.count += 1
        return self.count == self.at or (self.is_lasting and 0 < self.at <= self.count)


class PretendSession(Session):
    """A session whose requests go to a `Bucket`; *tries* says how often one is made."""

    def __init__(self, bucket: Bucket, faults: Faults | None = None, *, tries: int = 1) -> None:
        options = S3Options(max_parallel=1)
        policy = RetryPolicy(tries_max=tries, first_s=0.0001, max_s=0.0001)
        super().__init__(S3Location(bucket="pretended", prefix="pre"), options, policy=policy)
        self.bucket = bucket
        self.faults = faults or Faults()

    def run(self, coro: Any) -> Any:
        """On a loop of its own: there is nothing to wait for."""
        return asyncio.run(coro)

    async def call(self, operation: str, **params: Any) -> Any:
        is_hit = self.faults.hits()
        self.faults.on_request(operation)
        if is_hit and self.faults.when == "before":
            raise TransientStoreError(f"no answer to {operation}", subject=operation)
        answer = self.bucket.do(operation, params)
        if is_hit:
            raise TransientStoreError(f"no answer to {operation}", subject=operation)
        return answer

    async def stream(self, take: Callable[[bytes], object], *, limit: int, **params: Any) -> Any:
        answer = dict(await self.call("get_object", **params))
        data = answer.pop("data")
        if len(data) > limit:
            raise IntegrityError(f"larger than {limit} bytes", subject=params["Key"])
        take(data)
        return answer
