"""Bytes of a stored object, read in pieces: several at once, given back or digested in their order.

It owns the rules that the pieces in memory are bounded, whatever is read and by how many, and that
nothing is still under way for a reader that has ended. What fits in one piece is read on the
caller's own thread.

Where digests of several long spans are wanted at once, each is a stream of its own (if the store
has such): one thread reads, keeps and digests it, which costs a fifth less than pieces that other
threads wait for. A single span is read in pieces side by side, since one connection may be slow and
its reader waits for all of it.

Thread rule: any thread; each `read` belongs to the thread that began it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import blake3

from ckptgate.engine.pieces import Buffers
from ckptgate.errors import IntegrityError
from ckptgate.ports.store import ObjectReader, Streams

__all__ = ["PIECE_BYTES", "Keep", "Ranges"]

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Read by one request: large enough that its latency doesn't count."""
THREADS: Final = 8
"""Requests at once, of all readers together."""
PIECES_MAX: Final = 12
"""In memory at once, read or being read."""
SMALL_BYTES: Final = 1024 * 1024
"""What isn't larger, and alone, gets memory of its own."""
STREAMS_MIN: Final = 3
"""So many spans, of all readers together, are streams: fewer would leave connections unused."""
STREAM_BYTES: Final = 2 * 1024 * 1024
"""Of a stream in memory. Threads take turns at each call: small ones cost more than caches gain."""

_T = TypeVar("_T")
Keep: TypeAlias = Callable[[int, memoryview], None]
"""What is done with the piece at an offset, by the thread that read it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece that was read, or is being read."""

    buffer: memoryview
    length: int
    done: Future[None]


