"""Serving a session: takes requests from the loop, has them served, sends replies.

Thread rule: whoever has read a request serves it. Reading threads never wait: what would block, and
what waits for the disk or for other machines, goes to a pool. Only a change may be held up, by who
has the spool's database; then the other reading thread leaves all changes to their pool. That is
one of their own: however many wait there, looks that have to ask the store go on.

A handler's bug is EIO with a traceback in the log. Nothing a handler does ends the loop.

A server may end before its session does, for a successor. What it has read and not answered then is
sent again to that one; where the kernel doesn't do so, it is waited for, and if it is lost all the
same (a kill), the successor refuses: whoever waits for it would wait for ever.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from ckptgate.errors import UnusableError, WouldBlockError
from ckptgate.ports.meters import NO_METERS, PASSTHROUGH, Meters
from ckptgate.vfs.interface import FileSystem
from ckptgate_adapters.fuse import channel, data, wire
from ckptgate_adapters.fuse.loop import HEAD_BYTES, Buffers, Loop
from ckptgate_adapters.fuse.notify import Notifier, Relay
from ckptgate_adapters.fuse.opens import Backing, BackingTable, journal_path
from ckptgate_adapters.fuse.pool import Pool
from ckptgate_adapters.fuse.request import Context, Reply, Request
from ckptgate_adapters.fuse.session import FuseSession
from ckptgate_adapters.fuse.table import LOOKS, OPERATIONS, SLOW
from ckptgate_adapters.fuse.timing import Timing
from ckptgate_adapters.fuse.wire import Notify, Opcode

__all__ = ["FuseServer"]

_log = logging.getLogger(__name__)

_ERRNO_END: Final = 512
_DRAIN_S: Final = 5.0
"""How long what is being done may go on after the session's end."""
_STOP_S: Final = 0.25
"""The same before a successor, which is sent it again."""
_STOP_FOR_GOOD_S: Final = 60.0
"""The same where it isn't sent again."""
_NOTIFY_STOP_S: Final = 1.0
_LONG_COPY_BYTES: Final = 128 << 10
"""From so many bytes on, another thread gains more than its waking costs."""


