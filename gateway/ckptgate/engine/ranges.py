"""Bytes of a stored object, read in pieces: several at once, given back in their order.

It owns the rules that the pieces in memory are bounded, whatever is read and by how many, and that
nothing is still under way for a reader that has ended. What fits in one piece is read on the
caller's own thread.

Thread rule: any thread; each `read` belongs to the thread that began it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptgate.engine.pieces import Buffers
from ckptgate.errors import IntegrityError
from ckptgate.ports.store import ObjectReader

__all__ = ["PIECE_BYTES", "Keep", "Ranges"]

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Read by one request: large enough that its latency doesn't count."""
THREADS: Final = 8
"""Requests at once, of all readers together."""
PIECES_MAX: Final = 12
"""In memory at once, read or being read."""
SMALL_BYTES: Final = 1024 * 1024
"""What isn't larger, and alone, gets memory of its own."""

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
        self._workers = _Workers(THREADS)
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
                done = self._workers.submit(self._read, key, offset, buffer[:length], keep)
                running.append(_Piece(buffer, length, done))
            while running:
                yield from _next(self._buffers, running)
        finally:
            self._give_up(running)

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
            msg = f"{key} ends at byte {offset + count} of {offset + len(view)}"
            raise IntegrityError(msg, subject=key)
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
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()

    def submit(
        self,
        call: Callable[[str, int, memoryview, Keep | None], None],
        key: str,
        offset: int,
        view: memoryview,
        keep: Keep | None,
    ) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((future, lambda: call(key, offset, view, keep)))
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
            future, call = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    call()
                    future.set_result(None)
                except BaseException as exc:  # noqa: BLE001 - whoever waits for the piece gets it
                    future.set_exception(exc)
            del future, call
            with self._lock:
                self._idle += 1
