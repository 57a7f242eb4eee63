"""Several ranges at once: in order, bounded, once each; and what follows is read ahead."""

from __future__ import annotations

import os
import threading
import time

import pytest
from tests.unit.engine.kit import CHUNK, reader_of

from ckptgate.engine import ranges, readahead
from ckptgate.engine.ranges import Ranges
from ckptgate.errors import IntegrityError, TransientStoreError
from ckptgate.ports.spool import LocalBytes


def wait_until(is_true, what: str) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.002)


class Bytes:
    """An object whose reads block until they are let go, and are counted."""

    def __init__(self, data: bytes, *, is_held: bool = False) -> None:
        self.data = data
        self.gate = threading.Event()
        if not is_held:
            self.gate.set()
        self.lock = threading.Lock()
        self.now = 0
        self.most = 0
        self.calls: list[int] = []
        self.fail_at = -1

    def read(self, key: str, offset: int, length: int) -> bytes:
        raise NotImplementedError

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        with self.lock:
            self.calls.append(offset)
            self.now += 1
            self.most = max(self.most, self.now)
        self.gate.wait(20)
        try:
            if offset == self.fail_at:
                raise TransientStoreError("no answer", subject=key)
            data = self.data[offset : offset + len(view)]
            view[: len(data)] = data
            return len(data)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(ranges, "PIECE_BYTES", 1000)


def test_pieces_come_in_order_and_several_are_read_at_once(small_pieces):
    store = Bytes(os.urandom(40_500), is_held=True)
    kept: dict[int, bytes] = {}
    lock = threading.Lock()

    def keep(offset: int, piece: memoryview) -> None:
        with lock:
            kept[offset] = bytes(piece)

    found = Ranges(store).read("k", [(0, 20_250), (20_250, 20_250)], keep)
    opener = threading.Timer(0.05, store.gate.set)
    opener.start()
    assert b"".join(map(bytes, found)) == store.data
    opener.join()
    assert b"".join(kept[at] for at in sorted(kept)) == store.data
    assert store.most == ranges.THREADS
    assert len(store.calls) == len(set(store.calls)) == 42


def test_what_fits_in_one_piece_is_read_on_the_callers_own_thread():
    names: list[str] = []

    class Store(Bytes):
        def read_into(self, key: str, offset: int, view: memoryview) -> int:
            names.append(threading.current_thread().name)
            return super().read_into(key, offset, view)

    data = os.urandom(ranges.SMALL_BYTES + 1)
    for length in (2, len(data) - 1):
        found = Ranges(Store(data)).read("k", [(1, length)])
        assert [bytes(piece) for piece in found] == [data[1 : 1 + length]]
    assert names == [threading.current_thread().name] * 2


def test_pieces_in_memory_are_bounded_over_all_readers(small_pieces):
    store = Bytes(bytes(50_000), is_held=True)
    reader = Ranges(store)
    done: list[int] = []

    def read() -> None:
        done.append(sum(len(piece) for piece in reader.read("k", [(0, 50_000)])))

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: store.now == ranges.THREADS, "all requests under way")
    assert len(store.calls) <= ranges.PIECES_MAX
    store.gate.set()
    for thread in threads:
        thread.join()
    assert done == [50_000] * 5
    assert store.most <= ranges.THREADS
    assert all(reader._buffers.take_free() is not None for _ in range(ranges.PIECES_MAX))
    assert reader._buffers.take_free() is None


@pytest.mark.parametrize("end", ["failure", "close"])
def test_nothing_is_under_way_once_a_reader_has_ended(small_pieces, end):
    """What `keep` writes to may be closed then."""
    store = Bytes(bytes(30_000))
    store.fail_at = 3000
    ended = threading.Event()
    late: list[int] = []

    def keep(offset: int, _piece: memoryview) -> None:
        time.sleep(0.005)
        if ended.is_set():
            late.append(offset)

    reader = Ranges(store)
    found = reader.read("k", [(0, 30_000)], keep)
    if end == "failure":
        with pytest.raises(TransientStoreError):
            list(found)
    else:
        next(found)
        found.close()
    ended.set()
    assert store.now == 0
    time.sleep(0.03)
    assert late == []
    store.fail_at = -1
    assert sum(map(len, reader.read("k", [(0, 30_000)]))) == 30_000


def test_an_object_that_ends_too_early_is_named(small_pieces):
    with pytest.raises(IntegrityError, match="k ends at byte 2500 of 3000"):
        list(Ranges(Bytes(bytes(2500))).read("k", [(0, 4000)]))


