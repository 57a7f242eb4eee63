"""Reading requests: one thread does all the work, and another helps where that one is held up.

Two threads that take turns wake each other for every request, which costs several times what
serving it does: so only one waits for the kernel. It calls the other when it begins to copy the
bytes of a large WRITE, beside which other work can go on, if lately there was any: one writer alone
waits for each answer before it asks again. And as long as requests come the other
looks now and then whether the same one is still being served, as when a disk doesn't answer, or
another process has the spool's database. Then one of the two is left, and must not be held up, too:
whoever serves is told that it is `alone`.

Most requests come in a row, each as soon as the one before is answered: sooner than a sleeping
thread wakes on an idle core. So the first thread looks for the next one for a moment before it
sleeps, as long as that is worth it; where both share a core it never is.

Thread rule: each method says whose it is.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.request import pages
from ckptgate_adapters.fuse.session import MAX_IO_BYTES

__all__ = ["HEAD_BYTES", "Buffers", "Loop"]

_log = logging.getLogger(__name__)

HEAD_BYTES: Final = wire.HEADER_BYTES + wire.WRITE_IN.size
_LOOK_S: Final = 0.002
"""How often the second thread looks whether the first gets on."""
_LOOKS_MAX: Final = 10
"""After so many looks at a loop without work it sleeps until there is some."""
_EXPECT_S: Final = 0.0001
"""How long the first thread looks for the next request before it sleeps."""
_CREDIT_MAX: Final = 4
"""So often requests must have been in time for two late ones not to end the looking."""
_PAUSE: Final = 64
"""So many requests are not looked for once it was in vain."""
_CROWD: Final = 32
"""So long, in requests, two that were there at once are taken for a sign of more to come."""


@dataclass(slots=True)
class Buffers:
    """What one thread reads into: the bytes of a WRITE land at the start of `body`."""

    head: bytearray = field(default_factory=lambda: bytearray(HEAD_BYTES))
    body: memoryview = field(default_factory=lambda: pages(MAX_IO_BYTES + 4096))
    counts: dict[int, int] = field(default_factory=dict[int, int])
    vector: list[wire.Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self.vector = [self.head, self.body]

    def content(self, opcode: int, size: int) -> tuple[bytes, wire.Buffer]:
        """Body and payload of a request of *size* bytes."""
        if size <= HEAD_BYTES:
            return bytes(self.head[wire.HEADER_BYTES : size]), b""
        body = bytes(self.head[wire.HEADER_BYTES :])
        rest = self.body[: size - HEAD_BYTES]
        return (body, rest) if opcode == _WRITE else (body + rest, b"")


class Loop:
    """The threads that read a session's requests."""

    def __init__(self, device: int, serve: Callable[[Buffers, int, bool], None]) -> None:
        """Prepare.

        Args:
            device: the session's descriptor, non-blocking.
            serve: called by a reading thread with a request in its buffers, its size, and whether
                that thread is alone: it must leave to others what could hold it up.
        """
        self._device = device
        self._serve = serve
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False
        self._failure: OSError | None = None
        self._buffers = (Buffers(), Buffers())
        self._serial = 0
        self._is_busy = False
        self._is_copying = False
        self._is_helping = False
        self._is_helper_asleep = False
        self._credit = self._pause = self._crowd = 0
        self._called = threading.Event()

    def counts(self) -> dict[int, int]:
        """Requests received so far, by opcode. Any thread."""
        total: dict[int, int] = {}
        for buffers in self._buffers:
            for opcode, count in list(buffers.counts.items()):
                total[opcode] = total.get(opcode, 0) + count
        return total

    def stop(self) -> None:
        """Make `run` return; any thread, also in a signal handler, and it may be repeated."""
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Read and have served until the session ends or `stop`; the caller is the first thread.

        Raises:
            OSError: the device cannot be read.
        """
        helper = threading.Thread(target=self._guarded, args=(self._help,), name="fuse-helper")
        helper.daemon = True
        helper.start()
        self._guarded(self._work)
        self._called.set()
        helper.join()
        if self._failure is not None:
            raise self._failure

    def copies(self, buffers: Buffers) -> None:
        """The request in *buffers* takes long, without needing this process. A reading thread."""
        if buffers is self._buffers[0] and self._crowd:
            self._is_copying = True
            self._called.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever ends one of the threads ends both."""
        try:
            work()
        except OSError as exc:
            _log.exception("device-failed")
            self._failure = exc
        finally:
            self.stop()

    def _work(self) -> None:
        """The first thread."""
        buffers = self._buffers[0]
        with self._poll() as ready:
            while not self._is_stopping:
                size = self._receive(buffers)
                if size:
                    # It came while the one before was served.
                    self._crowd = _CROWD
                else:
                    self._crowd = max(self._crowd - 1, 0)
                    size = self._expect(buffers)
                if not size:
                    ready.poll(-1, 2)
                    size = self._receive(buffers)
                if not size:
                    continue
                self._serial += 1
                self._is_busy = True
                if self._is_helper_asleep:
                    self._called.set()
                self._serve(buffers, size, self._is_helping)
                self._is_busy = self._is_copying = False

    def _expect(self, buffers: Buffers) -> int:
        """Look for the next request for a moment, unless that was in vain lately."""
        if not self._credit:
            self._pause -= 1
            if self._pause > 0:
                return 0
            self._credit = 1
        until = time.perf_counter() + _EXPECT_S
        while not self._is_stopping:
            size = self._receive(buffers)
            if size:
                self._credit = min(self._credit + 1, _CREDIT_MAX)
                return size
            if time.perf_counter() > until:
                break
        self._credit = max(self._credit - 2, 0)
        self._pause = _PAUSE
        return 0

    def _poll(self) -> select.epoll:
        ready = select.epoll()
        ready.register(self._device, select.EPOLLIN)
        ready.register(self._wake, select.EPOLLIN)
        return ready

    def _receive(self, buffers: Buffers) -> int:
        """Bytes of the next request, 0 if there is none."""
        try:
            return os.readv(self._device, buffers.vector)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                self.stop()
            # EAGAIN: another thread has it. ENOENT: it was taken back while it was read.
            elif exc.errno not in {errno.EAGAIN, errno.ENOENT, errno.EINTR}:
                raise
            return 0

    def _help(self) -> None:
        """The second thread."""
        seen, looks = -1, 0
        with self._poll() as ready:
            while not self._is_stopping:
                self._sleep(looks)
                serial = self._serial
                is_held_up = self._is_busy and (self._is_copying or serial == seen)
                looks = 0 if is_held_up or serial != seen else looks + 1
                if is_held_up:
                    self._help_until(serial, ready)
                seen = serial

    def _sleep(self, looks: int) -> None:
        """Until the next look, or while there is no work until there is some."""
        self._called.clear()
        if looks < _LOOKS_MAX:
            if not self._is_copying:
                self._called.wait(_LOOK_S)
            return
        self._is_helper_asleep = True
        # The first thread says that it is busy before it asks whether this one sleeps.
        if not self._is_busy and not self._is_stopping:
            self._called.wait()
        self._is_helper_asleep = False

    def _help_until(self, serial: int, ready: select.epoll) -> None:
        """Serve what comes while the first thread is still at its *serial*-th request."""
        buffers = self._buffers[1]
        while self._is_busy and self._serial == serial and not self._is_stopping:
            ready.poll(_LOOK_S, 2)
            size = self._receive(buffers)
            if size:
                self._crowd = _CROWD
                self._is_helping = True
                self._serve(buffers, size, not self._is_copying)
                self._is_helping = False


_WRITE: Final = int(wire.Opcode.WRITE)