class Ranges:
    """Reads ranges of one store's objects. Any thread."""

    def __init__(self, store: ObjectReader) -> None:
        self._store = store
        self._streams = store if isinstance(store, Streams) else None
        self._workers = _Workers(THREADS)
        self._streamers = _Workers(THREADS)
        self._lock = threading.Lock()
        self._wanted = 0
        self._buffers = Buffers(PIECES_MAX, PIECE_BYTES)

    def read(
        self, key: str, spans: Sequence[tuple[int, int]], keep: Keep | None = None
    ) -> Generator[memoryview]:
        """The bytes of each of *spans* (offset, length), in their order, in pieces.

        A piece is valid until the next is asked for; none is of two spans. Close the generator
        where it isn't read to its end: it waits for what still runs, so that *keep* is never called
        after that.

        Args:
            key: of the object.
            spans: what to read.
            keep: done with each piece before it is given back.

        Raises:
            IntegrityError: the object ends before a span does.
            MissingError, TransientStoreError: as `ObjectReader.read`.
            OSError: of *keep*.
        """
        pieces = [piece for span in spans for piece in _pieces(*span)]
        if len(pieces) == 1:
            yield from self._alone(key, *pieces[0], keep)
            return
        running: deque[_Piece] = deque()
        try:
            for offset, length in pieces:
                buffer = None
                # Who holds pieces gives them back before it waits for room: so somebody always can.
                while running and (buffer := self._room_beside(running)) is None:
                    yield from _next(self._buffers, running)
                if buffer is None:
                    buffer = self._buffers.take()
                read = partial(self._read, key, offset, buffer[:length], keep)
                done = self._workers.submit(read)
                running.append(_Piece(buffer, length, done))
            while running:
                yield from _next(self._buffers, running)
        finally:
            self._give_up(running)

    def digests(
        self, key: str, spans: Sequence[tuple[int, int]], keep: Keep | None = None
    ) -> Generator[bytes]:
        """The BLAKE3 of each of *spans* (offset, length), in their order, once it was read.

        As `read` otherwise.
        """
        with self._lock:
            self._wanted += len(spans)
            is_streaming = self._streams is not None and self._wanted >= STREAMS_MIN
        left = len(spans)
        try:
            found = self._streamed if is_streaming else self._digested
            with contextlib.closing(found(key, spans, keep)) as digests:
                for digest in digests:
                    with self._lock:
                        self._wanted -= 1
                    left -= 1
                    yield digest
        finally:
            with self._lock:
                self._wanted -= left

    def _digested(
        self, key: str, spans: Sequence[tuple[int, int]], keep: Keep | None
    ) -> Generator[bytes]:
        with contextlib.closing(self.read(key, spans, keep)) as pieces:
            for _, length in spans:
                hasher, done = blake3.blake3(), 0
                while done < length:
                    piece = next(pieces)
                    hasher.update(piece)
                    done += len(piece)
                yield hasher.digest()

    def _streamed(
        self, key: str, spans: Sequence[tuple[int, int]], keep: Keep | None
    ) -> Generator[bytes]:
        is_over = threading.Event()
        if len(spans) == 1 and spans[0][1] <= PIECE_BYTES:
            yield self._stream(key, spans[0], keep, is_over)
            return
        running: deque[Future[bytes]] = deque()
        try:
            for span in spans:
                stream = partial(self._stream, key, span, keep, is_over)
                running.append(self._streamers.submit(stream))
            while running:
                yield running[0].result()
                running.popleft()
        finally:
            is_over.set()
            for future in running:
                if not future.cancel():
                    future.exception()

    def _stream(
        self, key: str, span: tuple[int, int], keep: Keep | None, is_over: threading.Event
    ) -> bytes:
        assert self._streams is not None
        offset, length = span
        buffer = memoryview(bytearray(min(STREAM_BYTES, length)))
        hasher, at = blake3.blake3(), offset
        with contextlib.closing(self._streams.pieces(key, offset, length, buffer)) as pieces:
            for piece in pieces:
                if is_over.is_set():
                    raise CancelledError
                if keep is not None:
                    keep(at, piece)
                hasher.update(piece)
                at += len(piece)
        if at != offset + length:
            raise _ends(key, at, offset + length)
        return hasher.digest()

    def _alone(
        self, key: str, offset: int, length: int, keep: Keep | None
    ) -> Generator[memoryview]:
        if length <= SMALL_BYTES:
            view = memoryview(bytearray(length))
            self._read(key, offset, view, keep)
            yield view
            return
        buffer = self._buffers.take()
        try:
            self._read(key, offset, buffer[:length], keep)
            yield buffer[:length]
        finally:
            self._buffers.give_back(buffer)

    def _room_beside(self, running: deque[_Piece]) -> memoryview | None:
        """A buffer for one more, if there may be one and nobody has to wait."""
        return self._buffers.take_free() if len(running) < THREADS else None

    def _read(self, key: str, offset: int, view: memoryview, keep: Keep | None) -> None:
        count = self._store.read_into(key, offset, view)
        if count != len(view):
            raise _ends(key, offset + count, offset + len(view))
        if keep is not None:
            keep(offset, view)

    def _give_up(self, running: deque[_Piece]) -> None:
        for piece in running:
            piece.done.cancel()
        for piece in running:
            if not piece.done.cancelled():
                piece.done.exception()
            self._buffers.give_back(piece.buffer)


def _next(buffers: Buffers, running: deque[_Piece]) -> Generator[memoryview]:
    """The first of them, once it is there; one that failed is left in its place."""
    piece = running[0]
    piece.done.result()
    try:
        yield piece.buffer[: piece.length]
    finally:
        running.popleft()
        buffers.give_back(piece.buffer)


def _ends(key: str, at: int, wanted: int) -> IntegrityError:
    return IntegrityError(f"{key} ends at byte {at} of {wanted}", subject=key)


def _pieces(offset: int, length: int) -> list[tuple[int, int]]:
    end = offset + length
    return [(at, min(PIECE_BYTES, end - at)) for at in range(offset, end, PIECE_BYTES)]


class _Workers:
    """Threads that are started when they are needed and never hold up the end of the process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Have it called by one of them."""
        future: Future[_T] = Future()
        self._jobs.put(partial(_settle, future, call))
        with self._lock:
            if self._idle:
                self._idle -= 1
                return future
            if self._started < self._count:
                self._started += 1
                name = f"ranges-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job()
            del job
            with self._lock:
                self._idle += 1


def _settle(future: Future[_T], call: Callable[[], _T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - whoever waits for it gets it
            future.set_exception(exc)
