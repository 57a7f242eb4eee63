"""The loop: reads requests, has them served, sends replies.

Thread rule: one thread at a time reads the device (the others wait for their turn, so an idle
server has one sleeping poll), and whoever has read a request serves it. Protocol threads never
wait: what would block, and what waits for the disk or for other machines, goes to the pool.

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
from ckptgate.vfs.interface import Caller, FileSystem
from ckptgate_adapters.fuse import channel, wire
from ckptgate_adapters.fuse.notify import Notifier, Relay
from ckptgate_adapters.fuse.opens import Backing, BackingTable, journal_path
from ckptgate_adapters.fuse.pool import Pool
from ckptgate_adapters.fuse.request import Context, Reply, Request
from ckptgate_adapters.fuse.session import MAX_IO_BYTES, FuseSession
from ckptgate_adapters.fuse.table import OPERATIONS, SLOW
from ckptgate_adapters.fuse.wire import Notify, Opcode

__all__ = ["FuseServer"]

_log = logging.getLogger(__name__)

_HEAD_BYTES: Final = wire.HEADER_BYTES + wire.WRITE_IN.size
_ERRNO_END: Final = 512
_DRAIN_S: Final = 5.0
_NOTIFY_STOP_S: Final = 1.0


@dataclass(slots=True)
class _Buffers:
    """What one protocol thread reads into: the bytes of a WRITE land at the start of `body`."""

    head: bytearray = field(default_factory=lambda: bytearray(_HEAD_BYTES))
    body: memoryview = field(default_factory=lambda: memoryview(bytearray(MAX_IO_BYTES + 4096)))
    counts: dict[int, int] = field(default_factory=dict[int, int])


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
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Prepare; nothing is read before `serve`.

        Args:
            fs: what is served.
            session: a fresh session, or one taken over.
            threads: protocol threads, among them the caller of `serve`.
            pool_threads: for requests that wait.
            passthrough: let the kernel read and write the spool files itself where it can.
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
        self._pool = Pool(pool_threads)
        self._notifier = Notifier(Relay(device))
        self._turn = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(device, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._is_stopping = False
        self._failure: OSError | None = None
        self._counts: list[dict[int, int]] = []

    @property
    def passthrough_state(self) -> str:
        """`on`, `off`, or `off: <why>`."""
        return self._backing.state

    def counts(self) -> dict[str, int]:
        """Requests received so far, by name of their opcode."""
        total: dict[str, int] = {}
        for counts in list(self._counts):
            for opcode, count in list(counts.items()):
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
        others = [
            threading.Thread(target=self._run, name=f"fuse-{number}", daemon=True)
            for number in range(1, self._threads)
        ]
        for thread in others:
            thread.start()
        self._run()
        for thread in others:
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

    def _run(self) -> None:
        buffers = _Buffers()
        self._counts.append(buffers.counts)
        try:
            while (size := self._receive(buffers)) > 0:
                self._serve_one(buffers, size)
        except OSError as exc:
            _log.exception("device-failed")
            self._failure = exc
        finally:
            # Whatever ended this thread ends the others.
            self.stop()

    def _receive(self, buffers: _Buffers) -> int:
        """Bytes of the next request; 0 when the session is over."""
        fd = self._context.session.fd
        vector: list[wire.Buffer] = [buffers.head, buffers.body]
        with self._turn:
            while not self._is_stopping:
                try:
                    return os.readv(fd, vector)
                except BlockingIOError:
                    self._poll.poll()
                except OSError as exc:
                    if exc.errno == errno.ENODEV:
                        return 0
                    # ENOENT: the request was taken back while it was read.
                    if exc.errno not in {errno.ENOENT, errno.EINTR}:
                        raise
        return 0

    def _serve_one(self, buffers: _Buffers, size: int) -> None:
        request = _parse(buffers, size)
        buffers.counts[request.opcode] = buffers.counts.get(request.opcode, 0) + 1
        if request.opcode == Opcode.INTERRUPT:
            self._interrupt(request)
        elif request.opcode in SLOW:
            self._to_pool(request)
        else:
            self._execute(request)
        if request.opcode == Opcode.DESTROY:
            self.stop()

    def _interrupt(self, request: Request) -> None:
        """The caller got a signal: what has not begun yet is answered EINTR."""
        (unique,) = wire.INTERRUPT_IN.unpack_from(request.body)
        if self._pool.cancel(unique):
            self._send(wire.error_reply(unique, errno.EINTR), ())

    def _to_pool(self, request: Request) -> None:
        request.own()
        request.allow_block()
        if not self._pool.submit(request.unique, lambda: self._execute(request)):
            self._fail(request, errno.EINTR)

    def _execute(self, request: Request) -> None:
        """Serve a request and answer it, whatever happens."""
        try:
            operation = OPERATIONS.get(request.opcode)
            if operation is None:
                self._fail(request, errno.ENOSYS)
                return
            reply = operation(self._context, request)
        except WouldBlockError:
            if request.caller.may_block:
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
            if not request.caller.may_block:
                request.allow_block()
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
        size = sum(len(part) for part in reply.parts)
        header = wire.reply_header(request.unique, size)
        if not self._send(header, reply.parts) and reply.undo is not None:
            try:
                reply.undo()
            except Exception:  # noqa: BLE001 - nobody waits for this any more
                _log.exception("undo-failed opcode=%d node=%d", request.opcode, request.node)

    def _fail(self, request: Request, number: int) -> None:
        if request.opcode not in {Opcode.FORGET, Opcode.BATCH_FORGET}:
            self._send(wire.error_reply(request.unique, number), ())

    def _send(self, header: bytes, parts: tuple[wire.Buffer, ...]) -> bool:
        """Whether the kernel took it; False where nobody waits for it any more."""
        try:
            os.writev(self._context.session.fd, [header, *parts])
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ENODEV}:
                # The kernel has answered the caller with EIO then.
                _log.exception("reply-refused bytes=%d", len(header))
            return False
        return True


_KNOWN: Final = frozenset(int(opcode) for opcode in Opcode)


def _parse(buffers: _Buffers, size: int) -> Request:
    """The request in *buffers*."""
    _, opcode, unique, node, uid, gid, pid, _, _ = wire.IN_HEADER.unpack_from(buffers.head)
    caller = Caller(uid, gid, pid)
    body = bytes(buffers.head[wire.HEADER_BYTES : size])
    rest = size - _HEAD_BYTES
    if opcode == Opcode.WRITE:
        return Request(opcode, unique, node, caller, body, buffers.body[: max(rest, 0)])
    if rest > 0:
        body += bytes(buffers.body[:rest])
    return Request(opcode, unique, node, caller, body)


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
