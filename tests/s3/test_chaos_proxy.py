"""Each fault of the chaos proxy does what it says: what the server saw, what the client heard."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.s3 import faults
from tests.s3.chaos import ALWAYS, ChaosProxy, chaos
from tests.s3.wire import Kind, Reply, Request

PUT = ("PUT", "/b/key", b"0123456789")
GET = ("GET", "/b/key", b"")


class Upstream:
    """A server that stores nothing, and remembers what it was asked, and how much of it came."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                try:
                    body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                except ConnectionError:
                    body = b"?"
                outer.asked.append((self.command, self.path, body))
                answer = b"answer-%d" % len(outer.asked)
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.send_header("ETag", '"e"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_GET = do_HEAD = do_POST = do_DELETE = do_PUT  # noqa: N815

            def log_message(self, *args: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                return

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    yield made
    made.close()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[ChaosProxy]:
    with chaos(upstream.server.server_port) as made:
        yield made


def ask(
    proxy: ChaosProxy,
    method: str,
    target: str,
    body: bytes = b"",
    timeout: float = 5,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """One request on a connection of its own: status and body."""
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    try:
        client.request(method, target, body=body or None, headers=headers or {})
        reply = client.getresponse()
        return reply.status, reply.read()
    finally:
        client.close()


def is_reset(proxy: ChaosProxy, method: str, target: str, body: bytes = b"") -> bool:
    try:
        ask(proxy, method, target, body)
    except (ConnectionError, http.client.HTTPException):
        return True
    return False


def test_without_a_rule_all_passes(proxy: ChaosProxy, upstream: Upstream):
    assert ask(proxy, *PUT) == (200, b"answer-1")
    assert ask(proxy, *GET) == (200, b"answer-2")
    assert ask(proxy, "HEAD", "/b/key") == (200, b"")
    assert upstream.asked == [PUT, GET, ("HEAD", "/b/key", b"")]
    assert [request.kind for request in proxy.seen] == [Kind.PUT, Kind.GET, Kind.HEAD]


def test_one_connection_serves_many_requests(proxy: ChaosProxy):
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    for number in (1, 2):
        client.request("GET", "/b/key")
        assert client.getresponse().read() == b"answer-%d" % number
    client.close()


@pytest.mark.parametrize(
    ("method", "target", "headers", "kind"),
    [
        ("POST", "/b/k?uploads", {}, Kind.CREATE_UPLOAD),
        ("PUT", "/b/k?partNumber=1&uploadId=u", {}, Kind.UPLOAD_PART),
        (
            "PUT",
            "/b/k?partNumber=1&uploadId=u",
            {"x-amz-copy-source": "b/a"},
            Kind.UPLOAD_PART_COPY,
        ),
        ("POST", "/b/k?uploadId=u", {}, Kind.COMPLETE),
        ("DELETE", "/b/k?uploadId=u", {}, Kind.ABORT),
        ("GET", "/b/k?uploadId=u&max-parts=1000", {}, Kind.LIST_PARTS),
        ("GET", "/b?uploads&prefix=a", {}, Kind.LIST_UPLOADS),
        ("PUT", "/b/k", {}, Kind.PUT),
        ("PUT", "/b/k", {"x-amz-copy-source": "b/a"}, Kind.COPY),
        ("HEAD", "/b/k", {}, Kind.HEAD),
        ("GET", "/b/a/k", {}, Kind.GET),
        ("GET", "/b/k?attributes", {}, Kind.ATTRIBUTES),
        ("GET", "/b?list-type=2&prefix=a%2F", {}, Kind.LIST),
        ("GET", "/b/?list-type=2", {}, Kind.LIST),
        ("DELETE", "/b/k", {}, Kind.DELETE),
        ("POST", "/b?delete", {}, Kind.DELETE_MANY),
        ("HEAD", "/b", {}, Kind.BUCKET),
        ("GET", "/b?versioning", {}, Kind.BUCKET),
    ],
)
def test_requests_are_told_apart(method, target, headers, kind):
    request = Request(method, target, headers, b"")
    assert request.kind is kind


def test_a_rule_counts_only_its_own_kind_and_meets_the_nth(proxy: ChaosProxy):
    rule = proxy.rule(faults.error_before(503, "SlowDown"), Kind.PUT, nth=2, times=2)
    found = []
    for _ in range(4):
        assert ask(proxy, *GET)[0] == 200
        found.append(ask(proxy, *PUT)[0])
    assert found == [200, 503, 503, 200]
    assert [request.nth for request in rule.met] == [2, 3]
    assert (proxy.count(Kind.PUT), proxy.count(Kind.GET)) == (4, 4)


def test_a_rule_may_look_at_the_request(proxy: ChaosProxy):
    proxy.rule(
        faults.error_before(403, "AccessDenied"), times=ALWAYS, where=lambda r: r.key == "x/y"
    )
    assert ask(proxy, "PUT", "/b/x/z", b"1")[0] == 200
    assert ask(proxy, "PUT", "/b/x%2Fy", b"1")[0] == 403
    proxy.clear()
    assert ask(proxy, "PUT", "/b/x/y", b"1")[0] == 200


def test_a_dropped_reply_is_of_a_request_that_was_done(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(faults.drop_reply)
    assert is_reset(proxy, *PUT)
    assert upstream.asked == [PUT]


def test_a_dropped_request_never_arrives(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(faults.drop_request)
    assert is_reset(proxy, *PUT)
    assert upstream.asked == []


def test_a_late_request_arrives_when_it_is_let_land(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(faults.late)
    assert is_reset(proxy, *PUT)
    assert upstream.asked == []
    assert [reply.body for reply in proxy.land()] == [b"answer-1"]
    assert upstream.asked == [PUT]
    assert proxy.land() == []


def test_a_late_copy_arrives_beside_the_request(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(faults.late_copy)
    assert ask(proxy, *PUT) == (200, b"answer-1")
    assert len(proxy.land()) == 1
    assert upstream.asked == [PUT, PUT]


@pytest.mark.parametrize("at", [0, 4, -1])
def test_a_reset_in_the_body_lets_the_server_see_only_its_beginning(proxy, upstream, at):
    proxy.rule(faults.reset_request(at))
    assert is_reset(proxy, *PUT)
    deadline = time.monotonic() + 5
    while not upstream.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    # It reads until the connection ends, in front of the rest or with the reset.
    assert upstream.asked[0][2] in (PUT[2][: 5 if at < 0 else at], b"?")


def test_during_a_request_something_may_happen_to_the_server(proxy, upstream):
    happened = threading.Event()
    proxy.rule(faults.during(happened.set, 4))
    assert is_reset(proxy, *PUT)
    assert happened.is_set()
    assert PUT not in upstream.asked


@pytest.mark.parametrize(
    ("fault", "heard"), [(faults.duplicate, b"answer-2"), (faults.duplicate_unheard, b"answer-1")]
)
def test_a_duplicate_reaches_the_server_twice(proxy, upstream, fault, heard):
    proxy.rule(fault)
    assert ask(proxy, *PUT) == (200, heard)
    assert upstream.asked == [PUT, PUT]


@pytest.mark.parametrize(("fault", "asked"), [(faults.stall, []), (faults.stall_after, [PUT])])
def test_a_stalled_request_ends_by_the_client_s_time_out(proxy, upstream, fault, asked):
    proxy.rule(fault)
    with pytest.raises(TimeoutError):
        ask(proxy, *PUT, timeout=0.2)
    assert upstream.asked == asked


def test_bits_flip_on_the_way_to_the_server(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(faults.flip_request(3, bit=1))
    assert ask(proxy, *PUT)[0] == 200
    assert upstream.asked[0][2] == b"0121456789"


def test_bits_flip_on_the_way_to_the_client(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(faults.flip_reply(7))
    assert ask(proxy, *GET) == (200, b"answer-0")
    assert upstream.asked == [GET]


def test_a_truncated_reply_ends_in_its_body(proxy: ChaosProxy):
    proxy.rule(faults.truncate_reply(3))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy, *GET)
    assert caught.value.partial == b"ans"


def test_an_error_before_or_after_the_effect_is_the_same_to_the_client(proxy, upstream):
    proxy.rule(faults.error_before(500, "InternalError"))
    status, body = ask(proxy, *PUT)
    assert (status, upstream.asked) == (500, [])
    assert b"<Code>InternalError</Code>" in body
    proxy.clear()
    proxy.rule(faults.error_after(500, "InternalError"))
    assert ask(proxy, *PUT) == (status, body)
    assert upstream.asked == [PUT]


def test_an_error_to_a_head_has_no_body(proxy: ChaosProxy):
    proxy.rule(faults.error_before(403, "AccessDenied"), Kind.HEAD)
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    for status in (403, 200):
        client.request("HEAD", "/b/key")
        reply = client.getresponse()
        assert (reply.status, reply.read()) == (status, b"")
    client.close()


@pytest.mark.parametrize("is_done", [True, False])
def test_an_error_may_come_with_status_200(proxy, upstream, is_done):
    proxy.rule(faults.error_in_200(is_done=is_done), Kind.COMPLETE)
    status, body = ask(proxy, "POST", "/b/k?uploadId=u", b"<x/>")
    assert status == 200
    assert body.strip().startswith(b"<?xml")
    assert b"InternalError" in body
    assert bool(upstream.asked) is is_done


def test_a_delayed_request_takes_at_least_so_long(proxy: ChaosProxy):
    proxy.rule(faults.delay(0.1))
    began = time.monotonic()
    assert ask(proxy, *GET)[0] == 200
    assert time.monotonic() - began >= 0.1


def test_heads_may_be_edited_both_ways(proxy: ChaosProxy, upstream: Upstream):
    proxy.rule(
        faults.edit_request(lambda r: r.without("x-cut")),
        Kind.GET,
        where=lambda r: "x-cut" in r.headers,
    )
    rule = proxy.rule(
        faults.edit_reply(lambda reply: reply.with_headers(etag=None, x_new="1")), Kind.PUT
    )
    assert ask(proxy, *GET, headers={"x-cut": "1"})[0] == 200
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    client.request("PUT", "/b/key", body=b"1")
    reply = client.getresponse()
    assert (reply.headers["etag"], reply.headers["x-new"]) == (None, "1")
    client.close()
    assert len(rule.met) == 1


def test_a_scripted_answer_needs_no_server():
    with chaos(1) as proxy:
        proxy.rule(faults.answer(lambda request, body: Reply.made(200, body * 2, "text/plain")))
        assert ask(proxy, *PUT) == (200, PUT[2] * 2)
        assert is_reset(proxy, *PUT), "there is no server at port 1"


def test_a_client_that_waits_for_100_is_told_to_go_on(proxy: ChaosProxy, upstream: Upstream):
    assert ask(proxy, *PUT, headers={"Expect": "100-continue"})[0] == 200
    assert upstream.asked == [PUT]


def test_chunked_bodies_pass_both_ways(proxy: ChaosProxy):
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    proxy.rule(faults.answer(lambda request, body: Reply.made(200, body, "text/plain")))
    client.request("PUT", "/b/key", body=iter([b"abc", b"de"]), encode_chunked=True)
    assert client.getresponse().read() == b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    client.close()
