"""Tells the kernel what to forget, through a process of its own.

Owns the queue before that process (`relay` says why there is one). An invalidation takes the
directory's lock in the kernel, which a request in progress may hold: whoever sends it waits for
that request's answer. Any thread may call; calls never block.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from typing import Final

from ckptgate_adapters.fuse import relay, wire
from ckptgate_adapters.fuse.wire import Notify

__all__ = ["Notifier", "Relay"]

_log = logging.getLogger(__name__)

QUEUE_MAX: Final = 100_000
"""More than any commit changes; what comes on top is dropped, and names expire by themselves."""


class Relay:
    """The process that writes to the kernel; started again if it dies. One thread."""

    def __init__(self, device: int) -> None:
        """Start nothing yet.

        Args:
            device: descriptor of `/dev/fuse`.
        """
        self._device = device
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start the process; returns the socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = (self._device, theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        return ours

    def send(self, message: bytes) -> None:
        """Send one message.

        Raises:
            OSError: ENODEV, the session is over.
        """
        for _ in range(2):
            try:
                (self._socket or self.start()).send(message)
            except ConnectionError:
                if self.close(None) == relay.SESSION_OVER:
                    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV)) from None
                _log.warning("notifying-process-died")
            else:
                return

    def close(self, timeout_s: float | None) -> int | None:
        """Let it send what it has, and end; its exit code, None if it goes on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        try:
            return None if self._process is None else self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class Notifier:
    """A queue of invalidations and the thread that passes them on."""

    def __init__(self, relay_: Relay) -> None:
        """Start nothing yet."""
        self._relay = relay_
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="fuse-notify", daemon=True)
        self._is_dropping = False

    def start(self) -> None:
        """Start sending."""
        self._relay.start()
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
        self._relay.close(timeout_s)

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
                self._relay.send(message)
            except OSError as exc:
                _log.debug("invalidation-failed reason=%s", exc)
            except Exception:  # noqa: BLE001 - the outermost edge of a thread
                _log.exception("invalidation-failed")
