"""One connection on which ranges of objects are asked for, as HTTP/1.1, and put where they belong.

A body goes from the socket into the caller's memory by as few calls as there can be: what costs is
then the kernel's copy alone. Only what a range's answer looks like is understood here; all else is
an error, which says nothing of the object. Any thread; one request at a time.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
import struct
from collections.abc import Mapping
from typing import Final

__all__ = ["Connection", "NoAnswerError"]

_HEAD_MAX: Final = 64 * 1024
_PIECE_BYTES: Final = 4096
_TIMEVAL: Final = struct.Struct("@ll")
_STATUS: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3})(?: [^\r\n]*)?\r\n")
_END: Final = b"\r\n\r\n"


class NoAnswerError(http.client.HTTPException):
    """It ended before the first byte of an answer: nobody may have heard the question."""


class Connection:
    """An open connection.

    Args:
        host: where to.
        port: its number.
        stall_s: a call that gets no byte within it fails.
        context: of TLS; None without.

    Attributes:
        headers: of the last answer.
    """

    def __init__(
        self, host: str, port: int, *, stall_s: float, context: ssl.SSLContext | None
    ) -> None:
        self.headers = http.client.HTTPMessage()
        self._ahead = b""
        self._flags = 0
        self._sock = socket.create_connection((host, port), timeout=stall_s)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._sock = context.wrap_socket(self._sock, server_hostname=host)
            else:
                self._wait_in_the_kernel(stall_s)
        except BaseException:
            # An interrupt, too, must not keep the socket: nobody else has it yet.
            self._sock.close()
            raise

    def close(self) -> None:
        """End it, whatever is under way."""
        self._sock.close()

    def ask(self, target: str, headers: Mapping[str, str]) -> int:
        """Send a GET; the answer's status, once its head is here.

        Raises:
            NoAnswerError: it was closed before.
            OSError, HTTPException: it can't be sent, or what comes is no answer.
        """
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
        try:
            self._sock.sendall("\r\n".join((*lines, "", "")).encode("latin-1"))
            head = self._sock.recv(_PIECE_BYTES)
        except ConnectionError as exc:
            raise NoAnswerError(type(exc).__name__) from exc
        if not head:
            raise NoAnswerError("closed")
        while (end := head.find(_END)) < 0:
            more = self._sock.recv(_PIECE_BYTES)
            if not more or len(head) > _HEAD_MAX:
                raise http.client.HTTPException("a head that doesn't end")
            head += more
        match = _STATUS.match(head)
        if match is None:
            raise http.client.HTTPException("no status of HTTP/1.1")
        self._ahead = head[end + len(_END) :]
        self.headers = http.client.parse_headers(io.BytesIO(head[match.end() : end + len(_END)]))
        return int(match.group(1))

    def fill(self, view: memoryview) -> None:
        """Take the next bytes of the body, as many as *view* has.

        Raises:
            OSError, HTTPException: it ends, or stalls, before.
        """
        done = min(len(self._ahead), len(view))
        view[:done] = self._ahead[:done]
        self._ahead = self._ahead[done:]
        while done < len(view):
            count = self._sock.recv_into(view[done:], len(view) - done, self._flags)
            if not count:
                raise http.client.HTTPException(f"{len(view) - done} bytes are missing")
            done += count

    @property
    def is_reusable(self) -> bool:
        """Whether another question may follow, once the body was taken."""
        return not self._ahead and self.headers.get("Connection", "").lower() != "close"

    def _wait_in_the_kernel(self, stall_s: float) -> None:
        """Have one call wait for all of a body, instead of one for each piece that arrives."""
        seconds = int(stall_s)
        limit = _TIMEVAL.pack(seconds, int((stall_s - seconds) * 1e6))
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._flags = socket.MSG_WAITALL
