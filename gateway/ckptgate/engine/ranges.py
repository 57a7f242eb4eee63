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
from typing import Final, TypeAlias

from ckptgate.errors import IntegrityError
from ckptgate.ports.store import ObjectReader

__all__ = ["PIECE_BYTES", "Keep", "Ranges"]

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Read by one request: large enough that its latency doesn't count."""
THREADS: Final = 8
"""Requests at once, of all readers together."""
PIECES_MAX: Final = 12
"""In memory at once, read or being read."""

Keep: TypeAlias = Callable[[int, bytes], None]
"""What is done with the piece at an offset, by the thread that read it."""


class Ranges:
    """Reads ranges of one store's objects. Any thread."""

    def __init__(self, store: ObjectReader) -> None:
        self._store = store
        self._workers = _Workers(THREADS)
        self._room = threading.BoundedSemaphore(PIECES_MAX)

    def read(
        self, key: str, spans: Sequence[tuple[int, int]], keep: Keep | None = None
    ) -> Generator[bytes]:
        """The bytes of each of *spans* (offset, length), in their order, in pieces.

        No piece is of two spans. Close the generator where it isn't read to its end: it waits for
        what still runs, so that *keep* is never called after that.

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
            yield self._one(key, *pieces[0], keep)
            return
        running: deque[Future[bytes]] = deque()
        try:
            for offset, length in pieces:
                # Who holds pieces gives them back before it waits for room: so somebody always can.
                while running and (
                    len(running) >= THREADS or not self._room.acquire(blocking=False)
                ):
                    yield self._next(running)
                if not running:
                    self._room.acquire()
                running.append(self._workers.submit(self._one, key, offset, length, keep))
            while running:
                yield self._next(running)
        finally:
            self._give_up(running)

    def _one(self, key: str, offset: int, length: int, keep: Keep | None) -> bytes:
        data = self._store.read(key, offset, length)
        if len(data) != length:
            msg = f"{key} ends at byte {offset + len(data)} of {offset + length}"
            raise IntegrityError(msg, subject=key)
        if keep is not None:
            keep(offset, data)
        return data

    def _next(self, running: deque[Future[bytes]]) -> bytes:
        """The first of them, once it is there."""
        try:
            return running[0].result()
        finally:
            running.popleft()
            self._room.release()

    def _give_up(self, running: deque[Future[bytes]]) -> None:
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()
            self._room.release()


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
        self._jobs: queue.SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]] = (
            queue.SimpleQueue()
        )

    def submit(
        self,
        call: Callable[[str, int, int, Keep | None], bytes],
        key: str,
        offset: int,
        length: int,
        keep: Keep | None,
    ) -> Future[bytes]:
        future: Future[bytes] = Future()
        self._jobs.put((future, lambda: call(key, offset, length, keep)))
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
                    future.set_result(call())
                except BaseException as exc:  # noqa: BLE001 - whoever waits for the piece gets it
                    future.set_exception(exc)
            del future, call
            with self._lock:
                self._idle += 1
