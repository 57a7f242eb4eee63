"""The daemon's side of `ckpt://`: connections, each with a thread of its own.

Owns the rules who may speak to a daemon (its own user, and root) and how much it may ask for: one
client's requests never hold up another's, and what a client says wrongly ends its connection only.
Thread rule: `start` and `close` once each, the rest from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ckptgate.model.jobkey import WORLD_SIZE_MAX, JobKey, RankInfo
from ckptgate.ports.catalog import Invalidations
from ckptgate.vfs.interface import Caller, ClientFileSystem
from ckptgate_adapters.fsspec_ckpt import messages, wire
from ckptgate_adapters.fsspec_ckpt.identity import ClientIdentity
from ckptgate_adapters.fsspec_ckpt.journal import Journal, Owner
from ckptgate_adapters.fsspec_ckpt.operations import Operations
from ckptgate_adapters.fsspec_ckpt.sessions import FILES_MAX, PING_S, Session, Sessions

__all__ = ["ClientServer"]

_log = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("3i")
_CONNECTIONS_MAX: Final = 1024
_HELLO_S: Final = 30.0
_PAUSE_S: Final = 0.1
_ERRNO_END: Final = 512
_JOB_CHARS_MAX: Final = 4096
_SESSION_CHARS: Final = 32


class ClientServer:
    """Serves a `ClientFileSystem` on a socket in the spool."""

    def __init__(
        self,
        fs: ClientFileSystem,
        spool_path: str,
        *,
        identity: ClientIdentity,
        invalidations: Invalidations | None = None,
    ) -> None:
        """Take over what a predecessor of this process had open; nothing is served yet.

        Args:
            fs: what is served.
            spool_path: where the socket is.
            identity: what *fs* asks who somebody is.
            invalidations: tell a kernel to which the same names are served.
        """
        self._fs = fs
        self._identity = identity
        self._invalidations = invalidations
        self._journal = Journal(spool_path)
        self._sessions = Sessions(fs, self._journal, identity)
        self._count = 0
        self._lock = threading.Lock()
        self._is_stopping = False
        self._sock = _bind(spool_path)

    @property
    def idle_s(self) -> float:
        """How long there was no client, in seconds; 0 while there is one."""
        return self._sessions.idle_s

    def wait_unused(self, is_late: Callable[[], bool]) -> None:
        """Return once no client has a file open, or *is_late*."""
        while self._sessions.has_files and not is_late():
            time.sleep(_PAUSE_S)

    def start(self) -> None:
        """Begin to serve."""
        self._sock.listen(128)
        for work in (self._accept, lambda: self._sessions.watch(lambda: self._is_stopping)):
            threading.Thread(target=work, name="clients", daemon=True).start()

    def close(self) -> None:
        """Stop serving. What clients have open stays open in the spool, for a successor."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._sessions.close()
        self._journal.close()

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                connection, _ = self._sock.accept()
            except OSError as exc:
                if exc.errno in {errno.EINVAL, errno.EBADF}:
                    # It was closed.
                    return
                # No descriptor is left: whoever waits is served once there is one.
                _log.warning("client-not-accepted error=%s", exc)
                threading.Event().wait(0.1)
                continue
            with self._lock:
                is_room = self._count < _CONNECTIONS_MAX
                self._count += 1
            try:
                if not is_room:
                    raise RuntimeError("too many connections")
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as exc:
                _log.warning("client-refused error=%s", exc)
                self._ended(connection)

    def _ended(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._count -= 1

    def _serve(self, connection: socket.socket) -> None:
        """One connection from its beginning to its end."""
        tid = 0
        session: Session | None = None
        operations: Operations | None = None
        try:
            pid, uid, gid = _peer(connection)
            if uid not in {0, os.geteuid()}:
                _log.warning("client-refused uid=%d pid=%d", uid, pid)
                return
            connection.settimeout(_HELLO_S)
            hello = self._hello(connection)
            connection.settimeout(None)
            tid = self._introduced(pid, hello)
            owner = Owner(max(pid, 0), self._identity.process(tid).start, hello.session)
            session = self._sessions.join(owner, connection, hello.held)
            welcome = messages.Told(text=self._journal.epoch, ping_s=0.0 if owner.pid else PING_S)
            wire.send(connection, wire.encode(welcome))
            operations = Operations(
                self._fs,
                session,
                self._journal,
                Caller(uid, gid, tid, may_block=True),
                invalidations=self._invalidations,
                is_gone=lambda: _is_gone(connection),
            )
            while self._one(connection, operations):
                pass
        except (msgspec.MsgspecError, ConnectionError, PermissionError, ValueError) as exc:
            if not isinstance(exc, (BrokenPipeError, ConnectionResetError)):
                _log.warning("client-misbehaves error=%s", exc)
        except OSError as exc:
            if not self._is_stopping:
                _log.info("client-lost error=%s", exc)
        except Exception:  # noqa: BLE001 - the outermost edge of a thread
            _log.exception("client-failed")
        finally:
            if session is not None:
                unsure = 0 if operations is None else operations.unsure
                self._sessions.leave(session, connection, unsure)
            self._identity.forget(tid)
            self._ended(connection)

    def _hello(self, connection: socket.socket) -> messages.Hello:
        """All packets of a hello as one."""
        hello = _hello_packet(connection)
        bytes.fromhex(hello.session)
        held = list(hello.held)
        last = hello
        while last.has_more:
            last = _hello_packet(connection)
            held += last.held
            is_one = last.held and last.session == hello.session
            if not is_one or len(held) > FILES_MAX:
                raise ConnectionError("the packets of a hello do not belong together")
        hello = msgspec.structs.replace(hello, held=tuple(held), has_more=False)
        if hello.version != messages.VERSION:
            message = f"the daemon speaks version {messages.VERSION}, the client {hello.version}"
            hint = "use the same release of ckptgate"
            failed = messages.Failed(
                errno=errno.EPROTONOSUPPORT, kind="unusable", message=message, hint=hint
            )
            wire.send(connection, wire.encode(failed))
            raise ConnectionError(message)
        return hello

    def _introduced(self, pid: int, hello: messages.Hello) -> int:
        rank = None
        if hello.rank is not None and hello.world_size is not None:
            if not 0 <= hello.rank < hello.world_size <= WORLD_SIZE_MAX:
                raise ConnectionError("there is no such rank")
            rank = RankInfo(hello.rank, hello.world_size)
        if len(hello.job) > _JOB_CHARS_MAX:
            raise ConnectionError("the job's name is too long")
        job = JobKey.parse(hello.job) if hello.job else None
        return self._identity.introduce(max(pid, 0), job=job, rank=rank)

    def _one(self, connection: socket.socket, operations: Operations) -> bool:
        """Serve the next request; False at the end."""
        data, _ = wire.receive(connection, wire.REQUEST_BYTES_MAX, takes_fd=False)
        if not data:
            return False
        request = wire.decode_request(data)
        # Whoever asks for something else has heard of what it opened.
        operations.unsure = 0
        try:
            for answer in operations.answers(request):
                try:
                    wire.send(connection, wire.encode(answer.told), answer.fd)
                finally:
                    if answer.is_own_fd:
                        os.close(answer.fd)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except OSError as exc:
            wire.send(connection, wire.encode(wire.failure_of(exc, _errno_of(exc))))
        except Exception:  # noqa: BLE001 - a bug is this request's error
            _log.exception("request-failed request=%s", type(request).__name__)
            failed = messages.Failed(
                errno=errno.EIO, kind="internal", message="internal error of the daemon"
            )
            wire.send(connection, wire.encode(failed))
        return True


def _hello_packet(connection: socket.socket) -> messages.Hello:
    data, _ = wire.receive(connection, wire.REQUEST_BYTES_MAX, takes_fd=False)
    if not data:
        raise ConnectionResetError("nothing was asked")
    hello = wire.decode_request(data)
    if not isinstance(hello, messages.Hello) or len(hello.session) != _SESSION_CHARS:
        raise ConnectionError("the first request is no hello")
    return hello


def _errno_of(exc: OSError) -> int:
    number = exc.errno
    return number if number is not None and 0 < number < _ERRNO_END else errno.EIO


def _bind(spool_path: str) -> socket.socket:
    path = os.path.join(spool_path, wire.CLIENT_SOCKET)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with wire.address(spool_path) as short:
        sock.bind(short)
    os.chmod(path, 0o600)
    return sock


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of whoever connected; pid 0 in another pid namespace."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid


def _is_gone(connection: socket.socket) -> bool:
    """Whether the client has hung up while its request is being served."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