def test_a_large_file_is_fetched_by_many_threads_and_each_piece_is_read_once(
    make_node, small_chunks
):
    data = os.urandom(40 * CHUNK + 10)
    node, row, reads = reader_of(make_node, {"x": data})
    file = node.file_at(row, "x")
    threads = [
        threading.Thread(target=node.catalog.fetch, args=(file, at * CHUNK, len(data)))
        for at in (0, 30, 0, 15, 39, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    offsets = [offset for _, offset in reads.calls]
    assert len(offsets) == len(set(offsets))
    assert node.spool.file(file).local is LocalBytes.FULL
    assert node.read(row, "x") == data


def test_who_waited_for_a_chunk_that_failed_tries_it_itself(make_node, small_chunks):
    data = os.urandom(3 * CHUNK)
    lock = threading.Lock()
    failures = [0]

    def fail_once(offset, piece):
        with lock:
            if offset == CHUNK and not failures[0]:
                failures[0] += 1
                raise TransientStoreError("no answer")
        return piece

    node, row, _ = reader_of(make_node, {"x": data}, fail_once)
    file = node.file_at(row, "x")
    errors: list[BaseException] = []

    def fetch() -> None:
        try:
            node.catalog.fetch(file, 0, len(data))
        except TransientStoreError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert node.spool.file(file).local is LocalBytes.FULL
    assert node.events.recent(5) == []


@pytest.fixture
def early(monkeypatch):
    """Readers count as sequential after one chunk; the kernel's own read-ahead is none."""
    monkeypatch.setattr(readahead, "START_BYTES", CHUNK)
    monkeypatch.setattr(readahead, "SLACK_BYTES", 0)


def have(node, file) -> list[int]:
    row = node.spool.file(file)
    if row.local is LocalBytes.FULL:
        return list(range(1000))
    return [index for index, is_here in enumerate(row.have) if is_here]


def look(node, file, offset, length) -> None:
    """As the mount does for each READ."""
    if not node.catalog.is_fetched(file, offset, length):
        node.catalog.fetch(file, offset, length)
    node.catalog.read_ahead(file, offset, length)


def test_what_follows_is_fetched_while_a_sequential_reader_is_at_what_came_before(
    make_node, small_chunks, early
):
    node, row, _ = reader_of(make_node, {"x": os.urandom(20 * CHUNK)})
    file = node.file_at(row, "x")
    for offset in range(0, CHUNK, CHUNK // 4):
        assert have(node, file) in ([], [0])
        look(node, file, offset, CHUNK // 4)
    wait_until(lambda: set(have(node, file)) >= {0, 1, 2}, "the next chunks")
    # No further than a few, wherever the reader is.
    assert max(have(node, file)) <= 1 + readahead.CHUNKS_MAX
    for offset in range(CHUNK, 20 * CHUNK, CHUNK // 2):
        look(node, file, offset, CHUNK // 2)
    assert node.spool.file(file).local is LocalBytes.FULL


def test_nothing_is_read_ahead_of_who_reads_here_and_there(make_node, small_chunks, early):
    node, row, reads = reader_of(make_node, {"x": os.urandom(20 * CHUNK), "y": b"small"})
    file = node.file_at(row, "x")
    for chunk in (3, 19, 7, 0, 12):
        look(node, file, chunk * CHUNK, CHUNK // 2)
    look(node, node.file_at(row, "y"), 0, 5)
    time.sleep(0.05)
    assert have(node, file) == [0, 3, 7, 12, 19]
    assert {offset // CHUNK for _, offset in reads.calls} == {0, 3, 7, 12, 19}


def test_what_cannot_be_read_ahead_is_told_to_who_reads_it(make_node, small_chunks, early):
    """I13: the error and its event come with the read, once."""
    asked = threading.Event()

    def flip(offset, piece):
        if offset // CHUNK == 1:
            asked.set()
            return bytes(len(piece))
        return piece

    node, row, _ = reader_of(make_node, {"x": os.urandom(4 * CHUNK)}, flip)
    file = node.file_at(row, "x")
    look(node, file, 0, CHUNK)
    assert asked.wait(20)
    with pytest.raises(IntegrityError, match="run/step-1/x: chunk 1 of"):
        look(node, file, CHUNK, 1)
    assert [event.kind for event in node.events.recent(5)] == ["verify-failed"]
