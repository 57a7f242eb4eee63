"""The null S3 server of the benchmarks behaves as S3 does, as far as clients can tell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench.s3_servers import (
    BUCKET,
    CREDENTIALS,
    NullServer,
    check_stored,
    content_file,
    null_server,
)

from ckptgate_adapters.s3_store.checksums import crc64, encode

LARGE = 6 << 20


@pytest.fixture(scope="module")
def content_path(tmp_path_factory) -> Path:
    return content_file(tmp_path_factory.mktemp("null") / "content", 2 * LARGE)


@pytest.fixture(scope="module")
def content(content_path: Path) -> bytes:
    """What all large objects hold."""
    return content_path.read_bytes()


@pytest.fixture(scope="module")
def server(require, content_path: Path) -> Iterator[NullServer]:
    require(find_spec("boto3"), "boto3 is not installed")
    with null_server(content_path) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: NullServer) -> Iterator[Any]:
    import boto3
    from botocore.config import Config

    made = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )
    yield made
    made.close()


def failure(client: Any, call: Any, **words: Any) -> str:
    with pytest.raises(client.exceptions.ClientError) as caught:
        call(**words)
    return caught.value.response["Error"]["Code"]


def test_small_objects_are_kept_with_what_was_said_of_them(client):
    place = {"Bucket": BUCKET, "Key": "r/a b+é"}
    made = client.put_object(
        **place, Body=b"data", Metadata={"x": "y"}, IfNoneMatch="*", ChecksumAlgorithm="CRC64NVME"
    )
    assert made["ETag"].strip('"') == hashlib.md5(b"data").hexdigest()
    assert failure(client, client.put_object, **place, Body=b"2", IfNoneMatch="*") == (
        "PreconditionFailed"
    )
    found = client.get_object(**place, ChecksumMode="ENABLED")
    assert (found["Body"].read(), found["Metadata"]) == (b"data", {"x": "y"})
    assert found["ChecksumCRC64NVME"] == made["ChecksumCRC64NVME"]
    client.copy_object(Bucket=BUCKET, Key="copy", CopySource=place)
    assert client.get_object(Bucket=BUCKET, Key="copy")["Body"].read() == b"data"
    client.delete_object(**place)
    assert failure(client, client.get_object, **place) == "NoSuchKey"


def test_small_bodies_with_another_checksum_are_refused(client):
    place = {"Bucket": BUCKET, "Key": "wrong", "Body": b"data"}
    words = {**place, "ChecksumCRC64NVME": encode(crc64(b"other"))}
    assert failure(client, client.put_object, **words) == "BadDigest"
    client.put_object(**place, ChecksumCRC64NVME=encode(crc64(b"data")))


def test_large_objects_hold_the_content(client, content):
    client.put_object(Bucket=BUCKET, Key="large", Body=content[:LARGE])
    assert client.head_object(Bucket=BUCKET, Key="large")["ContentLength"] == LARGE
    assert client.get_object(Bucket=BUCKET, Key="large")["Body"].read() == content[:LARGE]
    part = client.get_object(Bucket=BUCKET, Key="large", Range="bytes=100-199")
    assert (part["Body"].read(), part["ContentRange"]) == (
        content[100:200],
        f"bytes 100-199/{LARGE}",
    )
    beyond = {"Bucket": BUCKET, "Key": "large", "Range": f"bytes={LARGE}-"}
    assert failure(client, client.get_object, **beyond) == "InvalidRange"


def test_uploads_are_put_together_from_their_parts(client, content):
    place = {"Bucket": BUCKET, "Key": "parts"}
    begun = client.create_multipart_upload(
        **place, Metadata={"m": "1"}, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
    )
    assert (begun["ChecksumAlgorithm"], begun["ChecksumType"]) == ("CRC64NVME", "FULL_OBJECT")
    upload = begun["UploadId"]
    etags = [
        client.upload_part(**place, UploadId=upload, PartNumber=n, Body=part)["ETag"]
        for n, part in enumerate((content[:LARGE], content[LARGE:]), 1)
    ]
    assert [p["Size"] for p in client.list_parts(**place, UploadId=upload)["Parts"]] == [LARGE] * 2
    listed = client.list_multipart_uploads(Bucket=BUCKET, Prefix="part")["Uploads"]
    assert [each["UploadId"] for each in listed] == [upload]
    parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, 1)]
    done = {"Parts": [*parts, {"PartNumber": 3, "ETag": "x"}]}
    words = {**place, "UploadId": upload}
    assert failure(client, client.complete_multipart_upload, **words, MultipartUpload=done) == (
        "InvalidPart"
    )
    crc = encode(crc64(content))
    whole = client.complete_multipart_upload(
        **words, MultipartUpload={"Parts": parts}, MpuObjectSize=2 * LARGE,
        ChecksumCRC64NVME=crc, ChecksumType="FULL_OBJECT",
    )  # fmt: skip
    digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
    assert whole["ETag"].strip('"') == f"{hashlib.md5(digests).hexdigest()}-2"
    assert whole["ChecksumCRC64NVME"] == crc
    head = client.head_object(**place, ChecksumMode="ENABLED")
    assert (head["ContentLength"], head["Metadata"]) == (2 * LARGE, {"m": "1"})
    assert head["ChecksumCRC64NVME"] == crc
    assert client.get_object(**place)["Body"].read() == content
    assert failure(client, client.abort_multipart_upload, **words) == "NoSuchUpload"


def test_listings_have_pages_and_prefixes(client):
    for number in range(7):
        client.put_object(Bucket=BUCKET, Key=f"many/{number}/x", Body=b"")
    words = {"Bucket": BUCKET, "Prefix": "many/", "MaxKeys": 3}
    pages = client.get_paginator("list_objects_v2").paginate(**words)
    assert [len(page["Contents"]) for page in pages] == [3, 3, 1]
    pages = client.get_paginator("list_objects_v2").paginate(**words, Delimiter="/")
    names = [each["Prefix"] for page in pages for each in page["CommonPrefixes"]]
    assert names == [f"many/{number}/" for number in range(7)]
    rows = [{"Key": f"many/{number}/x"} for number in range(5)]
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": rows})
    assert client.list_objects_v2(Bucket=BUCKET, Prefix="many/")["KeyCount"] == 2


def test_requests_are_counted_by_kind(client, server):
    before = server.counts()
    client.put_object(Bucket=BUCKET, Key="counted", Body=b"")
    client.head_object(Bucket=BUCKET, Key="counted")
    after = server.counts()
    changed = {kind: n - before.get(kind, 0) for kind, n in after.items() if n != before.get(kind)}
    assert changed == {"PutObject": 1, "HeadObject": 1}


def test_what_a_client_did_not_store_is_noticed(client, server):
    client.put_object(Bucket=BUCKET, Key="short", Body=b"12")
    check_stored(server, ["short"], 2)
    with pytest.raises(RuntimeError, match="short has 2 bytes"):
        check_stored(server, ["short"], 3)
    with pytest.raises(RuntimeError, match="nothing has -1 bytes"):
        check_stored(server, ["nothing"], 0)
