"""Multipart uploads that end otherwise than they should: started over, or loud, nothing left."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import give_credentials
from tests.s3.chaos import ALWAYS, ChaosProxy
from tests.s3.faults import answer, delay, edit_reply, error_after, error_before
from tests.s3.matrix import options
from tests.s3.servers import Bucket
from tests.s3.wire import Kind, Reply, Request

from ckptgate.errors import IntegrityError, TransientStoreError
from ckptgate.ports.store import DigestedFile, VerifyMode
from ckptgate.testing.samples import digested
from ckptgate_adapters.s3_store import S3Store
from ckptgate_adapters.s3_store.checksums import combine, composite, crc64, encode
from ckptgate_adapters.s3_store.complete import Upload, abort
from ckptgate_adapters.s3_store.proof import Sent, etag_of, is_ours, prove

PART = 5 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> DigestedFile:
    """Three parts."""
    path = tmp_path_factory.mktemp("source") / "f"
    path.write_bytes(os.urandom(2 * PART + 12_345))
    return digested(str(path))


@pytest.fixture(scope="module")
def store(shared_bucket: Bucket, shared_proxy: ChaosProxy) -> Iterator[S3Store]:
    with pytest.MonkeyPatch.context() as patch:
        give_credentials(shared_bucket.server, patch)
        made = S3Store(shared_bucket.url, options(shared_proxy.endpoint, stall_s=10.0))
        made.children("")
        yield made
        made.close()


def _is_stored(bucket: Bucket, key: str, source: DigestedFile) -> bool:
    assert [upload for upload in bucket.uploads() if upload[0] == key] == []
    return bucket.read(key) == Path(source.path).read_bytes()


def _gone(request: Request, body: bytes) -> Reply:
    del request, body
    page = b"<Error><Code>NoSuchUpload</Code><Message>gone</Message></Error>"
    return Reply(404).with_body(page)


def test_an_upload_that_somebody_aborted_starts_over_from_the_file(
    store: S3Store,
    proxy: ChaosProxy,
    shared_bucket: Bucket,
    prefix: str,
    source: DigestedFile,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I11: a rule of the bucket may do that, at any time."""
    key = ""
    once: list[Request] = []

    def aborts(request: Request) -> bool:
        """At the first of them, before it is passed on."""
        if not once:
            once.append(request)
            for name, upload in shared_bucket.uploads():
                if name == key:
                    shared_bucket.client.abort_multipart_upload(
                        Bucket=shared_bucket.name, Key=name, UploadId=upload
                    )
        return False

    for kind in (Kind.UPLOAD_PART, Kind.COMPLETE):
        key = f"{prefix}/{kind}"
        once.clear()
        proxy.clear()
        proxy.rule(error_before(500, "unused"), kind, where=aborts)
        assert store.put_all({key: source}, VerifyMode.CHECKSUM) == {}
        assert _is_stored(shared_bucket, key, source)
        assert proxy.count(Kind.CREATE_UPLOAD) == 2
    assert "s3-upload-starts-over" in caplog.text


def test_an_upload_that_is_lost_again_and_again_is_an_error(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str, source: DigestedFile
) -> None:
    key = f"{prefix}/f"
    proxy.rule(answer(_gone), Kind.COMPLETE, times=ALWAYS)
    failed = store.put_all({key: source}, VerifyMode.CHECKSUM)
    assert isinstance(failed[key], IntegrityError)
    assert "lost 3 times" in str(failed[key])
    assert shared_bucket.keys(key) == []
    assert [upload for upload in shared_bucket.uploads() if upload[0] == key] == []


def test_no_such_upload_after_it_was_completed_is_success(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str, source: DigestedFile
) -> None:
    """I11: the answer doesn't tell a completed one from an aborted one; the object does."""
    key = f"{prefix}/f"
    proxy.rule(error_after(404, "NoSuchUpload"), Kind.COMPLETE)
    assert store.put_all({key: source}, VerifyMode.CHECKSUM) == {}
    assert (proxy.count(Kind.COMPLETE), proxy.count(Kind.CREATE_UPLOAD)) == (1, 1)
    assert _is_stored(shared_bucket, key, source)


