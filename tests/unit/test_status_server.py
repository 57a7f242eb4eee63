"""The status page's server: who is let in, what every answer says, and what it costs to ask."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptgate_adapters.status_page import Answer, Asked, StatusServer, handler, server
from ckptgate_adapters.status_page.handler import is_own_host
from ckptgate_adapters.status_page.server import SOCKET_NAME, page_answer

PAGES: dict[str, Callable[[Asked], Answer]] = {
    "/": lambda _: page_answer(),
    "/status.json": lambda asked: Answer(body=b"{}", content_type="application/json", tag='"t"'),
    "/metrics": lambda _: Answer(body=b"x 1\n"),
    "/bug": lambda _: Answer(body=str(1 // 0).encode()),
}


class Served:
    def __init__(self, made: StatusServer, directory: Path) -> None:
        self.made, self.directory = made, directory
        self.ports: list[int] = []

    def listen(self, host: str = "127.0.0.1", port: int = 0, *, is_for_others: bool = False) -> int:
        self.made.listen_tcp(host, port, is_for_others=is_for_others, told=self.ports.append)
        return self.ports[-1] if self.ports else 0

    def get(
        self, path: str = "/", method: str = "GET", **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[-1], timeout=30)
        with contextlib.closing(connection):
            connection.request(
                method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
            )
            answer = connection.getresponse()
            return answer, answer.read()

    def raw(self, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.ports[-1]), 30) as sock:
            sock.sendall(sent)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = StatusServer(PAGES, hosts=("Node.example",), for_others=("/metrics",))
    yield Served(made, tmp_path)
    made.close()


def test_every_answer_forbids_what_a_page_could_do_with_it(served: Served):
    served.listen()
    for path in ("/", "/status.json", "/metrics", "/nothing", "/bug"):
        answer, _ = served.get(path)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Python" not in answer.headers["Server"]


def test_only_the_page_s_own_script_and_style_may_run(served: Served):
    served.listen()
    answer, body = served.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert re.search(r"script-src 'sha256-[\w+/=]+';", policy)
    text = body.decode()
    # No build step, no other machine, and no name can become markup.
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"']*""", text) == []
    assert not re.findall(r"https?://", text)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    assert not re.findall(r"\son\w+=|style=", text)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "FOO"])
def test_only_get_is_answered(served: Served, method: str):
    served.listen()
    answer, _ = served.get("/status.json", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200), ("localhost:{port}", 200), ("[::1]:{port}", 200),
        ("LOCALHOST", 200), ("node.example", 200), ("node.example.:1", 200),
        (socket.gethostname(), 200), (socket.gethostname() + ".evil.example", 421),
        ("evil.example:{port}", 421), ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1@evil.example", 421), ("[::1", 421), ("[::1]evil.example", 421), ("", 421),
        ("127.0.0.1:x", 421), ("localhost\tevil", 421),
    ],
)  # fmt: skip
def test_a_foreign_host_is_refused(served: Served, host: str, status: int):
    """A website whose name leads here can't have a browser read the page (DNS rebinding)."""
    port = served.listen()
    answer, body = served.get("/status.json", Host=host.format(port=port))
    assert answer.status == status
    if status != 200:
        assert b"{}" not in body


def test_two_hosts_or_none_are_refused(served: Served):
    served.listen()
    two = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert b" 421 " in served.raw(two).split(b"\r\n")[0]
    assert b" 421 " in served.raw(b"GET /metrics HTTP/1.0\r\n\r\n").split(b"\r\n")[0]


@pytest.mark.parametrize("sent", [
    b"\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"<script>alert(1)</script> / HTTP/1.1\r\nHost: localhost\r\n\r\n",
])  # fmt: skip
def test_bad_requests_get_no_page_and_end_nothing(served: Served, sent: bytes, caplog):
    """I13."""
    served.listen()
    answer = served.raw(sent)
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert b"<script>" not in answer
    assert served.get("/metrics")[0].status == 200
    assert not [r for r in caplog.records if "failed" in r.message]


def test_a_bug_in_a_page_is_told_in_the_log_alone(served: Served, caplog):
    served.listen()
    answer, body = served.get("/bug")
    assert answer.status == 500
    assert b"ZeroDivision" not in body
    assert "page-failed" in caplog.text


def test_what_a_client_has_is_not_sent_again(served: Served):
    served.listen()
    answer, body = served.get("/status.json", If_None_Match='"t"')
    assert (answer.status, body) == (304, b"")
    assert served.get("/status.json", If_None_Match='"other"')[1] == b"{}"


def test_other_machines_are_told_numbers_alone(served: Served):
    served.listen(is_for_others=True)
    assert served.get("/metrics")[0].status == 200
    assert served.get("/")[0].status == served.get("/status.json")[0].status == 404
    own = socket.gethostname().partition(".")[0]
    assert served.get("/metrics", Host=f"{own}.cluster.example:9469")[0].status == 200
    assert served.get("/metrics", Host=f"x{own}.cluster.example")[0].status == 421


