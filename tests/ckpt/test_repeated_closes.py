"""What a close that is sent again means, and what a client's connections see of a new daemon."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from contextlib import contextmanager
from typing import Any

import pytest
from tests.e2e.harness import until

from ckptgate.vfs.interface import Opened
from ckptgate_adapters.fsspec_ckpt import messages, wire
from ckptgate_adapters.fsspec_ckpt.journal import Journal, Owner
from ckptgate_adapters.fsspec_ckpt.sessions import Sessions

SESSION = "5" * 32
OWNER = Owner(os.getpid(), 1, SESSION)


class _Client:
    """A connection that says what it likes."""

    def __init__(self, place, session: str, held: tuple[int, ...] = ()) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        with wire.address(str(place.spool)) as short:
            self.sock.connect(short)
        self.ask(messages.Hello(version=messages.VERSION, session=session, held=held))

    def ask(self, request: messages.Request) -> messages.Reply:
        wire.send(self.sock, wire.encode(request))
        data, fd = wire.receive(self.sock, wire.REPLY_BYTES_MAX, takes_fd=True)
        if fd >= 0:
            os.close(fd)
        return wire.decode_reply(data)

    def opened(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        told = self.ask(messages.Open(id=secrets.randbits(62), path=path, flags=flags))
        assert isinstance(told, messages.Told)
        return told.fh


@contextmanager
def _client(place, session: str, held: tuple[int, ...] = ()):
    client = _Client(place, session, held)
    try:
        yield client
    finally:
        client.sock.close()


def _closed(fh: int, path: str) -> messages.Close:
    return messages.Close(id=secrets.randbits(62), fh=fh, path=path, is_again=True)


def test_a_close_sent_again_of_a_file_that_was_given_up_is_an_error(place, fs, run):
    """I11: the daemon gives up what it must take for a dead client's; it is never acknowledged."""
    path = f"{run}/step-1/a.bin"
    fs.makedirs(f"{run}/step-1")
    with _client(place, secrets.token_hex(16)) as client:
        fh = client.opened(path)
        client.ask(messages.GiveUp(fh=fh))
        assert isinstance(client.ask(_closed(fh, path)), messages.Failed)
        assert isinstance(client.ask(_closed(1 << 40, path)), messages.Failed)


def test_a_close_sent_again_that_was_done_is_none_even_by_another_daemon(place, fs, run):
    """I10."""
    path, session = f"{run}/step-1/a.bin", secrets.token_hex(16)
    fs.makedirs(f"{run}/step-1")
    with _client(place, session) as client:
        fh = client.opened(path)
        close = _closed(fh, path)
        assert isinstance(client.ask(close), messages.Told)
        assert isinstance(client.ask(close), messages.Told)
        before = place.child("clients")
        os.kill(before, signal.SIGKILL)
        until("another daemon", lambda: place.child("clients") not in {0, before})
        fs.ls(run)
        with _client(place, session, (fh,)) as again:
            assert isinstance(again.ask(close), messages.Told)
        with _client(place, secrets.token_hex(16), (fh,)) as other:
            assert isinstance(other.ask(close), messages.Failed)


def test_the_journal_tells_what_was_closed_from_what_was_given_up(tmp_path):
    journal = Journal(str(tmp_path))
    for fh in (1, 2, 3, 4):
        journal.add(fh, OWNER, is_writer=True)
    journal.drop(1, is_closed=True)
    journal.drop(2)
    journal.drop(4, is_closed=True)
    journal.add(4, OWNER, is_writer=False)
    for _ in range(2):
        journal.close()
        journal = Journal(str(tmp_path))
        assert [journal.was_closed(fh, SESSION) for fh in (1, 2, 3, 4)] == [True, *[False] * 3]
        assert not journal.was_closed(1, "6" * 32)
        assert journal.owners() == {3: OWNER, 4: OWNER}
        assert (journal.is_writer(3), journal.is_writer(4)) == (True, False)
    journal.close()


class _SlowFs:
    """Takes as long as it is let to go on with a handle."""

    def __init__(self) -> None:
        self.asked, self.may_go = threading.Event(), threading.Event()

    def reopen(self, fh: int) -> Opened:
        self.asked.set()
        assert self.may_go.wait(20)
        return Opened(fh=fh, fd=-1, is_complete=True)

    def forget(self, numbers: list[tuple[int, int]]) -> None:
        assert numbers == []


class _Alive:
    def is_alive(self, pid: int, start: int) -> bool:
        return (pid, start) == (OWNER.pid, OWNER.start)


def test_no_connection_asks_for_a_handle_that_another_one_is_just_taking_over(tmp_path):
    """All connections of a client come back at once; a close on any of them finds its file."""
    journal = Journal(str(tmp_path))
    journal.add(7, OWNER, is_writer=True)
    fs: Any = _SlowFs()
    alive: Any = _Alive()
    sessions = Sessions(fs, journal, alive)
    found: list[bool] = []

    def join() -> None:
        with socket.socket() as connection:
            found.append(7 in sessions.join(OWNER, connection, (7,)).files)

    threads = [threading.Thread(target=join) for _ in range(3)]
    threads[0].start()
    assert fs.asked.wait(20)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.2)
    assert not found
    fs.may_go.set()
    for thread in threads:
        thread.join(20)
    assert found == [True] * 3
    journal.close()


@pytest.mark.parametrize("length", [100_000, 300_000])
def test_what_no_message_can_hold_is_an_error_at_once(fs, run, length):
    with pytest.raises(OSError, match="too long"):
        fs.info(f"{run}/{'a' * length}")
    with pytest.raises(OSError, match="too long"):
        fs.setxattr(run, "user.a", b"x" * length)
    assert fs.isdir(run)


def test_a_daemon_that_is_stopped_keeps_no_process_from_its_end(place, fs, run):
    code = """
import sys, fsspec
fs = fsspec.filesystem("ckpt", linger_s=1)
fs.pipe(f"{sys.argv[1]}/notes.txt", b"n")
print("written")
sys.stdin.readline()
"""
    client = place.start(code, run)
    daemon = place.child("clients")
    try:
        assert client.stdout.readline() == "written\n"
        os.kill(daemon, signal.SIGSTOP)
        _, errors = client.communicate("\n", timeout=30)
        assert client.returncode == 0
        assert "not-decided-yet" in errors
    finally:
        os.kill(daemon, signal.SIGCONT)
        client.kill()
        client.wait()