def test_an_object_of_an_earlier_upload_is_not_taken_for_this_one(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str, source: DigestedFile
) -> None:
    """I1: what lies there may be what an earlier try left, whole or not."""
    key = f"{prefix}/f"
    shared_bucket.put(key, b"left by an earlier try")
    proxy.rule(answer(_gone), Kind.COMPLETE)
    assert store.put_all({key: source}, VerifyMode.CHECKSUM) == {}
    assert proxy.count(Kind.CREATE_UPLOAD) == 2
    assert _is_stored(shared_bucket, key, source)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-amz-checksum-crc64nvme", encode(1)),
        ("content-length", "17"),
        ("etag", '"0123456789abcdef0123456789abcdef-2"'),
        ("x-amz-meta-ckptgate-blake3", "0" * 64),
    ],
)
def test_an_object_that_is_something_else_is_an_error(
    store: S3Store,
    proxy: ChaosProxy,
    prefix: str,
    source: DigestedFile,
    header: str,
    value: str,
) -> None:
    """I1: each thing that the look after Complete tells is compared."""
    key = f"{prefix}/f"
    changes = {header.replace("-", "_"): value}
    proxy.rule(edit_reply(lambda reply: reply.with_headers(**changes)), Kind.HEAD, times=ALWAYS)
    failed = store.put_all({key: source}, VerifyMode.CHECKSUM)
    assert isinstance(failed[key], IntegrityError)
    assert "wanted" in str(failed[key])


def test_a_part_that_arrived_as_something_else_is_sent_again(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str, source: DigestedFile
) -> None:
    """I1: even where the store took it."""
    key = f"{prefix}/f"
    proxy.rule(
        edit_reply(lambda reply: reply.with_headers(x_amz_checksum_crc64nvme=encode(1))),
        Kind.UPLOAD_PART,
        nth=2,
    )
    assert store.put_all({key: source}, VerifyMode.CHECKSUM) == {}
    assert proxy.count(Kind.UPLOAD_PART) == 4
    assert _is_stored(shared_bucket, key, source)


def test_a_part_that_the_store_lost_is_noticed_at_the_end(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str, source: DigestedFile
) -> None:
    """I1: it said that it has the part; Complete names all of them, their sum and the size."""
    key = f"{prefix}/f"

    def taken(request: Request, body: bytes) -> Reply:
        reply = Reply.made(200, b"").with_headers(etag='"0123456789abcdef0123456789abcdef"')
        return reply.with_headers(x_amz_checksum_crc64nvme=encode(crc64(body)))

    proxy.rule(answer(taken), Kind.UPLOAD_PART, nth=2)
    assert store.put_all({key: source}, VerifyMode.CHECKSUM) == {}
    assert _is_stored(shared_bucket, key, source)
    assert proxy.count(Kind.CREATE_UPLOAD) == 2
    said = [request.headers for request in proxy.seen if request.kind is Kind.COMPLETE][-1]
    assert said["x-amz-mp-object-size"] == str(source.size)
    whole = encode(crc64(Path(source.path).read_bytes()))
    assert said["x-amz-checksum-crc64nvme"] == whole
    assert said["x-amz-checksum-type"] == "FULL_OBJECT"


def test_abort_goes_on_until_no_part_is_left(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str
) -> None:
    """A part that is under way when an upload is aborted may land afterwards."""
    key = f"{prefix}/f"
    client = shared_bucket.client
    made = client.create_multipart_upload(Bucket=shared_bucket.name, Key=key)
    client.upload_part(
        Bucket=shared_bucket.name, Key=key, UploadId=made["UploadId"], PartNumber=1, Body=b"x"
    )
    # The store says that it is done, and the part is there.
    proxy.rule(answer(lambda request, body: Reply(204)), Kind.ABORT)
    upload = Upload(key=key, id=made["UploadId"], is_whole=True)
    store.session.run(abort(store.session, upload))
    assert proxy.count(Kind.ABORT) == 2
    assert [upload for upload in shared_bucket.uploads() if upload[0] == key] == []


