"""What comes to the daemon's sockets is anything: it ends nothing, and keeps nobody waiting."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptgate.app.keeper import _Keeper
from ckptgate_adapters import channels
from ckptgate_adapters.channels import (
    CONTROL_SOCKET,
    MOUNT_SOCKET,
    ControlServer,
    DatagramInvalidations,
    DatagramReceiver,
    address_in,
    control_call,
    read_invalidation,
)

DEEP = b'{"op": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MESSAGES = st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode())


def test_what_is_sent_to_the_mount_is_what_is_read(tmp_path: Path):
    """Names that are no UTF-8 among it."""
    receiver, sender = (
        DatagramReceiver(str(tmp_path), MOUNT_SOCKET),
        DatagramInvalidations(str(tmp_path)),
    )
    with contextlib.closing(receiver), contextlib.closing(sender._sender._sock):
        sender.name(1, "a\udcff'\"\n")
        sender.node(1 << 62)
        found = [read_invalidation(receiver.wait(10) or b"") for _ in range(2)]
    assert [(it.node, it.parent, it.name) for it in found if it is not None] == [
        (None, 1, "a\udcff'\"\n"),
        (1 << 62, None, ""),
    ]


@settings(max_examples=50, deadline=None)
@given(MESSAGES)
def test_what_is_no_message_is_dropped(data: bytes):
    """I13: the threads that read them would end with an error."""
    found = read_invalidation(data)
    assert found is None or found.node is not None or (found.parent and found.name)


@pytest.mark.parametrize("data", [
    DEEP, b"", b"w", b"{}", b'{"node": 0}', b'{"node": -1}', b'{"node": 1e3}', b'{"node": "1"}',
    b'{"node": 18446744073709551616}', b'{"parent": 1}', b'{"parent": 1, "name": ""}',
    b'{"name": "x"}', b'{"parent": 1, "name": 3}',
])  # fmt: skip
def test_known_nonsense_is_dropped_and_told_in_the_log(data: bytes, caplog):
    assert read_invalidation(data) is None
    assert "message-not-understood" in caplog.text


@settings(max_examples=50, deadline=None)
@given(MESSAGES.filter(lambda data: b'"end"' not in data and b'"command"' not in data))
@example(DEEP)
def test_what_is_no_message_leaves_the_keeper_as_it_was(data: bytes):
    """I13: after an upgrade in place a newer release speaks to it."""
    keeper = _Keeper()
    assert not keeper.takes(b'{"command": ["a", "b"], "abort": "/x"}', (3, 4))
    assert not keeper.takes(data, ())
    assert (keeper.command, keeper.abort, keeper.fds) == (["a", "b"], "/x", (3, 4))


class Control:
    """A control socket that says what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.asked: list[dict[str, Any]] = []
        self.server = ControlServer(self.directory, self.answer)

    def answer(self, request: dict[str, Any]) -> Any:
        self.asked.append(request)
        return len(self.asked)

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(60)
        with address_in(self.directory, CONTROL_SOCKET) as address:
            made.connect(address)
        return made

    def raw(self, sent: bytes) -> bytes:
        with self.connect() as sock, contextlib.suppress(OSError):
            sock.sendall(sent)
            if not sent.endswith(b"\n"):
                sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))
        return b""


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    made = Control(tmp_path)
    yield made
    made.server.close()


def test_a_request_may_name_paths_that_are_no_utf_8(control: Control):
    control.server.start()
    control_call(control.directory, {"op": "status", "path": "a\udcff"})
    assert control.asked == [{"op": "status", "path": "a\udcff"}]


@pytest.mark.parametrize("sent", [
    b"", b"\n", b"{}", b"\xff\n", b"[]\n", b"3\n", b'{"op"\n', DEEP + b"\n", b"x" * (3 << 20),
], ids=range(9))  # fmt: skip
def test_a_bad_request_gets_an_error_and_the_next_one_an_answer(control: Control, sent: bytes):
    """I13."""
    control.server.start()
    answer = control.raw(sent)
    assert answer.startswith(b'{"error"') or not sent.endswith(b"\n")
    asked = len(control.asked)
    assert control_call(control.directory, {"op": "x"}) == asked + 1


def test_who_says_nothing_or_speaks_in_drops_does_not_keep_others_out(
    control: Control, monkeypatch
):
    monkeypatch.setattr(channels, "_REQUEST_S", 0.2)
    control.server.start()
    silent = [control.connect() for _ in range(2 * channels._CONNECTIONS_MAX)]
    is_over = threading.Event()

    def drip() -> None:
        with control.connect() as sock, contextlib.suppress(OSError):
            while not is_over.wait(0.01):
                sock.send(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert control_call(control.directory, {"op": "x"}) == 1
        # Whoever speaks in drops is sent away, too.
        thread.join(60)
        assert not thread.is_alive()
    finally:
        is_over.set()
        for sock in silent:
            sock.close()


def test_a_moment_without_descriptors_or_threads_is_no_end_of_the_socket(
    control: Control, monkeypatch, caplog
):
    """I13."""
    monkeypatch.setattr(channels, "_ACCEPT_PAUSE_S", 0.001)
    accept, start = socket.socket.accept, threading.Thread.start
    fails = iter([OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENFILE, "x")])

    def failing_accept(sock: socket.socket) -> Any:
        for error in fails:
            raise error
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing_accept)
    control.server.start()
    assert control_call(control.directory, {"op": "x"}) == 1

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert control.raw(b'{"op": "x"}\n') == b""
    assert threading.Thread.start is start
    assert control_call(control.directory, {"op": "x"}) == 2
    assert caplog.text.count("control-not-accepted") == 3
