"""HTTP on a unix socket in the spool, and on TCP where the configuration says so.

It owns the rule that looking never costs the daemon more than a few threads: each socket has so
many connections of its own at most, and for a new one that goes which has been silent for longest,
so that a health probe always gets through; and that a port which another mount has is no reason to
end, but waited for. At rest nothing runs: threads wait in `accept`.

Thread rule: `start` and `close` belong to one thread; each connection has a thread of its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from ckptgate_adapters.status_page.handler import Answer, Asked, Door, Handler

__all__ = ["PAGE_PATH", "SOCKET_NAME", "Answer", "Asked", "StatusServer", "page_answer"]

_log = logging.getLogger(__name__)

SOCKET_NAME: Final = "status.sock"
PAGE_PATH: Final = "/"
_CONNECTIONS_MAX: Final = 16
_BACKLOG: Final = 128
"""Who finds it full asks again only after a second."""
_LIFE_S: Final = 20.0
"""A connection that is older may be ended for a new one, though its answer is under way."""
_END_S: Final = 1.0
"""Until a thread whose connection was ended is gone."""
_PORT_WAIT_S: Final = 15.0
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_answer() -> Answer:
    """The page itself; its policy lets its own script and style run, and nothing else."""
    text = resources.files("ckptgate_adapters.status_page").joinpath("page.html").read_text()
    hashes: dict[str, str] = {}
    for found in _INLINE.finditer(text):
        digest = base64.b64encode(hashlib.sha256(found[2].encode()).digest()).decode()
        hashes[found[1]] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return Answer(body=text.encode(), content_type="text/html; charset=utf-8", policy=policy)


@dataclass(slots=True)
class _Open:
    """A connection: since when it is there (monotonic), and whether its request has come."""

    at_s: float
    has_asked: bool = False


class _Listener:
    """One listening socket."""

    def __init__(self, sock: socket.socket, door: Door) -> None:
        self._sock = sock
        bound = {"door": door, "heard": self._heard}
        self._handler: Any = type("BoundHandler", (Handler,), bound)
        self._changed = threading.Condition()
        self._is_closed = False
        self._open: dict[socket.socket, _Open] = {}
        self._thread = threading.Thread(target=self._accept, name="status", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Of a TCP socket."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening, and end what is open."""
        self._is_closed = True
        _shut(self._sock)
        self._sock.close()
        with self._changed:
            for connection in self._open:
                _shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._sock.accept()
            except OSError as exc:
                if self._is_closed:
                    return
                # No descriptor is left, or the client was gone already.
                _log.warning("status-not-accepted error=%s", exc)
                time.sleep(1.0)
                continue
            if self._admit(connection):
                thread = threading.Thread(
                    target=self._serve, args=(connection, address), name="status-one", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as exc:
                    # No thread is left; whoever asks later is answered once there is one.
                    _log.warning("status-not-answered error=%s", exc)
                    self._ended(connection)

    def _admit(self, connection: socket.socket) -> bool:
        """Whether there is room; where there is none, another one may have to go."""
        with self._changed:
            if len(self._open) >= _CONNECTIONS_MAX and (gone := self._to_go()) is not None:
                _shut(gone)
                self._changed.wait_for(lambda: gone not in self._open, _END_S)
            if len(self._open) >= _CONNECTIONS_MAX:
                connection.close()
                return False
            self._open[connection] = _Open(time.monotonic())
        return True

    def _to_go(self) -> socket.socket | None:
        """Which connection goes for a new one: the oldest of those that have asked for nothing.

        If all have, the oldest one, if it is old.
        """
        silent = [one for one, known in self._open.items() if not known.has_asked]
        if silent:
            return silent[0]
        oldest, known = next(iter(self._open.items()))
        return oldest if time.monotonic() - known.at_s > _LIFE_S else None

    def _heard(self, connection: socket.socket) -> None:
        with self._changed:
            if connection in self._open:
                self._open[connection].has_asked = True

    def _serve(self, connection: socket.socket, address: object) -> None:
        try:
            self._handler(connection, address, None)
        except Exception:  # noqa: BLE001 - the thread's outermost edge
            _log.exception("status-connection-failed")
        finally:
            self._ended(connection)

    def _ended(self, connection: socket.socket) -> None:
        _shut(connection)
        with self._changed:
            self._open.pop(connection, None)
            self._changed.notify_all()
        connection.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class StatusServer:
    """All listening sockets of one daemon."""

    def __init__(
        self,
        pages: Mapping[str, Callable[[Asked], Answer]],
        *,
        hosts: Collection[str],
        for_others: Collection[str],
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            pages: by path.
            hosts: names that may stand in a request's Host.
            for_others: paths that other machines may ask for.
        """
        self._pages = dict(pages)
        own = socket.gethostname().lower()
        self._label = own.partition(".")[0]
        self._hosts = {"localhost", own, self._label, *(name.lower() for name in hosts)}
        self._for_others = frozenset(for_others)
        self._listeners: list[_Listener] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def listen_in(self, directory: str) -> None:
        """Listen on `status.sock` in *directory*, for whoever may enter it.

        Raises:
            OSError: the socket can't be made.
        """
        path = os.path.join(directory, SOCKET_NAME)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The address of a socket is short, a spool's path need not be.
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.bind(f"/proc/self/fd/{fd}/{SOCKET_NAME}")
        finally:
            os.close(fd)
        os.chmod(path, 0o600)
        self._begin(sock, Door(pages=self._pages, hosts=None))

    def listen_tcp(
        self, host: str, port: int, *, is_for_others: bool, told: Callable[[int], None]
    ) -> None:
        """Listen there, now or as soon as nobody else does; *told* gets the port then."""
        pages = self._pages
        if is_for_others:
            pages = {path: page for path, page in pages.items() if path in self._for_others}
        # What is for others is asked for by whatever domain the machine is called in.
        label = self._label if is_for_others else ""
        door = Door(pages=pages, hosts=frozenset(self._hosts), label=label)
        if not self._try(host, port, door, told, is_first=True):
            threading.Thread(
                target=self._keep_trying,
                args=(host, port, door, told),
                name="status-port",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            self._closed.set()
            for listener in self._listeners:
                listener.close()

    def _keep_trying(self, host: str, port: int, door: Door, told: Callable[[int], None]) -> None:
        while not self._closed.wait(_PORT_WAIT_S):
            if self._try(host, port, door, told, is_first=False):
                return

    def _try(
        self, host: str, port: int, door: Door, told: Callable[[int], None], *, is_first: bool
    ) -> bool:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            listener = self._begin(sock, door)
        except OSError as exc:
            sock.close()
            if is_first:
                hint = "each mount needs a port of its own; trying again until it is free"
                _log.warning(
                    "status-not-served address=%s port=%d error=%s hint=%r", host, port, exc, hint
                )
            return False
        if listener is not None:
            _log.info("status-served address=%s port=%d", host, listener.port)
            told(listener.port)
        return True

    def _begin(self, sock: socket.socket, door: Door) -> _Listener | None:
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return None
            sock.listen(_BACKLOG)
            listener = _Listener(sock, door)
            self._listeners.append(listener)
            return listener
