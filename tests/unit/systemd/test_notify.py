"""The protocol between a service and its manager, against a socket that says what arrived."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptgate_adapters.systemd import has_manager, notify, received_fds, watchdog_s


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path: Path, monkeypatch) -> Iterator[socket.socket]:
    name = str(tmp_path / "notify") if request.param == "path" else f"\0ckptgate-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        yield listener


def test_what_is_told_arrives_as_one_message(manager: socket.socket):
    assert has_manager()
    assert notify("READY=1", "STATUS=two lines\nin one")
    assert manager.recv(4096) == b"READY=1\nSTATUS=two lines in one"


def test_a_long_status_is_cut(manager: socket.socket):
    notify("STATUS=" + "x" * 100_000)
    message = manager.recv(1 << 20)
    assert len(message) < 500
    assert message.endswith(b"...")


def test_descriptors_go_along(manager: socket.socket, tmp_path: Path):
    (tmp_path / "kept").write_text("kept")
    with (tmp_path / "kept").open() as stream:
        assert notify("FDSTORE=1", "FDNAME=fuse", fds=[stream.fileno()])
    message, fds, _, _ = socket.recv_fds(manager, 4096, 4)
    assert message == b"FDSTORE=1\nFDNAME=fuse"
    (fd,) = fds
    assert os.read(fd, 10) == b"kept"
    os.close(fd)


def test_where_nobody_listens_nothing_happens(monkeypatch, tmp_path: Path, caplog):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not has_manager()
    assert not notify("READY=1")
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not notify("READY=1")
    assert "notify-failed" in caplog.text


@pytest.mark.parametrize(
    ("limit", "pid", "found"),
    [
        ("60000000", None, 60.0),
        ("60000000", "self", 60.0),
        ("60000000", "1", None),
        ("", None, None),
        ("soon", None, None),
        ("0", None, None),
    ],
)
def test_the_watchdog_is_this_process_s_own(monkeypatch, limit, pid, found):
    monkeypatch.setenv("WATCHDOG_USEC", limit)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "self" else pid)
    assert watchdog_s() == found


def test_kept_descriptors_are_found_by_name_and_are_another_process_s_no_more(monkeypatch):
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    kept = [os.dup(fd) for fd in range(3, 6)]
    try:
        for at, fd in enumerate(fds):
            os.dup2(fd, 3 + at)
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "3")
        monkeypatch.setenv("LISTEN_FDNAMES", "fuse:other:fuse")
        assert received_fds() == {"fuse": [3, 5], "other": [4]}
        assert not any(os.get_inheritable(fd) for fd in (3, 4, 5))
        monkeypatch.setenv("LISTEN_PID", "1")
        assert received_fds() == {}
        monkeypatch.delenv("LISTEN_PID")
        assert received_fds() == {}
    finally:
        for at, fd in enumerate(kept):
            os.dup2(fd, 3 + at)
            os.close(fd)
        for fd in fds:
            if fd not in {3, 4, 5}:
                os.close(fd)
