"""A null S3 server: `python -m bench.null_s3 CONTENT`, so that what is measured is the client.

Large bodies are thrown away by the kernel (MSG_TRUNC), and every large object is said to hold the
first bytes of the file CONTENT, which a GET sends with sendfile. Small bodies are kept: records,
votes and manifests work, put-if-absent too, and a small body without the checksum that is said is
refused. Of large ones it believes what clients say, and says it again, as it can't know better. No
signatures are looked at. A thread serves each connection.

The first line of its output is its port; `GET /` answers how many requests of each kind it has had.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
from dataclasses import dataclass
from urllib.parse import unquote

from bench.null_s3_store import Answer, Ask, NullStore

__all__ = ["main"]

KEPT_BYTES = 1 << 20
"""Bodies that are not larger are kept."""
PIECE_BYTES = 4 << 20
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class Connection:
    """One client's connection: heads are parsed, bodies kept or thrown away."""

    sock: socket.socket
    store: NullStore
    content: int
    nowhere: mmap.mmap
    ahead: bytes = b""
    """Received, and not yet used."""

    def serve(self) -> None:
        """Answer until the client leaves."""
        with self.sock, contextlib.suppress(ConnectionError, EOFError):
            while True:
                self._one()

    def _one(self) -> None:
        while (end := self.ahead.find(b"\r\n\r\n")) < 0:
            self.ahead += self._received()
        head, self.ahead = self.ahead[:end], self.ahead[end + 4 :]
        ask = _parsed(head)
        if "expect" in ask.headers:
            self.sock.sendall(INTERIM)
        length = int(ask.headers.get("content-length", "0"))
        if ask.headers.get("transfer-encoding", "") == "chunked":
            ask.size, ask.body = self._chunks()
        elif length > KEPT_BYTES:
            ask.size = length
            self._throw_away(length)
        else:
            while len(self.ahead) < length:
                self.ahead += self._received()
            ask.size, ask.body, self.ahead = length, self.ahead[:length], self.ahead[length:]
        self._answer(ask, self.store.answer(ask))

    def _answer(self, ask: Ask, answer: Answer) -> None:
        lines = [f"HTTP/1.1 {answer.status} X", f"Content-Length: {answer.length}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        head = "\r\n".join((*lines, "", "")).encode()
        if ask.method == "HEAD":
            self.sock.sendall(head)
        elif answer.body or not answer.length:
            self.sock.sendall(head + answer.body)
        else:
            self.sock.sendall(head, socket.MSG_MORE)
            self._send_content(answer.offset, answer.length)

    def _send_content(self, offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            sent = os.sendfile(self.sock.fileno(), self.content, offset, end - offset)
            if not sent:
                raise EOFError
            offset += sent

    def _throw_away(self, length: int) -> None:
        left = length - len(self.ahead)
        self.ahead = self.ahead[length:]
        flags = socket.MSG_TRUNC | socket.MSG_WAITALL
        while left > 0:
            got = self.sock.recv_into(self.nowhere, min(left, PIECE_BYTES), flags)
            if not got:
                raise EOFError
            left -= got

    def _chunks(self) -> tuple[int, bytes]:
        """Size and (small) bytes of a body in HTTP's chunks."""
        size, kept = 0, bytearray()
        while True:
            while (end := self.ahead.find(b"\r\n")) < 0:
                self.ahead += self._received()
            length = int(self.ahead[:end].split(b";")[0], 16)
            self.ahead = self.ahead[end + 2 :]
            while len(self.ahead) < length + 2:
                self.ahead += self._received()
            if size + length <= KEPT_BYTES:
                kept += self.ahead[:length]
            self.ahead = self.ahead[length + 2 :]
            if not length:
                return size, bytes(kept) if size <= KEPT_BYTES else b""
            size += length

    def _received(self) -> bytes:
        got = self.sock.recv(1 << 16)
        if not got:
            raise EOFError
        return got


def _parsed(head: bytes) -> Ask:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    path, _, query = target.partition("?")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return Ask(
        method=method,
        bucket=bucket,
        key=key,
        query={unquote(name): unquote(value.replace("+", " ")) for name, _, value in pairs},
        headers=headers,
    )


def main() -> None:
    """Serve on a free port of 127.0.0.1 until killed."""
    content = os.open(sys.argv[1], os.O_RDONLY)
    store = NullStore(os.fstat(content).st_size)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nowhere = mmap.mmap(-1, PIECE_BYTES)
            served = Connection(sock, store, content, nowhere)
            threading.Thread(target=served.serve, daemon=True).start()


if __name__ == "__main__":
    main()
