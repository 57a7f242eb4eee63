"""Unix sockets in the spool: wake-ups, invalidations, and the command line's control socket.

A lost datagram costs latency and nothing else, so sending never blocks and never fails. A wake-up
is sent only if the receiver began no look at its work since the last one: it marks each beginning
in a number that all processes have mapped. Whatever else somebody sends there ends nothing: what is
no message is dropped, and who says nothing is not waited for. Socket
paths are limited to 107 bytes, a spool's path is not: addresses go through a directory descriptor.
Any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Annotated, Any, Final

import msgspec

from ckptgate.errors import CkptError, ErrorKind, UnusableError, UsageError
from ckptgate_adapters.mapped_number import MappedNumber

__all__ = [
    "CONTROL_SOCKET",
    "MOUNT_SOCKET",
    "PUBLISHER_SOCKET",
    "ControlServer",
    "DatagramInvalidations",
    "DatagramReceiver",
    "DatagramWaker",
    "Invalidation",
    "RemoteError",
    "address_in",
    "bind_in",
    "control_call",
    "error_reply",
    "read_invalidation",
]

_log = logging.getLogger(__name__)

PUBLISHER_SOCKET: Final = "publisher.sock"
MOUNT_SOCKET: Final = "mount.sock"
CONTROL_SOCKET: Final = "control.sock"
_MAX_REQUEST_BYTES: Final = 1 << 20
_MAX_REPLY_BYTES: Final = 256 << 20
_CONNECTIONS_MAX: Final = 64
"""Of the control socket, at a time; whoever comes then waits in its backlog."""
_REQUEST_S: Final = 10.0
"""How long somebody may take for a request, from its connection on."""
_ACCEPT_PAUSE_S: Final = 0.1
_Number = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


@contextlib.contextmanager
def address_in(directory: str, name: str) -> Generator[str]:
    """A short address of the socket *name* in *directory*; raises OSError if that is missing."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def bind_in(kind: socket.SocketKind, directory: str, name: str) -> socket.socket:
    """A new socket *name* in *directory*, in the place of an old one; for its owner alone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, name))
    sock = socket.socket(socket.AF_UNIX, kind)
    with address_in(directory, name) as address:
        sock.bind(address)
    os.chmod(os.path.join(directory, name), 0o600)
    return sock


def _armed_path(directory: str, name: str) -> str:
    """Where a receiver says that it wants to be woken."""
    return os.path.join(directory, f"{name}.armed")


class _DatagramSender:
    """Sends datagrams to a socket that may come, go and be bound again."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._name = name
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError), address_in(self._directory, self._name) as address:
            self._sock.sendto(data, address)


class DatagramWaker:
    """`ports.catalog.Waker` by datagram."""

    def __init__(self, spool_path: str) -> None:
        self._sender = _DatagramSender(spool_path, PUBLISHER_SOCKET)
        self._armed = MappedNumber(_armed_path(spool_path, PUBLISHER_SOCKET))

    def wake(self) -> None:
        """Tell the publisher that there is work."""
        if self._armed.get():
            self._armed.set(0)
            self._sender.send(b"w")


class DatagramInvalidations:
    """`ports.catalog.Invalidations` by datagrams to the mount process."""

    def __init__(self, spool_path: str) -> None:
        self._sender = _DatagramSender(spool_path, MOUNT_SOCKET)

    def name(self, parent: int, name: str) -> None:
        """The name means something else now."""
        self._sender.send(json.dumps({"parent": parent, "name": name}).encode())

    def node(self, ino: int) -> None:
        """The node's attributes or content changed."""
        self._sender.send(json.dumps({"node": ino}).encode())


class Invalidation(msgspec.Struct, frozen=True, kw_only=True):
    """What `DatagramInvalidations` sent: a node, or a name in a directory."""

    node: _Number | None = None
    parent: _Number | None = None
    name: str = ""


def read_invalidation(data: bytes) -> Invalidation | None:
    """The message in a datagram; None, and a line in the log, for what is none."""
    try:
        # Not by msgspec alone: names that aren't UTF-8 have halves of pairs in them.
        found = msgspec.convert(json.loads(data), Invalidation)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        _log.warning("message-not-understood message=%r error=%s", data[:200], exc)
        return None
    if found.node is None and (found.parent is None or not found.name):
        _log.warning("message-not-understood message=%r error=%s", data[:200], "nothing is named")
        return None
    return found


class DatagramReceiver:
    """The receiving end of either datagram socket."""

    def __init__(self, spool_path: str, name: str) -> None:
        self._sock = bind_in(socket.SOCK_DGRAM, spool_path, name)
        self._armed = MappedNumber(_armed_path(spool_path, name))
        self._armed.set(1)

    def wait(self, timeout_s: float | None) -> bytes | None:
        """The next datagram, or None after *timeout_s* or when closed."""
        self._sock.settimeout(timeout_s)
        try:
            return self._sock.recv(1 << 16)
        except OSError:
            # A wake-up that was lost (its sender was killed, or had no descriptor left) keeps none
            # that come later from being sent.
            self._armed.set(1)
            return None

    def drain(self) -> None:
        """Drop what has come meanwhile: one wake-up is as good as many.

        What is done after this call is seen by the look that follows, or sends another one.
        """
        self._sock.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                self._sock.recv(1 << 16)
        self._armed.set(1)

    def close(self) -> None:
        """Stop receiving."""
        self._sock.close()
        self._armed.close()


