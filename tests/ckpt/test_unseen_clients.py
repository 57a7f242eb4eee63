"""Clients in a container of their own beside the daemon's, and clients with very many files open.

A daemon can't look at such a client's process, and the client has no part in its restart: each must
hear of the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.places import Place
from tests.e2e.harness import until

from ckptgate.vfs.interface import Opened
from ckptgate_adapters.fsspec_ckpt import connection, messages, serving, sessions
from ckptgate_adapters.fsspec_ckpt.identity import ClientIdentity
from ckptgate_adapters.fsspec_ckpt.journal import Journal, Owner
from ckptgate_adapters.fsspec_ckpt.serving import ClientServer
from ckptgate_adapters.proc_identity import ProcIdentity

MANY = 60_000


class _File:
    is_lost = False


class _Fs:
    """Has the handles open that it is asked for."""

    def reopen(self, fh: int) -> Opened:
        return Opened(fh=fh, fd=-1, is_complete=True)

    def release(self, fh: int) -> None:
        del fh

    def give_up(self, fh: int, *, is_removed: bool) -> None:
        raise AssertionError(f"{fh} was taken for a dead writer's, removed: {is_removed}")

    def forget(self, numbers: list[tuple[int, int]]) -> None:
        assert numbers == []


def _server(spool: Path) -> ClientServer:
    fs: Any = _Fs()
    server = ClientServer(fs, str(spool), identity=ClientIdentity(ProcIdentity()))
    server.start()
    return server


def test_a_client_that_is_not_seen_is_heard_of_by_a_new_daemon(tmp_path, monkeypatch):
    """I11: though it asks for nothing; without open files it says nothing."""
    monkeypatch.setattr(serving, "_peer", lambda sock: (0, os.geteuid(), os.getegid()))
    monkeypatch.setattr(serving, "PING_S", 0.05)
    monkeypatch.setattr(sessions, "_UNKNOWN_PROCESS_S", 1.0)
    monkeypatch.setattr(sessions, "_LOOK_S", 0.05)
    client = connection.Client(
        lambda is_needed, may_start: str(tmp_path), connection.Introduction()
    )
    first = _server(tmp_path)
    try:
        client.call(messages.Ping())
        assert not client._is_pinging
        first._journal.add(7, Owner(0, 0, client._session), is_writer=True)
        file = _File()
        client.hold(7, file)
        first.close()
        second = _server(tmp_path)
        try:
            until("the client's return", lambda: second._sessions._sessions, 5)
            # Longer than one that is not heard of is waited for.
            time.sleep(1.5)
            (session,) = second._sessions._sessions.values()
            assert list(session.files) == [7]
            assert not file.is_lost
            client.let_go(7)
            until("the end of the pings", lambda: not client._is_pinging, 5)
        finally:
            second.close()
    finally:
        client.close()


def test_a_client_that_is_seen_needs_no_thread(fs, run):
    with fs.open(f"{run}/a.bin", "wb") as file:
        file.write(b"a")
        assert not fs.client._is_pinging


def test_a_client_with_very_many_files_comes_back_to_each(place, fs, run):
    """I11: a new daemon is told of all of them, though no packet takes that many."""
    fs.ls("")
    client = fs.client
    others = [_File() for _ in range(MANY)]
    for number, other in enumerate(others):
        client.hold((1 << 60) + number, other)
    try:
        with fs.open(f"{run}/step-1/a.bin", "wb") as file:
            file.write(b"a" * 1000)
            os.kill(place.child("clients"), signal.SIGKILL)
        assert fs.cat(f"{run}/step-1/a.bin") == b"a" * 1000
    finally:
        for number in range(MANY):
            client.let_go((1 << 60) + number)


def test_a_handle_that_is_told_twice_is_taken_over_once(tmp_path):
    journal = Journal(str(tmp_path))
    owner = Owner(os.getpid(), 1, "5" * 32)
    journal.add(7, owner, is_writer=True)
    fs: Any = _Fs()
    identity: Any = None
    told = sessions.Sessions(fs, journal, identity)
    with socket.socket() as made:
        found = told.join(owner, made, (7, 7))
    assert list(found.files) == [7]
    journal.close()


@contextlib.contextmanager
def _contained(place: Place) -> Iterator[subprocess.Popen[bytes]]:
    """The place's daemon, in pid and mount namespaces of its own."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words += [sys.executable, "-P", "-m", "ckptgate.app.cli", "serve", "--store", place.store]
    words += ["--spool", str(place.spool), "--config", str(place.config)]
    with open(place.config.with_name("serve.log"), "wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until("the daemon", (place.spool / "clients.sock").exists)
        yield process
    finally:
        process.kill()
        process.wait()


def _descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from _descendants(int(child))


@pytest.mark.full
def test_a_writer_in_another_container_outlives_the_daemons_restart(tmp_path, require):
    """I11: it asks for nothing for longer than one that is not seen is waited for."""
    require(shutil.which("unshare") and os.geteuid() == 0, "unshare, as root")
    place = Place.make(tmp_path)
    with _contained(place) as process:
        fs = place.fs()
        fs.mkdir("run")
        with fs.open("run/step-1/a.bin", "wb") as file:
            file.write(b"a" * 100_000)
            assert fs.client._is_pinging
            words = {
                pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _descendants(process.pid)
            }
            (server,) = (pid for pid, line in words.items() if b"app.child\0clients" in line)
            os.kill(server, signal.SIGKILL)
            time.sleep(sessions._UNKNOWN_PROCESS_S + 15)
            file.write(b"b")
        assert fs.cat("run/step-1/a.bin") == b"a" * 100_000 + b"b"
        fs.client.close()
