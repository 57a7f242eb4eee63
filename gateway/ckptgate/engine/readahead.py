"""Read-ahead: what follows in a large file is fetched while its reader is at what came before.

It owns the rule who is a sequential reader: one that read on from where it was for a while. Nothing
is read ahead of any other, since each chunk is a lot to read in vain. What is read ahead is only a
matter of speed: it is dropped where it can't be had, and its reader meets the error itself.

Thread rule: any thread; `note` never blocks.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptgate.model.ids import CHUNK_BYTES, chunk_count

__all__ = ["ReadAhead"]

_log = logging.getLogger(__name__)

START_BYTES: Final = 2 * 1024 * 1024
"""Read on from where it was, until a reader counts as sequential."""
SLACK_BYTES: Final = 4 * 1024 * 1024
"""The kernel's own read-ahead asks for more than one piece at once, in any order."""
CHUNKS_MAX: Final = 3
"""So many chunks ahead at most: one more for each that was read on."""
THREADS: Final = 2
QUEUED_MAX: Final = 16
READERS_KEPT: Final = 256


@dataclass(slots=True)
class _Reader:
    """Where the reader of a file is: the end of what it read, and how much of it in a row."""

    end: int
    row_bytes: int


class ReadAhead:
    """Has chunks fetched before they are asked for.

    Args:
        fetch: has one chunk (file, index) in the spool; raises OSError where that can't be.
    """

    def __init__(self, fetch: Callable[[int, int], None]) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._queue: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._threads = 0
        self._idle = 0

    def note(self, file: int, size: int, offset: int, length: int) -> None:
        """Somebody reads this range of a file, which isn't whole here."""
        if size <= CHUNK_BYTES:
            return
        with self._changed:
            reader = self._moved(file, offset, length)
            if reader.row_bytes < START_BYTES:
                return
            at = (min(reader.end, size) - 1) // CHUNK_BYTES
            ahead = min(CHUNKS_MAX, 1 + reader.row_bytes // CHUNK_BYTES)
            for index in range(at + 1, min(at + 1 + ahead, chunk_count(size))):
                self._enqueue(file, index)

    def _moved(self, file: int, offset: int, length: int) -> _Reader:
        reader = self._readers.get(file)
        if reader is None or abs(offset - reader.end) > SLACK_BYTES:
            reader = self._readers[file] = _Reader(end=offset + length, row_bytes=length)
        else:
            reader.end = max(reader.end, offset + length)
            reader.row_bytes += length
        self._readers.move_to_end(file)
        while len(self._readers) > READERS_KEPT:
            self._readers.popitem(last=False)
        return reader

    def _enqueue(self, file: int, index: int) -> None:
        if (file, index) in self._queue or len(self._queue) >= QUEUED_MAX:
            return
        self._queue[file, index] = None
        if len(self._queue) <= self._idle:
            self._changed.notify()
        elif self._threads < THREADS:
            self._threads += 1
            name = f"read-ahead-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                file, index = self._queue.popitem(last=False)[0]
            try:
                self._fetch(file, index)
            except OSError as exc:
                _log.info("not-read-ahead file=%d chunk=%d error=%s", file, index, exc)
            except Exception:  # noqa: BLE001 - the outermost edge of a thread: one file must not end it
                _log.exception("read-ahead-failed file=%d chunk=%d", file, index)