class RemoteError(CkptError):
    """An error that the daemon answered; it has the original's kind, errno and exit code."""

    @staticmethod
    def of(reply: dict[str, Any]) -> RemoteError:
        """From the daemon's answer."""
        error = RemoteError(
            str(reply["message"]),
            subject=str(reply.get("subject", "")),
            hint=str(reply.get("hint", "")),
            errno_value=int(reply["errno"]),
        )
        error.kind = ErrorKind(reply["kind"])
        for cls in CkptError.__subclasses__():
            if cls.kind is error.kind:
                error.exit_code = cls.exit_code
        return error


def control_call(spool_path: str, request: dict[str, Any], *, timeout_s: float = 60.0) -> Any:
    """Ask the daemon of a spool and return its result.

    Raises:
        UnusableError: no daemon answers.
        RemoteError: it answered with an error.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            with address_in(spool_path, CONTROL_SOCKET) as address:
                sock.connect(address)
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as stream:
                line = stream.readline(_MAX_REPLY_BYTES)
    except OSError as exc:
        msg = f"the daemon of the spool {spool_path} does not answer: {exc}"
        raise UnusableError(
            msg, subject=spool_path, hint="see <spool>/ckptgate.log, or mount again"
        ) from exc
    if not line.endswith(b"\n"):
        msg = f"the daemon of the spool {spool_path} ended while it answered"
        raise UnusableError(msg, subject=spool_path, hint="call again")
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise RemoteError.of(reply["error"])
    return reply["result"]


class ControlServer:
    """Answers requests of the command line, each connection on a thread of its own."""

    def __init__(self, spool_path: str, answer: Callable[[dict[str, Any]], Any]) -> None:
        self._answer = answer
        self._sock = bind_in(socket.SOCK_STREAM, spool_path, CONTROL_SOCKET)
        self._sock.listen(128)
        self._is_closed = False
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _serve(self) -> None:
        while not self._is_closed:
            self._room.acquire()
            try:
                conn, _ = self._sock.accept()
            except OSError as exc:
                self._room.release()
                if not self._is_closed:
                    # No descriptor is left: whoever waits is answered once there is one.
                    _log.warning("control-not-accepted error=%s", exc)
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                threading.Thread(target=self._one, args=(conn,), daemon=True).start()
            except RuntimeError as exc:
                # No thread is left; who asked asks again.
                _log.warning("control-not-accepted error=%s", exc)
                conn.close()
                self._room.release()

    def _one(self, conn: socket.socket) -> None:
        try:
            with conn, contextlib.suppress(OSError):
                self._answer_on(conn)
        finally:
            self._room.release()

    def _answer_on(self, conn: socket.socket) -> None:
        line = _read_line(conn)
        conn.settimeout(None)
        if _is_given_up(conn):
            # It came while this process stood still: whoever asked was told that it failed.
            _log.warning("request-given-up request=%r", line[:200])
            return
        conn.sendall(json.dumps(self._reply(line)).encode() + b"\n")

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            return {"result": self._answer(_request(line))}
        except CkptError as exc:
            return {"error": error_reply(exc)}
        except Exception as exc:  # noqa: BLE001 - outer edge: a bad request must not end the daemon
            _log.exception("control-failed request=%r", line[:200])
            return {"error": error_reply(CkptError(f"internal error: {exc!r}"))}


def _request(line: bytes) -> dict[str, Any]:
    """What was asked.

    Raises:
        UsageError: it is no request.
    """
    try:
        # Not by msgspec alone: paths that aren't UTF-8 have halves of pairs in them.
        return msgspec.convert(json.loads(line), dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        msg = f"what came is no request: {exc}"
        raise UsageError(msg) from exc


def _read_line(conn: socket.socket) -> bytes:
    """The request, with its end where it has one.

    Raises:
        OSError: it isn't there in time, however it comes, or there is none.
    """
    deadline = time.monotonic() + _REQUEST_S
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_REQUEST_BYTES:
        conn.settimeout(max(deadline - time.monotonic(), 1e-3))
        data = conn.recv(1 << 16)
        if not data:
            break
        line += data
        if time.monotonic() > deadline:
            raise TimeoutError
    if not line:
        # Somebody only looked whether anybody is there.
        raise ConnectionResetError
    return bytes(line)


def _is_given_up(conn: socket.socket) -> bool:
    """Whether nobody waits for the answer any more."""
    try:
        return conn.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def error_reply(exc: CkptError) -> dict[str, Any]:
    """An error as JSON values; `RemoteError.of` is the inverse."""
    return {
        "kind": str(exc.kind),
        "message": exc.message,
        "subject": exc.subject,
        "hint": exc.hint,
        "errno": exc.errno,
    }