def test_the_spool_s_socket_is_its_owner_s_and_asks_for_no_host(served: Served):
    deep = served.directory / ("d" * 120)
    deep.mkdir()
    served.made.listen_in(str(deep))
    assert os.stat(deep / SOCKET_NAME).st_mode & 0o777 == 0o600
    fd = os.open(deep, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"/proc/self/fd/{fd}/{SOCKET_NAME}")
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert sock.makefile("rb").read().endswith(b"x 1\n")
    os.close(fd)
    # Another publisher takes it over.
    again = StatusServer(PAGES, hosts=(), for_others=())
    again.listen_in(str(deep))
    again.close()


def test_a_port_that_another_mount_has_is_waited_for(served: Served, monkeypatch, caplog):
    monkeypatch.setattr(server, "_PORT_WAIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        served.listen(port=port)
        assert not served.ports
        assert "status-not-served" in caplog.text
    deadline = time.monotonic() + 60
    while not served.ports:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert served.get("/metrics")[0].status == 200


@contextlib.contextmanager
def silent(address: tuple[str, int] | str, count: int = 40) -> Iterator[list[socket.socket]]:
    """Connections that ask for nothing."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            made.append(socket.socket(family))
            made[-1].settimeout(60)
            made[-1].connect(address)
        yield made
    finally:
        for sock in made:
            sock.close()


def threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("status-one")


def test_a_probe_gets_through_though_silent_connections_take_all_room(served: Served, monkeypatch):
    """However long they may be silent; and they take no more than their share."""
    monkeypatch.setattr(handler, "HEAD_S", 3600.0)
    port = served.listen()
    with silent(("127.0.0.1", port)) as others:
        for _ in range(3):
            assert served.get("/metrics")[0].status == 200
        assert threads() <= server._CONNECTIONS_MAX
        # The oldest had to go.
        assert others[0].recv(1) == b""


def test_sockets_have_room_of_their_own(served: Served, monkeypatch):
    monkeypatch.setattr(handler, "HEAD_S", 3600.0)
    served.made.listen_in(str(served.directory))
    served.listen()
    path = str(served.directory / SOCKET_NAME)
    with silent(path, server._CONNECTIONS_MAX) as others:
        assert served.get("/metrics")[0].status == 200
        others[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert others[0].makefile("rb").read().endswith(b"x 1\n")


def test_answers_that_are_under_way_are_not_ended_for_new_connections(served: Served, monkeypatch):
    is_due, asked = threading.Event(), threading.Semaphore(0)

    def slow(_: Asked) -> Answer:
        asked.release()
        is_due.wait(60)
        return Answer(body=b"late\n")

    monkeypatch.setitem(PAGES, "/slow", slow)
    monkeypatch.setattr(server, "_END_S", 0.0)
    made = StatusServer(PAGES, hosts=(), for_others=())
    busy = Served(made, served.directory)
    port = busy.listen()
    with silent(("127.0.0.1", port), server._CONNECTIONS_MAX) as others:
        for sock in others:
            sock.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in others:
            assert asked.acquire(timeout=60)
        assert busy.raw(b"") == b""
        # One that is old may go.
        monkeypatch.setattr(server, "_LIFE_S", 0.0)
        assert busy.raw(b"") == b""
        is_due.set()
        answers = [sock.makefile("rb").read() for sock in others]
    assert [b"late" in answer for answer in answers] == [False] + [True] * (len(answers) - 1)
    made.close()


def test_a_head_must_have_come_in_its_time_however_it_comes(monkeypatch):
    """On a clock of its own: a client that sends a byte now and then has no more time."""
    now = [0.0]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        head = handler._Head(ours, lambda: now[0])
        got = bytearray(1)
        for _ in range(4):
            theirs.send(b"G")
            assert head.readinto(got) == 1
            now[0] += handler.HEAD_S / 4
        theirs.send(b"G")
        with pytest.raises(TimeoutError):
            head.readinto(got)


def test_who_is_silent_is_sent_away(served: Served, monkeypatch):
    monkeypatch.setattr(handler, "HEAD_S", 0.05)
    port = served.listen()
    with silent(("127.0.0.1", port), 3) as others:
        others[1].sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert [sock.recv(1) for sock in others] == [b""] * 3


def test_after_the_end_nobody_is_answered(served: Served):
    port = served.listen()
    served.made.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 5).recv(1)


def test_ipv6_loopback_is_served(served: Served):
    if not os.path.exists("/proc/net/if_inet6") or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    port = served.listen("::1")
    with contextlib.closing(http.client.HTTPConnection("::1", port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200


def test_hosts_are_compared_whatever_their_case():
    assert is_own_host(" LocalHost:80 ", {"localhost"})
    assert not is_own_host("localhost:80:90", {"localhost"})


def test_an_end_in_order_is_no_line_in_the_log(served: Served, caplog):
    served.listen()
    served.made.listen_in(str(served.directory))
    served.made.close()
    deadline = time.monotonic() + 60
    while any(thread.name == "status" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not [r for r in caplog.records if r.levelname in {"WARNING", "ERROR"}]


def test_a_moment_without_threads_is_no_end_of_the_page(served: Served, monkeypatch):
    """I13."""
    served.listen()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert served.raw(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") == b""
    assert served.get("/metrics")[1] == b"x 1\n"
