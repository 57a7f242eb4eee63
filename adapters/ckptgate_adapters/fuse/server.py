"""The loop: reads requests, has them served, sends replies.

Thread rule: whoever has read a request serves it. Protocol threads never wait: what would block,
and what waits for the disk or for other machines, goes to the pool. The first of them does all the
work as long as it keeps up: two that take turns wake each other for every request, which costs
several times what serving it does. The kernel wakes the next one only while the first is busy, and
it naps before it helps, unless the first is copying the bytes of a large WRITE: other work can go
on beside that.

A handler's bug is EIO with a traceback in the log. Nothing a handler does ends the loop.
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

from ckptgate.errors import WouldBlockError
from ckptgate.vfs.interface import FileSystem
from ckptgate_adapters.fuse import channel, data, wire
from ckptgate_adapters.fuse.notify import Notifier, Relay
from ckptgate_adapters.fuse.opens import Backing, BackingTable, journal_path
from ckptgate_adapters.fuse.pool import Pool
from ckptgate_adapters.fuse.request import Context, Reply, Request, pages
from ckptgate_adapters.fuse.session import MAX_IO_BYTES, FuseSession
from ckptgate_adapters.fuse.table import OPERATIONS, SLOW
from ckptgate_adapters.fuse.wire import Notify, Opcode

__all__ = ["FuseServer"]

_log = logging.getLogger(__name__)

_HEAD_BYTES: Final = wire.HEADER_BYTES + wire.WRITE_IN.size
_ERRNO_END: Final = 512
_DRAIN_S: Final = 5.0
_NOTIFY_STOP_S: Final = 1.0
_NAP_S: Final = 0.001
"""For how long a busy thread is left alone with what has come in."""
_LONG_COPY_BYTES: Final = 128 << 10
"""From so many bytes on, another thread gains more than its waking costs."""


@dataclass(slots=True)
class _Buffers:
    """What one protocol thread reads into: the bytes of a WRITE land at the start of `body`."""

    head: bytearray = field(default_factory=lambda: bytearray(_HEAD_BYTES))
    body: memoryview = field(default_factory=lambda: pages(MAX_IO_BYTES + 4096))
    counts: dict[int, int] = field(default_factory=dict[int, int])
    vector: list[wire.Buffer] = field(init=False)
    is_copying: bool = False

    def __post_init__(self) -> None:
        self.vector = [self.head, self.body]

    def content(self, opcode: int, size: int) -> tuple[bytes, wire.Buffer]:
        """Body and payload of a request of *size* bytes."""
        body = bytes(memoryview(self.head)[wire.HEADER_BYTES : size])
        rest = max(size - _HEAD_BYTES, 0)
        if opcode == _WRITE:
            return body, self.body[:rest]
        return (body + self.body[:rest] if rest else body), b""


class FuseServer:
    """Serves a `FileSystem` on a kernel session."""

    def __init__(
        self,
        fs: FileSystem,
        session: FuseSession,
        *,
        threads: int = 2,
        pool_threads: int = 16,
        passthrough: bool = True,
        patience_s: float = 5.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Prepare; nothing is read before `serve`.

        Args:
            fs: what is served.
            session: a fresh session, or one taken over.
            threads: protocol threads, among them the caller of `serve`.
            pool_threads: for requests that wait.
            passthrough: let the kernel read and write the spool files itself where it can.
            patience_s: how long an interrupted request may still begin.
            now_ns: wall clock, ns.
        """
        device = session.fd
        journal = journal_path(session.state_path)
        is_known = journal is not None and os.path.exists(journal)
        self._backing = Backing(
            BackingTable(journal),
            register=lambda fd: channel.backing_open(device, fd),
            unregister=lambda backing_id: channel.backing_close(device, backing_id),
        )
        self._context = Context(
            fs=fs,
            session=session,
            backing=self._backing,
            now_ns=now_ns,
            passthrough=passthrough,
            on_init=self._on_init,
        )
        self._must_distrust = session.is_resumed and session.negotiated is not None and not is_known
        self._threads = threads
        self._patience_s = patience_s
        self._pool = Pool(pool_threads)
        self._notifier = Notifier(Relay(device))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False
        self._failure: OSError | None = None
        self._buffers: list[_Buffers] = []
        self._others: list[threading.Thread] = []

    @property
    def passthrough_state(self) -> str:
        """`on`, `off`, or `off: <why>`."""
        return self._backing.state

    def counts(self) -> dict[str, int]:
        """Requests received so far, by name of their opcode."""
        total: dict[str, int] = {}
        for buffers in list(self._buffers):
            for opcode, count in list(buffers.counts.items()):
                name = Opcode(opcode).name if opcode in _KNOWN else str(opcode)
                total[name] = total.get(name, 0) + count
        return total

    def invalidate_name(self, parent: int, name: str) -> None:
        """What this name means has changed. Never blocks."""
        self._notifier.name(parent, name)

    def invalidate_node(self, ino: int) -> None:
        """Attributes or bytes of this node have changed. Never blocks."""
        self._notifier.node(ino)

    def stop(self) -> None:
        """Make `serve` return without unmounting; safe in a signal handler, may be repeated."""
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        """Serve until the session ends (unmounted, aborted) or `stop`; once per server.

        Raises:
            OSError: the device cannot be read.
        """
        session = self._context.session
        os.set_blocking(session.fd, False)
        self._notifier.start()
        if session.is_resumed:
            self._take_over()
        self._run(is_first=True)
        for thread in self._others:
            thread.join()
        if not self._pool.close(_DRAIN_S):
            _log.warning("requests-unfinished")
        self._notifier.stop(_NOTIFY_STOP_S)
        self._backing.close()
        if self._failure is not None:
            raise self._failure

    def _on_init(self) -> None:
        negotiated = self._context.session.negotiated
        if negotiated is None:
            return
        if negotiated.has_passthrough and self._context.passthrough:
            self._backing.enable()
        _log.info("session-begins fuse=7.%d passthrough=%s", negotiated.minor, self._backing.state)

    def _take_over(self) -> None:
        """Go on where a dead server stopped, and have the kernel send again what it had read."""
        if self._must_distrust:
            self._backing.distrust()
        else:
            self._on_init()
        self._backing.finish_closes()
        session = self._context.session
        try:
            channel.send_notification(session.fd, wire.notification(Notify.RESEND))
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                return
            _log.warning("resend-refused reason=%s hint='needs Linux 6.9 or newer'", exc)

    def _run(self, *, is_first: bool = False) -> None:
        buffers = _Buffers()
        self._buffers.append(buffers)
        try:
            with select.epoll() as ready:
                # Exclusive: of all threads that wait, the first to have registered is woken.
                ready.register(self._context.session.fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                ready.register(self._wake, select.EPOLLIN)
                if is_first:
                    self._start_others()
                while (size := self._receive(ready, buffers, is_first=is_first)) > 0:
                    self._serve_one(buffers, size)
        except OSError as exc:
            _log.exception("device-failed")
            self._failure = exc
        finally:
            # Whatever ended this thread ends the others.
            self.stop()

    def _start_others(self) -> None:
        for number in range(1, self._threads):
            thread = threading.Thread(target=self._run, name=f"fuse-{number}", daemon=True)
            self._others.append(thread)
            thread.start()

    def _receive(self, ready: select.epoll, buffers: _Buffers, *, is_first: bool) -> int:
        """Bytes of the next request; 0 when the session is over."""
        fd = self._context.session.fd
        while True:
            ready.poll(-1, 2)
            if self._is_stopping:
                return 0
            if not is_first and not any(other.is_copying for other in self._buffers):
                time.sleep(_NAP_S)
            try:
                return os.readv(fd, buffers.vector)
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    return 0
                # EAGAIN: another thread has it. ENOENT: it was taken back while it was read.
                if exc.errno not in {errno.EAGAIN, errno.ENOENT, errno.EINTR}:
                    raise

    def _serve_one(self, buffers: _Buffers, size: int) -> None:
        opcode, unique, node, uid, gid, pid = wire.IN_HEADER_USED.unpack_from(buffers.head)
        buffers.counts[opcode] = buffers.counts.get(opcode, 0) + 1
        if opcode in _COPIES and size >= _HEAD_BYTES and self._copy(buffers, size):
            return
        request = Request(opcode, unique, node, uid, gid, pid, *buffers.content(opcode, size))
        if opcode == Opcode.INTERRUPT:
            self._interrupt(request)
        elif opcode in SLOW:
            self._to_pool(request)
        else:
            self._execute(request)
            if opcode == Opcode.DESTROY:
                self.stop()

    def _copy(self, buffers: _Buffers, size: int) -> bool:
        """Serve a plain READ or WRITE; False if it isn't one."""
        head = buffers.head
        opcode, unique = wire.IN_HEADER_USED.unpack_from(head)[:2]
        try:
            if opcode == _READ:
                # A reader asks ahead, so it is not alone even if it is: one thread is faster.
                parts = data.read_at_once(self._context, unique, head)
            else:
                buffers.is_copying = wire.io_size(head) >= _LONG_COPY_BYTES
                payload = buffers.body[: size - _HEAD_BYTES]
                parts = data.write_at_once(self._context, unique, head, payload)
        except Exception:  # noqa: BLE001 - it is done again, where errors are told
            parts = None
        finally:
            buffers.is_copying = False
        if parts is None:
            return False
        self._send(parts)
        return True

    def _interrupt(self, request: Request) -> None:
        """The caller got a signal: what still has not begun after a while is answered EINTR.

        On a local disk these calls are never interrupted, and programs with timers, children or
        io_uring don't expect it. A signal that kills ends the wait in the kernel, unanswered.
        """
        (unique,) = wire.INTERRUPT_IN.unpack_from(request.body)
        if self._pool.is_queued(unique):
            timer = threading.Timer(self._patience_s, self._give_up, (unique,))
            timer.daemon = True
            timer.start()

    def _give_up(self, unique: int) -> None:
        if self._pool.cancel(unique):
            self._send([wire.error_reply(unique, errno.EINTR)])

    def _to_pool(self, request: Request) -> None:
        request.own()
        request.may_block = True
        self._pool.submit(request.unique, lambda: self._execute(request))

    def _execute(self, request: Request) -> None:
        """Serve a request and answer it, whatever happens."""
        try:
            operation = OPERATIONS.get(request.opcode)
            if operation is None:
                self._fail(request, errno.ENOSYS)
                return
            reply = operation(self._context, request)
        except WouldBlockError:
            if request.may_block:
                _log.exception("blocked-on-the-pool opcode=%d", request.opcode)
                self._fail(request, errno.EIO)
            else:
                self._to_pool(request)
        except OSError as exc:
            self._fail(request, _errno_of(request, exc))
        except Exception:  # noqa: BLE001 - the outermost edge of a request
            _log.exception("request-failed opcode=%d node=%d", request.opcode, request.node)
            self._fail(request, errno.EIO)
        else:
            self._finish(request, reply)

    def _finish(self, request: Request, reply: Reply) -> None:
        if reply.settle and self._must_settle(request, reply):
            if not request.may_block:
                request.may_block = True
                self._pool.submit(
                    request.unique, lambda: self._settle(request, reply), can_cancel=False
                )
                return
            self._settle(request, reply)
            return
        self._answer(request, reply)

    def _must_settle(self, request: Request, reply: Reply) -> bool:
        is_close = request.opcode == Opcode.FLUSH
        try:
            return any(self._context.fs.must_settle(n, is_close=is_close) for n in reply.settle)
        except Exception:  # noqa: BLE001 - the mutation is done: its reply must not depend on this
            _log.exception("settle-failed nodes=%s", reply.settle)
            return False

    def _settle(self, request: Request, reply: Reply) -> None:
        is_close = request.opcode == Opcode.FLUSH
        try:
            for ino in reply.settle:
                self._context.fs.settle(request.caller, ino, is_close=is_close)
        except OSError as exc:
            _log.warning("not-settled opcode=%d error=%s", request.opcode, exc)
            if is_close:
                # Only close() may fail after the fact: what it reports is not undone by it.
                self._fail(request, _errno_of(request, exc))
                return
        except Exception:  # noqa: BLE001 - the mutation is done: its reply must not depend on this
            _log.exception("settle-failed nodes=%s", reply.settle)
        self._answer(request, reply)

    def _answer(self, request: Request, reply: Reply) -> None:
        if reply.is_silent:
            return
        parts = reply.parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        sent = self._send([wire.reply_header(request.unique, size), *parts])
        if not sent and reply.undo is not None:
            try:
                reply.undo()
            except Exception:  # noqa: BLE001 - nobody waits for this any more
                _log.exception("undo-failed opcode=%d node=%d", request.opcode, request.node)

    def _fail(self, request: Request, number: int) -> None:
        if request.opcode not in {Opcode.FORGET, Opcode.BATCH_FORGET}:
            self._send([wire.error_reply(request.unique, number)])

    def _send(self, parts: list[wire.Buffer]) -> bool:
        """Whether the kernel took it; False where nobody waits for it any more."""
        try:
            os.writev(self._context.session.fd, parts)
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ENODEV}:
                # The kernel has answered the caller with EIO then.
                _log.exception("reply-refused bytes=%d", sum(map(len, parts)))
            return False
        return True


_KNOWN: Final = frozenset(int(opcode) for opcode in Opcode)
_READ: Final = int(Opcode.READ)
_WRITE: Final = int(Opcode.WRITE)
_COPIES: Final = frozenset({_READ, _WRITE})


def _errno_of(request: Request, exc: OSError) -> int:
    """The errno that the caller gets."""
    number = exc.errno
    if number is None or not 0 < number < _ERRNO_END:
        _log.error(
            "error-without-errno opcode=%d node=%d", request.opcode, request.node, exc_info=exc
        )
        return errno.EIO
    if number == errno.ENOSYS:
        # To the kernel this means: never ask again on this mount.
        return errno.EOPNOTSUPP
    return number
