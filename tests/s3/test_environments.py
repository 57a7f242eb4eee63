"""Saves on buckets that aren't the plain ones: what each does to them, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import give_credentials
from tests.s3.chaos import ALWAYS, ChaosProxy, chaos
from tests.s3.faults import Exchange, answer, flip_request
from tests.s3.matrix import options
from tests.s3.saving import Lab, Saving
from tests.s3.servers import ADMIN, Bucket, Server, moto, seaweedfs
from tests.s3.wire import Kind, Reply, error_xml

from ckptgate.errors import UnusableError
from ckptgate_adapters.s3_store import S3Store

HASH = re.compile(rb"\b[0-9a-f]{32}\b")


@pytest.fixture
def lab_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lab]]:
    """A lab on a bucket, with *rules* of the environment in its proxy from the beginning."""
    labs: list[tuple[Lab, ChaosProxy]] = []

    def make(bucket: Bucket, *, has_parts: bool = True) -> Lab:
        give_credentials(bucket.server, monkeypatch)
        proxy = ChaosProxy(bucket.server.port)
        lab = Lab.make(bucket, proxy, tmp_path, has_parts=has_parts, stall_s=30)
        labs.append((lab, proxy))
        return lab

    yield make
    for lab, proxy in labs:
        lab.close()
        proxy.close()


def commit(saving: Saving) -> None:
    """It is committed through the proxy, and nothing needs to be made up for."""
    saving.go()
    assert set(saving.cluster.state(saving.run).current) == {"step-1"}
    assert set(saving.finish()["committed"]) == {"step-1"}


def test_a_server_with_other_rules_for_checksums_of_parts(mini_bucket, lab_at):
    """I1: ministack gives all multipart objects a checksum of their parts' checksums."""
    commit(lab_at(mini_bucket).saving())


def test_a_server_that_believes_every_checksum_is_read_back(s3_programs, lab_at, caplog):
    """I1: moto would store what a flipped bit made, under the checksum of what was sent."""
    with moto() as server:
        lab = lab_at(Bucket.make(server))
        rule = lab.proxy.rule(flip_request(), Kind.UPLOAD_PART)
        saving = lab.saving()
        saving.go()
        assert rule.met
        assert "read back" in caplog.text
        assert lab.proxy.count(Kind.UPLOAD_PART) > 3, "it was sent again"
        assert set(saving.finish()["committed"]) == {"step-1"}


def test_a_server_without_checksums_is_read_back(mini_bucket, lab_at, caplog):
    """I1: nothing but the bytes tells that a bit flipped on their way."""
    lab = lab_at(mini_bucket)
    lab.proxy.rule(
        without_checksums(flip=False), times=ALWAYS, where=lambda r: r.kind is not Kind.PUT
    )
    flipped = lab.proxy.rule(
        without_checksums(flip=True), Kind.PUT, nth=1, where=lambda r: "/data/" in r.key
    )
    lab.proxy.rule(without_checksums(flip=False), Kind.PUT, times=ALWAYS)
    commit(lab.saving())
    assert flipped.met
    assert "read back" in caplog.text


def without_checksums(*, flip: bool) -> Callable[[Exchange], Any]:
    """The server never hears of a checksum, and tells none (no signature is looked at)."""

    def is_checksum(name: str) -> bool:
        return name.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "content-md5"))

    async def fault(exchange: Exchange) -> None:
        body = await exchange.body()
        request = exchange.request.without(*filter(is_checksum, exchange.request.headers))
        body = (
            re.sub(rb"<Checksum\w+>[^<]*</Checksum\w+>", b"", body)
            if request.method == "POST"
            else body
        )
        request = request.with_length(len(body))
        if flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        reply = await exchange.forward(body, request)
        kept = tuple((k, v) for k, v in reply.headers if not is_checksum(k.lower()))
        await exchange.reply(replace(reply, headers=kept))

    return fault


def test_etags_that_are_no_digests_mean_nothing(mini_bucket, lab_at):
    """I1: as of a bucket that encrypts; they look like MD5s and aren't."""
    lab = lab_at(mini_bucket)
    lab.proxy.rule(other_etags, times=ALWAYS)
    commit(lab.saving())


