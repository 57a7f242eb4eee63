"""Ranges are read as plain HTTP where that works, and through the client where it doesn't."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from tests.conftest import give_credentials
from tests.s3.chaos import ALWAYS, ChaosProxy
from tests.s3.faults import (
    drop_reply,
    drop_request,
    edit_reply,
    error_before,
    truncate_reply,
)
from tests.s3.matrix import options
from tests.s3.servers import Bucket
from tests.s3.wire import Kind, Request

from ckptgate.errors import MissingError
from ckptgate_adapters.s3_store import S3Store

DATA = os.urandom(1 << 20)


@pytest.fixture
def store(
    shared_bucket: Bucket, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Store]:
    give_credentials(shared_bucket.server, monkeypatch)
    made = S3Store(shared_bucket.url, options(proxy.endpoint, stall_s=10.0))
    yield made
    made.close()


def _is_direct(request: Request) -> bool:
    return "x-amz-signature" in {name.lower() for name in request.query}


def test_ranges_of_one_version_are_read_directly_on_one_connection(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str
) -> None:
    key = f"{prefix}/odd name +&%é"
    shared_bucket.put(key, DATA)
    for offset in (0, 17, 500_000):
        assert store.read(key, offset, 300_000) == DATA[offset : offset + 300_000]
    assert store.read(key, 1_000_000, 300_000) == DATA[1_000_000:]
    assert [_is_direct(request) for request in proxy.seen] == [True] * 4
    etag = shared_bucket.client.head_object(Bucket=shared_bucket.name, Key=key)["ETag"]
    assert [request.headers.get("if-match") for request in proxy.seen] == [None, etag, etag, etag]
    assert store.read(key, len(DATA), 5) == b""
    with pytest.raises(MissingError):
        store.read(f"{prefix}/none", 0, 5)


def test_what_goes_wrong_is_read_through_the_client(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str
) -> None:
    """I8: and never are other bytes taken for those that were asked for."""
    key = f"{prefix}/f"
    shared_bucket.put(key, DATA)
    other = edit_reply(lambda reply: reply.with_headers(content_range="bytes 1-99/1048576"))
    whole = edit_reply(lambda reply: reply.with_headers(content_range=None))
    for fault in (
        drop_request, truncate_reply(), error_before(503, "SlowDown"), other, whole,
    ):  # fmt: skip
        proxy.clear()
        proxy.rule(fault, Kind.GET, where=_is_direct)
        assert store.read(key, 100, 200_000) == DATA[100:200_100]
        assert [_is_direct(request) for request in proxy.seen] == [True, False]
        assert store.read(key, 0, 9) == DATA[:9]


def test_a_stream_goes_on_through_the_client_where_it_broke_off(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str
) -> None:
    """I8: each byte once, in order, of the version that it began with."""
    key = f"{prefix}/f"
    shared_bucket.put(key, DATA)
    buffer = memoryview(bytearray(100_000))

    def streamed(offset: int, length: int) -> bytes:
        return b"".join(bytes(piece) for piece in store.pieces(key, offset, length, buffer))

    assert streamed(17, 800_000) == DATA[17:800_017]
    assert [_is_direct(request) for request in proxy.seen] == [True]
    assert streamed(900_000, 800_000) == DATA[900_000:]
    assert streamed(len(DATA), 5) == streamed(5, 0) == b""
    for fault in (drop_request, truncate_reply(), error_before(503, "SlowDown")):
        proxy.clear()
        proxy.rule(fault, Kind.GET, where=_is_direct)
        assert streamed(100, 700_000) == DATA[100:700_100]
        assert [_is_direct(request) for request in proxy.seen][:2] == [True, True]
    found = store.pieces(key, 0, 500_000, buffer)
    next(found)
    found.close()
    assert streamed(0, 9) == DATA[:9]
    with pytest.raises(MissingError):
        list(store.pieces(f"{prefix}/none", 0, 5, buffer))


def test_a_kept_connection_that_was_closed_is_replaced_by_a_new_one(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str
) -> None:
    """Services close what isn't used for a while: that is no failure of this way to read."""
    key = f"{prefix}/f"
    shared_bucket.put(key, DATA)
    for fault in (drop_request, drop_reply) * 2:
        assert store.read(key, 0, 9) == DATA[:9]
        proxy.clear()
        proxy.rule(fault, Kind.GET, where=_is_direct)
        assert store.read(key, 100, 200_000) == DATA[100:200_100]
        assert [_is_direct(request) for request in proxy.seen] == [True, True]


def test_where_it_never_works_it_is_left_for_a_while(
    store: S3Store, proxy: ChaosProxy, shared_bucket: Bucket, prefix: str
) -> None:
    """Or all would be asked for twice."""
    key = f"{prefix}/f"
    shared_bucket.put(key, DATA)
    proxy.rule(error_before(403, "AccessDenied"), Kind.GET, times=ALWAYS, where=_is_direct)
    for _ in range(10):
        assert store.read(key, 0, 100) == DATA[:100]
    assert sum(_is_direct(request) for request in proxy.seen) == 3


def test_a_store_that_is_dropped_closes_its_connections(
    shared_bucket: Bucket, proxy: ChaosProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that is left open is a warning, which fails the test."""
    give_credentials(shared_bucket.server, monkeypatch)
    shared_bucket.put(f"{prefix}/f", DATA)
    dropped = S3Store(shared_bucket.url, options(proxy.endpoint, stall_s=10.0))
    assert dropped.read(f"{prefix}/f", 0, 9) == DATA[:9]
    del dropped
    gc.collect()