class FuseServer:
    """Serves a `FileSystem` on a kernel session."""

    def __init__(
        self,
        fs: FileSystem,
        session: FuseSession,
        *,
        pool_threads: int = 16,
        passthrough: bool = True,
        patience_s: float = 5.0,
        now_ns: Callable[[], int] = time.time_ns,
        meters: Meters = NO_METERS,
    ) -> None:
        """Prepare; nothing is read before `serve`.

        Args:
            fs: what is served.
            session: a fresh session, or one taken over.
            pool_threads: for requests that wait.
            passthrough: let the kernel read and write the spool files itself where it can.
            patience_s: how long an interrupted request may still begin.
            now_ns: wall clock, ns.
            meters: where it is counted.
        """
        device = session.fd
        journal = journal_path(session.state_path)
        is_known = journal is not None and os.path.exists(journal)
        self._backing = Backing(
            BackingTable(journal),
            register=lambda fd: channel.backing_open(device, fd),
            unregister=lambda backing_id: channel.backing_close(device, backing_id),
            told=lambda is_on: meters.set(PASSTHROUGH, float(is_on)),
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
        self._patience_s = patience_s
        self._timing = Timing(meters)
        self._looks = Pool(pool_threads, name="fuse-looks")
        self._changes = Pool(pool_threads, name="fuse-changes")
        self._notifier = Notifier(Relay(device))
        self._loop = Loop(device, self._serve_one)
        self._is_stopped = False

    @property
    def passthrough_state(self) -> str:
        """`on`, `off`, or `off: <why>`."""
        return self._backing.state

    def counts(self) -> dict[str, int]:
        """Requests received so far, by name of their opcode."""
        return {
            Opcode(opcode).name if opcode in _KNOWN else str(opcode): count
            for opcode, count in self._loop.counts().items()
        }

    def invalidate_name(self, parent: int, name: str) -> None:
        """What this name means has changed. Never blocks."""
        self._notifier.name(parent, name)

    def invalidate_node(self, ino: int) -> None:
        """Attributes or bytes of this node have changed. Never blocks."""
        self._notifier.node(ino)

    def stop(self) -> None:
        """Make `serve` return without unmounting; safe in a signal handler, may be repeated."""
        self._is_stopped = True
        self._loop.stop()

    def serve(self) -> bool:
        """Serve until the session ends (unmounted, aborted) or `stop`; once per server.

        Returns:
            Whether all that was read was answered. If not, threads are still at work: the process
            must end at once, without closing what they work with, or they would answer with errors.

        Raises:
            OSError: the device cannot be read.
            UnusableError: a predecessor's requests are lost; the session must be ended.
        """
        session = self._context.session
        os.set_blocking(session.fd, False)
        self._notifier.start()
        if session.is_resumed:
            self._take_over()
        is_settled = False
        try:
            self._loop.run()
        finally:
            is_settled = self._finish_requests()
            if not self._is_stopped:
                # Before a successor nobody waits: that process ends with this one by itself.
                self._notifier.stop(_NOTIFY_STOP_S)
            self._backing.close()
        return is_settled

    def _finish_requests(self) -> bool:
        """Whether all that was read is answered now."""
        negotiated = self._context.session.negotiated
        has_resend = negotiated is None or negotiated.has_resend
        limit_s = (_STOP_S if has_resend else _STOP_FOR_GOOD_S) if self._is_stopped else _DRAIN_S
        until = time.monotonic() + limit_s
        pools = (self._changes, self._looks)
        closed = [pool.close(max(until - time.monotonic(), 0)) for pool in pools]
        is_settled = all(closed)
        if not is_settled:
            _log.warning("requests-unfinished")
        elif not has_resend:
            self._context.session.settle(is_settled=True)
        return is_settled

    def _on_init(self) -> None:
        negotiated = self._context.session.negotiated
        if negotiated is None:
            return
        if not negotiated.has_resend:
            self._context.session.settle(is_settled=False)
        if negotiated.has_passthrough and self._context.passthrough:
            self._backing.enable()
        _log.info("session-begins fuse=7.%d passthrough=%s", negotiated.minor, self._backing.state)

    def _take_over(self) -> None:
        """Go on where another server stopped, and have the kernel send again what it had read."""
        session = self._context.session
        has_resend = session.negotiated is None or session.negotiated.has_resend
        if not has_resend and not session.is_settled:
            msg = "what a dead server had read is lost: the kernel doesn't send it again"
            raise UnusableError(msg, hint="Linux 6.9 or newer does")
        if self._must_distrust:
            self._backing.distrust()
        else:
            self._on_init()
        self._backing.finish_closes()
        if not has_resend:
            return
        try:
            channel.send_notification(session.fd, wire.notification(Notify.RESEND))
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                return
            _log.warning("resend-refused reason=%s", exc)

    def _serve_one(self, buffers: Buffers, size: int, is_alone: bool) -> None:
        began_s = time.monotonic()
        opcode, unique, node, uid, gid, pid = wire.IN_HEADER_USED.unpack_from(buffers.head)
        buffers.counts[opcode] = buffers.counts.get(opcode, 0) + 1
        if opcode in _COPIES and size >= HEAD_BYTES and self._copy(buffers, size):
            self._timing.done(opcode, unique, began_s)
            return
        request = Request(opcode, unique, node, uid, gid, pid, *buffers.content(opcode, size))
        request.began_s = began_s
        if opcode == Opcode.INTERRUPT:
            self._interrupt(request)
        elif opcode in SLOW or (is_alone and not self._is_quick(request)):
            self._to_pool(request)
        else:
            self._execute(request)
            if opcode == Opcode.DESTROY:
                self._loop.stop()

    def _copy(self, buffers: Buffers, size: int) -> bool:
        """Serve a plain READ or WRITE; False if it isn't one."""
        head = buffers.head
        opcode, unique = wire.IN_HEADER_USED.unpack_from(head)[:2]
        try:
            if opcode == _READ:
                # A reader asks ahead, so it is not alone even if it is: one thread is faster.
                parts = data.read_at_once(self._context, unique, head)
            else:
                if wire.io_size(head) >= _LONG_COPY_BYTES:
                    self._loop.copies(buffers)
                payload = buffers.body[: size - HEAD_BYTES]
                parts = data.write_at_once(self._context, unique, head, payload)
        except Exception:  # noqa: BLE001 - it is done again, where errors are told
            parts = None
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
        if any(pool.is_queued(unique) for pool in (self._looks, self._changes)):
            timer = threading.Timer(self._patience_s, self._give_up, (unique,))
            timer.daemon = True
            timer.start()

    def _give_up(self, unique: int) -> None:
        if self._looks.cancel(unique) or self._changes.cancel(unique):
            self._timing.done(Opcode.INTERRUPT, unique, 0.0)
            self._send([wire.error_reply(unique, errno.EINTR)])

    def _to_pool(self, request: Request) -> None:
        request.own()
        request.may_block = True
        self._timing.waits(request.unique, request.began_s)
        pool = self._looks if self._is_look(request) else self._changes
        # The kernel says once that something is forgotten or released, and hears no answer.
        pool.submit(
            request.unique,
            lambda: self._execute(request),
            can_cancel=request.opcode not in _UNANSWERED,
        )

    def _is_quick(self, request: Request) -> bool:
        """Whether a reading thread may serve it where it must not be held up."""
        if request.opcode == Opcode.OPEN:
            return False
        return request.opcode not in _CHANGES or self._is_look(request)

    def _is_look(self, request: Request) -> bool:
        """Whether it changes nothing that others see."""
        if request.opcode == Opcode.OPEN:
            flags = wire.OPEN_IN.unpack_from(request.body)[0]
            return flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC
        if request.opcode == Opcode.FLUSH:
            known = self._context.handles.get(wire.FLUSH_IN.unpack_from(request.body)[0])
            return known is not None and known.is_reader
        return request.opcode in LOOKS

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
                self._timing.waits(request.unique, request.began_s)
                self._changes.submit(
                    request.unique, lambda: self._settle(request, reply), can_cancel=False
                )
                return
            self._settle(request, reply)
            return
        self._answer(request, reply)

    def _must_settle(self, request: Request, reply: Reply) -> bool:
        is_close = request.opcode == Opcode.FLUSH
        try:
            for ino in reply.settle:
                if self._context.fs.must_settle(ino, is_close=is_close):
                    return True
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
        self._timing.done(request.opcode, request.unique, request.began_s)
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
        self._timing.done(request.opcode, request.unique, request.began_s)
        if request.opcode not in _UNANSWERED:
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
_UNANSWERED: Final = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET})
_CHANGES: Final = frozenset(OPERATIONS) - LOOKS - {Opcode.INIT, Opcode.DESTROY, Opcode.WRITE}
"""What a reading thread leaves to the pool while the other one is held up."""


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
