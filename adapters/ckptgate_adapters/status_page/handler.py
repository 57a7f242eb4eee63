"""One HTTP request: what is refused before anything is looked at, and the headers of every answer.

It owns the rules of the door: GET only; over TCP only with a Host that is an address or a name of
this machine, so that no page of the web can have a browser read this one under a name of its own;
no other page may embed or read it, and none of its scripts but its own runs. A request has a time
in which it must have come, however it comes: who is silent, or speaks in drops, soon goes.

Thread rule: one request belongs to one thread.
"""

from __future__ import annotations

import http.server
import io
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Answer", "Asked", "Door", "Handler", "is_own_host"]

_log = logging.getLogger(__name__)

HEAD_S: Final = 2.0
"""In so long a request must have come, from its connection on."""
_BODY_S: Final = 10.0
"""In so long a client must have taken its answer."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NO_CONTENT: Final = "default-src 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request may tell its page.

    Attributes:
        tag: of what the client has (If-None-Match), "" for nothing.
    """

    tag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a page answers.

    Attributes:
        body: all of it.
        content_type: of the body.
        code: HTTP's.
        tag: of the body; equal to what was asked with, it is not sent again.
        policy: Content-Security-Policy.
    """

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    code: int = HTTPStatus.OK
    tag: str = ""
    policy: str = _NO_CONTENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What one listening socket lets through.

    Attributes:
        pages: by path.
        hosts: names in Host beside addresses; None: any, where no browser comes (a unix socket).
        label: names that begin with this one's label are taken, too; "" for none.
    """

    pages: Mapping[str, Callable[[Asked], Answer]]
    hosts: Collection[str] | None
    label: str = ""


def is_own_host(host: str, hosts: Collection[str], label: str = "") -> bool:
    """Whether a request's Host is an address, one of *hosts*, or `<label>.<domain>`.

    A port doesn't matter.
    """
    name = host.strip().lower()
    if name.startswith("["):
        name, bracket, port = name[1:].partition("]")
        is_port = not port or (port.startswith(":") and port[1:].isdecimal())
        return bool(bracket) and is_port and _is_address(name)
    name, colon, port = name.partition(":")
    if colon and not port.isdecimal():
        return False
    is_labelled = bool(label) and name.partition(".")[0] == label
    return _is_address(name) or name.rstrip(".") in hosts or is_labelled


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _Head(io.RawIOBase):
    """What a connection says until its time for that is over."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float]) -> None:
        super().__init__()
        self._connection = connection
        self._clock = clock
        self._due_s = clock() + HEAD_S

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As a socket's; raises TimeoutError once the time is over."""
        left_s = self._due_s - self._clock()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request of a connection, which then ends."""

    door: ClassVar[Door]
    heard: ClassVar[Callable[[socket.socket], None]]
    """Called when a request has come, with its connection."""
    connection: socket.socket
    server_version = "ckptgate"
    sys_version = ""
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        """As the base class, but the request has an end in time."""
        super().setup()
        # The socket stays open for as long as this is.
        self.rfile.close()
        self.rfile = io.BufferedReader(_Head(self.connection, time.monotonic))

    def parse_request(self) -> bool:
        """As the base class: the whole head is there then, or what is no request is answered."""
        is_one = super().parse_request()
        self.connection.settimeout(_BODY_S)
        type(self).heard(self.connection)
        return is_one

    def __getattr__(self, name: str) -> Any:
        """Methods but GET are refused as such, not as unknown."""
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def do_GET(self) -> None:
        """Find the page and send it."""
        if self.door.hosts is not None:
            found = self.headers.get_all("Host", [])
            if len(found) != 1 or not self._is_own(found[0]):
                self._plain(HTTPStatus.MISDIRECTED_REQUEST, "this Host is not served here")
                return
        page = self.door.pages.get(self.path.partition("?")[0])
        if page is None:
            self._plain(HTTPStatus.NOT_FOUND, "no such page")
            return
        tag = self.headers.get("If-None-Match", "")
        try:
            answer = page(Asked(tag=tag))
        except Exception:  # noqa: BLE001 - the outermost edge of a request
            _log.exception("page-failed path=%s", self.path[:200])
            self._plain(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error: see the daemon's log")
            return
        self._send(answer, is_known=bool(answer.tag) and answer.tag == tag)

    def _is_own(self, host: str) -> bool:
        return is_own_host(host, self.door.hosts or (), self.door.label)

    def _refuse_method(self) -> None:
        self._send(
            Answer(body=b"GET only\n", code=HTTPStatus.METHOD_NOT_ALLOWED), extra={"Allow": "GET"}
        )

    def _plain(self, code: int, text: str) -> None:
        self._send(Answer(body=f"{text}\n".encode(), code=code))

    def _send(
        self, answer: Answer, *, is_known: bool = False, extra: Mapping[str, str] | None = None
    ) -> None:
        body = b"" if is_known else answer.body
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else answer.code)
        headers = {
            **_HEADERS,
            "Content-Security-Policy": answer.policy,
            "Content-Type": answer.content_type,
            "Content-Length": str(len(body)),
            **({"ETag": answer.tag} if answer.tag else {}),
            **(extra or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """Requests are in no log; and a unix socket has none."""
        return "-"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its base's name
        """Requests are in no log: a scrape is no change of state."""

    def handle(self) -> None:
        """As the base class, but a client that goes away is no error."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