def test_an_abort_that_fails_is_told_and_the_first_error_stays(
    store: S3Store,
    proxy: ChaosProxy,
    prefix: str,
    source: DigestedFile,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    proxy.rule(error_before(500, "InternalError", "first"), Kind.UPLOAD_PART, times=ALWAYS)
    proxy.rule(error_before(500, "InternalError", "second"), Kind.ABORT, times=ALWAYS)
    failed = store.put_all({f"{prefix}/f": source}, VerifyMode.CHECKSUM)
    error = failed[f"{prefix}/f"]
    assert isinstance(error, TransientStoreError)
    assert "first" in str(error)
    assert "s3-upload-left-behind" in caplog.text


def test_a_store_that_is_closed_in_the_middle_leaves_no_upload_and_no_caller_waiting(
    proxy: ChaosProxy,
    shared_bucket: Bucket,
    prefix: str,
    source: DigestedFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_credentials(shared_bucket.server, monkeypatch)
    closing = S3Store(shared_bucket.url, options(proxy.endpoint, stall_s=10.0))
    is_under_way = threading.Event()

    def seen(request: Request) -> bool:
        is_under_way.set()
        return request.nth == 2

    proxy.rule(delay(30.0), Kind.UPLOAD_PART, where=seen)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(closing.put, f"{prefix}/f", source)
        assert is_under_way.wait(20)
        closing.close()
        with pytest.raises(TransientStoreError, match="closed"):
            waiting.result(20)
    assert [key for key, _ in shared_bucket.uploads() if key.startswith(prefix)] == []
    with pytest.raises(TransientStoreError, match="closed"):
        closing.read(f"{prefix}/f", 0, 1)


def test_a_rule_that_would_abort_the_upload_is_told_once(
    store: S3Store, proxy: ChaosProxy, prefix: str, source: DigestedFile
) -> None:
    def with_rule(reply: Reply) -> Reply:
        date = "Wed, 02 Dec 2026 00:00:00 GMT"
        return reply.with_headers(x_amz_abort_date=date, x_amz_abort_rule_id="clean")

    proxy.rule(edit_reply(with_rule), Kind.CREATE_UPLOAD, times=ALWAYS)
    for name in ("f", "g"):
        assert store.put_all({f"{prefix}/{name}": source}, VerifyMode.CHECKSUM) == {}
    assert [text for text in store.warnings if "'clean' aborts" in text] == [store.warnings[-1]]


# The proof itself


def _sent(parts: list[bytes]) -> Sent:
    crc = 0
    for part in parts:
        crc = combine(crc, crc64(part), len(part))
    return Sent(
        digest="d",
        size=sum(map(len, parts)),
        crc=crc,
        parts=tuple(crc64(part) for part in parts),
        token="t",
    )


def _head(parts: list[bytes], **changes: Any) -> dict[str, Any]:
    """What an honest store says of the object of *parts*."""
    whole = b"".join(parts)
    return {
        "ContentLength": len(whole),
        "ETag": f'"0123456789abcdef0123456789abcdef-{len(parts)}"',
        "ChecksumCRC64NVME": encode(crc64(whole)),
        "ChecksumType": "FULL_OBJECT",
        "Metadata": {"ckptgate-blake3": "d", "ckptgate-upload": "t"},
        **changes,
    }


PARTS = st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=6)


@given(PARTS, st.data())
def test_missing_doubled_and_exchanged_parts_are_no_proof(
    parts: list[bytes], data: st.DataObject
) -> None:
    """I1."""
    sent = _sent(parts)
    assert prove("k", _head(parts), sent)
    at = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.integers(0, len(parts) - 1))
    swapped = list(parts)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    for wrong in (parts[:at] + parts[at + 1 :], [*parts, parts[at]], swapped):
        if b"".join(wrong) != b"".join(parts):
            with pytest.raises(IntegrityError):
                prove("k", _head(wrong), sent)


@given(PARTS)
def test_without_a_checksum_of_the_whole_nothing_is_proved(parts: list[bytes]) -> None:
    sent = _sent(parts)
    without = {key: value for key, value in _head(parts).items() if "Checksum" not in key}
    assert not prove("k", without, sent)
    of_parts = composite([crc64(part) for part in parts])
    said = _head(parts, ChecksumCRC64NVME=of_parts, ChecksumType="COMPOSITE")
    assert prove("k", said, sent)
    assert not prove("k", said, dataclasses.replace(sent, parts=()))
    unknown = _head(parts, ChecksumCRC64NVME="AAAAAAAAAAA=-9", ChecksumType="COMPOSITE")
    assert not prove("k", unknown, sent)


def test_an_object_is_ours_by_its_token_or_by_an_etag_that_we_computed() -> None:
    parts = ["0123456789abcdef0123456789abcdef", '"fedcba9876543210fedcba9876543210"']
    etag = etag_of(parts)
    # As `md5(unhex(a) + unhex(b))` and the count.
    assert etag == "b871e39d1a3258ca21654616395f5079-2"
    sent = dataclasses.replace(_sent([b"a", b"b"]), etag=etag)
    assert is_ours({"Metadata": {"ckptgate-upload": "t"}}, sent)
    assert is_ours({"ETag": f'"{etag}"', "Metadata": {}}, sent)
    assert not is_ours({"ETag": '"other-2"', "Metadata": {"ckptgate-upload": "u"}}, sent)
    assert etag_of(["opaque", parts[0]]) == ""
    assert not is_ours({"ETag": '""', "Metadata": {}}, dataclasses.replace(sent, etag=""))
