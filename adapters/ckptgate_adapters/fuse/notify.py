"""Tells the kernel what to forget, from a thread of its own.

Owns the rule that no request is ever served by the notifying thread: an invalidation takes the
directory's lock in the kernel, which a request in progress may hold, so a handler that sends one
waits for itself. Any thread may call; calls never block.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.wire import Notify

__all__ = ["Notifier"]

_log = logging.getLogger(__name__)

QUEUE_MAX: Final = 100_000
"""More than any commit changes; what comes on top is dropped, and names expire by themselves."""


class Notifier:
    """A queue of invalidations and the thread that sends them."""

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        """Start nothing yet.

        Args:
            send: writes a message to the kernel; OSError where the session is over.
        """
        self._send = send
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="fuse-notify", daemon=True)
        self._is_dropping = False

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Send what is queued and end; after *timeout_s* it ends with the process."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def name(self, parent: int, name: str) -> None:
        """The kernel must look this name up again."""
        try:
            raw = wire.encode_name(name)
        except OSError:
            # The kernel cannot know a name that has no bytes.
            return
        body = wire.INVAL_ENTRY.pack(parent, len(raw), 0) + raw + b"\0"
        self._put(wire.notification(Notify.INVAL_ENTRY, body))

    def node(self, ino: int) -> None:
        """The kernel must ask for the attributes and bytes of this node again."""
        self._put(wire.notification(Notify.INVAL_INODE, wire.INVAL_INODE.pack(ino, 0, 0)))

    def _put(self, message: bytes) -> None:
        try:
            self._queue.put_nowait(message)
            self._is_dropping = False
        except queue.Full:
            if not self._is_dropping:
                _log.warning("invalidations-dropped queued=%d", QUEUE_MAX)
            self._is_dropping = True

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._send(message)
            except OSError as exc:
                _log.debug("invalidation-failed reason=%s", exc)
            except Exception:  # noqa: BLE001 - the outermost edge of a thread
                _log.exception("invalidation-failed")