async def other_etags(exchange: Exchange) -> None:
    """All ETags are backwards for the client."""

    def turned(data: bytes) -> bytes:
        return HASH.sub(lambda found: found.group()[::-1], data)

    body = await exchange.body()
    request = exchange.request
    if request.method == "POST":
        body = turned(body)
    request = replace(request, head=turned_headers(request.head, turned))
    reply = await exchange.forward(body, request)
    headers = tuple(
        (k, turned(v.encode()).decode() if k.lower() == "etag" else v) for k, v in reply.headers
    )
    is_xml = reply.header("content-type").endswith("xml")
    body = turned(reply.body) if is_xml else reply.body
    await exchange.reply(replace(reply, headers=headers, body=body))


def turned_headers(head: bytes, turned: Callable[[bytes], bytes]) -> bytes:
    lines = head.split(b"\r\n")
    names = (b"if-match", b"if-none-match", b"x-amz-copy-source-if-match")
    return b"\r\n".join(
        turned(line) if line.partition(b":")[0].lower() in names else line for line in lines
    )


def test_a_bucket_with_versions(bucket, lab_at):
    """I7, I9."""
    status = {"Status": "Enabled"}
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration=status)
    commit(lab_at(bucket).saving())
    assert head_of_one(bucket)["VersionId"] != "null"


def test_a_bucket_that_locks_what_is_stored(seaweed, lab_at):
    """I9: nothing that a save needs is replaced or removed."""
    bucket = Bucket.make(seaweed, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    bucket.client.put_object_lock_configuration(
        Bucket=bucket.name,
        ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
    )
    # The bucket stays until its server ends: that is what it is for.
    commit(lab_at(bucket).saving())
    assert head_of_one(bucket)["ObjectLockMode"] == "COMPLIANCE"


def test_a_bucket_that_encrypts(bucket, lab_at):
    """I1."""
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    bucket.client.put_bucket_encryption(
        Bucket=bucket.name, ServerSideEncryptionConfiguration={"Rules": [rule]}
    )
    commit(lab_at(bucket).saving())
    assert head_of_one(bucket)["ServerSideEncryption"] == "AES256"


def head_of_one(bucket: Bucket) -> dict[str, Any]:
    """What is known of a manifest: that the bucket is what it is said to be."""
    key = next(key for key in bucket.keys("run-") if key.endswith("step-1/.ckptgate/manifest.json"))
    return bucket.client.head_object(Bucket=bucket.name, Key=key)


# What the probe says


def refusal(store: S3Store) -> str:
    with pytest.raises(UnusableError) as caught:
        store.probe()
    store.close()
    return f"{caught.value} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("status", "code"),
    [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed"), (307, "TemporaryRedirect")],
)
def test_a_bucket_of_another_region_is_told_with_its_region(monkeypatch, tmp_path, status, code):
    for name, value in Server("", "a", "b", (), tmp_path).environment.items():
        monkeypatch.setenv(name, value)
    body = error_xml(code).replace(b"</Error>", b"<Region>eu-west-7</Region></Error>")
    with chaos(1) as proxy:
        reply = Reply.made(status, body).with_headers(x_amz_bucket_region="eu-west-7")
        proxy.rule(answer(reply), times=ALWAYS)
        said = refusal(S3Store("s3://there/prefix", options(proxy.endpoint)))
    assert "eu-west-7" in said
    assert "region" in said


LIMITED = {
    "AKREADER": (["Read", "List"], "s3:PutObject"),
    "AKBLIND": (["Read", "Write"], "s3:ListBucket"),
    "AKMUTE": (["Write", "List"], "s3:GetObject"),
}


@pytest.fixture(scope="module")
def guarded(s3_programs) -> Iterator[Server]:
    """A server that lets some identities do only so much."""
    identities = [ADMIN] + [
        {
            "name": key.lower(),
            "credentials": [{"accessKey": key, "secretKey": "secret"}],
            "actions": actions,
        }
        for key, (actions, _) in LIMITED.items()
    ]
    with seaweedfs(identities) as server:
        yield server


@pytest.mark.parametrize("key", LIMITED)
def test_a_permission_that_a_real_server_denies_is_named(guarded, monkeypatch, key):
    give_credentials(guarded, monkeypatch)
    bucket = Bucket.make(guarded)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    said = refusal(S3Store(f"{bucket.url}/prefix", options(guarded.endpoint)))
    assert LIMITED[key][1] in said
    assert bucket.uploads() == []
