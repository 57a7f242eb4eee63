"""Digests of several spans at once: each a stream of its own, in order, bounded, none left over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator

import blake3
import pytest

from ckptgate.engine import ranges
from ckptgate.engine.ranges import Ranges
from ckptgate.errors import IntegrityError, TransientStoreError

LENGTH = 10_000
SPANS = [(at, LENGTH) for at in range(5, 12 * LENGTH, LENGTH)]


class Object:
    """An object that can be read both ways; a stream gives pieces of 1000 bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.now = 0
        self.most = 0
        self.streamed: list[int] = []
        self.read_at: list[int] = []
        self.fail_at = -1

    def read(self, key: str, offset: int, length: int) -> bytes:
        raise NotImplementedError

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        with self.lock:
            self.read_at.append(offset)
        data = self.data[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def pieces(
        self, key: str, offset: int, length: int, buffer: memoryview
    ) -> Generator[memoryview]:
        with self.lock:
            self.streamed.append(offset)
            self.now += 1
            self.most = max(self.most, self.now)
        self.gate.wait(20)
        try:
            end = min(offset + length, len(self.data))
            for at in range(offset, end, 1000):
                if at <= self.fail_at < at + 1000:
                    raise TransientStoreError("no answer", subject=key)
                piece = buffer[: min(1000, end - at)]
                piece[:] = self.data[at : at + len(piece)]
                yield piece
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PIECE_BYTES", 4000)


@pytest.fixture
def store() -> Object:
    return Object(os.urandom(13 * LENGTH))


def digests_in(data: bytes) -> list[bytes]:
    return [blake3.blake3(data[at : at + length]).digest() for at, length in SPANS]


def test_digests_come_in_order_and_all_bytes_are_kept_before(store: Object) -> None:
    kept = bytearray(len(store.data))

    def keep(offset: int, piece: memoryview) -> None:
        kept[offset : offset + len(piece)] = piece

    found = Ranges(store).digests("k", SPANS, keep)
    store.gate.clear()
    opener = threading.Timer(0.05, store.gate.set)
    opener.start()
    wanted = digests_in(store.data)
    for (at, length), digest in zip(SPANS, found, strict=True):
        assert digest == wanted.pop(0)
        assert kept[at : at + length] == store.data[at : at + length]
    opener.join()
    assert store.most == ranges.THREADS
    assert sorted(store.streamed) == [at for at, _ in SPANS]
    assert store.read_at == []


def test_a_span_alone_is_read_in_pieces_side_by_side(store: Object) -> None:
    """Its reader waits for all of it, and one connection may be slow."""
    (found,) = Ranges(store).digests("k", SPANS[:1])
    assert found == digests_in(store.data)[0]
    assert (store.streamed, sorted(store.read_at)) == ([], [5, 4005, 8005])


def test_the_spans_of_all_readers_count(store: Object) -> None:
    reader = Ranges(store)
    store.gate.clear()
    done: list[bytes] = []

    def read(at: int) -> None:
        done.extend(reader.digests("k", SPANS[at : at + 3]))

    threads = [threading.Thread(target=read, args=(at,)) for at in (0, 3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while store.now < 6:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    more = threading.Thread(target=lambda: done.extend(reader.digests("k", SPANS[6:7])))
    more.start()
    store.gate.set()
    for thread in (*threads, more):
        thread.join()
    assert sorted(done) == sorted(digests_in(store.data)[:7])
    assert store.read_at == []
    # Nobody reads any more.
    assert len(list(reader.digests("k", SPANS[7:8]))) == 1
    assert store.read_at


@pytest.mark.parametrize("end", ["failure", "close", "keep"])
def test_nothing_is_under_way_once_a_reader_has_ended(store: Object, end: str) -> None:
    """What `keep` writes to may be closed then."""
    is_ended = threading.Event()
    late: list[int] = []

    def keep(offset: int, _piece: memoryview) -> None:
        time.sleep(0.001)
        if is_ended.is_set():
            late.append(offset)
        if end == "keep" and offset > 3 * LENGTH:
            raise OSError(28, "no space")

    reader = Ranges(store)
    store.fail_at = 3 * LENGTH if end == "failure" else -1
    found = reader.digests("k", SPANS, keep)
    if end == "close":
        next(found)
        found.close()
    else:
        with pytest.raises(OSError, match=r"no answer|no space"):
            list(found)
    is_ended.set()
    assert store.now == 0
    time.sleep(0.02)
    assert late == []
    store.fail_at = -1
    assert list(reader.digests("k", SPANS)) == digests_in(store.data)


def test_an_object_that_ends_too_early_is_named(store: Object) -> None:
    with pytest.raises(IntegrityError, match="k ends at byte 130000 of 140000"):
        list(Ranges(store).digests("k", [(0, LENGTH), (LENGTH, LENGTH), (12 * LENGTH, 2 * LENGTH)]))


def test_a_store_without_streams_is_read_in_pieces() -> None:
    class Plain:
        def __init__(self, store: Object) -> None:
            self.read, self.read_into = store.read, store.read_into

    store = Object(os.urandom(13 * LENGTH))
    assert list(Ranges(Plain(store)).digests("k", SPANS)) == digests_in(store.data)
    assert store.streamed == []
