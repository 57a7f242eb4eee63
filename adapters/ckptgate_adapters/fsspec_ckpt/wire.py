"""What client and daemon say to each other: one message a packet, descriptors beside it.

Owns the rules of the frames: a request is one packet of at most `REQUEST_BYTES_MAX`; a reply is one
or several packets, of which all but the last say that there are more. Everything is strictly typed:
what doesn't decode ends the connection. Any thread; one request at a time on a connection.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections.abc import Generator, Sequence
from typing import Any, Final

import msgspec

from ckptgate import errors
from ckptgate.errors import CkptError, ErrorKind
from ckptgate_adapters.fsspec_ckpt.messages import Failed, Reply, Request

__all__ = [
    "CLIENT_SOCKET",
    "REPLY_BYTES_MAX",
    "REQUEST_BYTES_MAX",
    "address",
    "decode_reply",
    "decode_request",
    "encode",
    "error_of",
    "failure_of",
    "receive",
    "send",
]

CLIENT_SOCKET: Final = "clients.sock"
REQUEST_BYTES_MAX: Final = 96 << 10
"""Two paths of 4 KiB, or an extended attribute of 64 KiB."""
REPLY_BYTES_MAX: Final = 96 << 10

_CLASSES: Final[dict[str, type[CkptError]]] = {
    str(cls.kind): cls
    for cls in (getattr(errors, name) for name in reversed(errors.__all__))
    if isinstance(cls, type) and issubclass(cls, CkptError)
}
_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Request)
_REPLIES: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The packet of a message.

    Raises:
        OSError: EMSGSIZE: it is larger than the other side takes.
    """
    data = _ENCODER.encode(message)
    limit = REPLY_BYTES_MAX if isinstance(message, Reply) else REQUEST_BYTES_MAX
    if len(data) > limit:
        msg = f"a message of {len(data)} bytes is too long: {limit} are possible"
        raise OSError(errno.EMSGSIZE, msg)
    return data


def decode_request(data: bytes) -> Request:
    """The request in a packet; msgspec.MsgspecError if it is none."""
    request: Request = _REQUESTS.decode(data)
    return request


def decode_reply(data: bytes) -> Reply:
    """The reply in a packet; msgspec.MsgspecError if it is none."""
    reply: Reply = _REPLIES.decode(data)
    return reply


@contextlib.contextmanager
def address(directory: str) -> Generator[str]:
    """A short address of the socket in a spool, whose path may be longer than sockets take."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{CLIENT_SOCKET}"
    finally:
        os.close(fd)


def send(sock: socket.socket, data: bytes, fd: int = -1) -> None:
    """Send one packet, with a descriptor unless that is -1."""
    if fd < 0:
        sock.send(data, socket.MSG_NOSIGNAL)
        return
    rights = array.array("i", [fd])
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, limit: int, *, takes_fd: bool) -> tuple[bytes, int]:
    """The next packet and the descriptor that came with it, -1 for none; b"" at the end.

    Descriptors that nobody asked for are closed.

    Raises:
        ConnectionError: the packet is larger than *limit*.
    """
    space = socket.CMSG_SPACE(array.array("i").itemsize) if takes_fd else 0
    data, ancillary, flags, _ = sock.recvmsg(limit, space, socket.MSG_CMSG_CLOEXEC)
    fds = _descriptors(ancillary)
    if flags & socket.MSG_TRUNC or len(fds) > 1:
        for fd in fds:
            os.close(fd)
        msg = f"a packet of more than {limit} bytes, or with {len(fds)} descriptors"
        raise ConnectionError(msg)
    return data, fds[0] if fds else -1


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return list(fds)


def failure_of(exc: OSError, number: int) -> Failed:
    """An error as a reply."""
    if isinstance(exc, CkptError):
        return Failed(
            errno=number,
            kind=str(exc.kind),
            message=exc.message,
            subject=exc.subject,
            hint=exc.hint,
        )
    return Failed(errno=number, kind=str(ErrorKind.INTERNAL), message=exc.strerror or str(exc))


def error_of(failed: Failed, path: str) -> OSError:
    """The error that a client sees: Python's own class where the errno has one, else ours."""
    plain = OSError(failed.errno, failed.message, path or None)
    if type(plain) is not OSError:
        if failed.hint:
            plain.add_note(f"hint: {failed.hint}")
        return plain
    return _CLASSES.get(failed.kind, CkptError)(
        failed.message, subject=failed.subject, hint=failed.hint, errno_value=failed.errno
    )
