"""Who keeps a mount's descriptors: the keeper as a process, and what the service manager kept."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptgate.app import keeper
from ckptgate.app.config import Config
from ckptgate.app.keeping import held_by_manager
from ckptgate.errors import FormatVersionError, UnusableError
from ckptgate_adapters.fuse.session import FuseSession
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool
from ckptgate_adapters.systemd.jobs import own_unit
from ckptgate_adapters.systemd.stored import barrier, store_fd

# Writes what it was given, and does as its last word but three says.
NEXT = """
import json, os, socket, sys, time
path, what, device, lock, connection = sys.argv[1:]
with open(path, "a") as f:
    f.write(os.readlink(f"/proc/self/fd/{device}") + "\\n")
if what == "end":
    socket.socket(fileno=int(connection)).send(b'{"end": true}')
"""


class Kept:
    """A keeper, and the supervisor's end of its connection."""

    def __init__(self, tmp_path: Path, what: str) -> None:
        self.told = tmp_path / "told"
        self.abort = tmp_path / "abort"
        self.device = tmp_path / "device"
        self.device.write_text("")
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        command = [sys.executable, "-I", "-c", NEXT, str(self.told), what]
        message = json.dumps({"command": command, "abort": str(self.abort)}).encode()
        fds = [os.open(self.device, os.O_RDWR), os.open(self.device, os.O_RDWR)]
        socket.send_fds(self.ours, [message], fds)
        for fd in fds:
            os.close(fd)


@pytest.fixture
def kept(tmp_path: Path, request) -> Iterator[Kept]:
    made = Kept(tmp_path, request.param)
    yield made
    made.ours.close()
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


def ignored(pid: int) -> int:
    """Which signals a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))


@pytest.mark.parametrize("kept", ["end"], indirect=True)
def test_a_keeper_starts_the_next_supervisor_with_what_it_kept(kept: Kept) -> None:
    """I10: once the connection ends; and ends itself when that says so."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    wanted = sum(1 << (number - 1) for number in numbers)
    while ignored(kept.process.pid) & wanted != wanted:
        time.sleep(0.01)
    for number in numbers:
        kept.process.send_signal(number)
    assert not kept.told.exists()
    kept.ours.close()
    assert kept.process.wait(30) == 0
    assert kept.told.read_text() == f"{kept.device}\n"
    assert not kept.abort.exists()


@pytest.mark.parametrize("kept", ["die"], indirect=True)
def test_a_keeper_gives_up_a_supervisor_that_dies_again_and_again(kept: Kept) -> None:
    """I10: then it ends the session, for whoever waits."""
    kept.ours.close()
    assert kept.process.wait(60) == 1
    assert kept.told.read_text().splitlines() == [str(kept.device)] * keeper.DEATHS_MAX
    assert kept.abort.read_text() == "1"


@pytest.mark.parametrize("kept", ["die"], indirect=True)
def test_a_keeper_that_is_told_of_the_end_starts_nothing(kept: Kept) -> None:
    kept.ours.send(b'{"end": true}')
    assert kept.process.wait(30) == 0
    assert not kept.told.exists()


def test_what_a_manager_kept_of_another_spool_is_refused(tmp_path: Path, monkeypatch) -> None:
    """I2: a restart with another spool in the configuration doesn't serve the old session by it."""
    for name in ("one", "two"):
        SqliteSpool.create_or_open(str(tmp_path / name), store_url="/store", host="h").close()
    config = Config(store="/store", spool=str(tmp_path / "one"), mountpoint="/mnt")
    ours, theirs = socket.socketpair()
    with ours, theirs, SpoolLock(config.spool) as lock:
        with SpoolLock(str(tmp_path / "two")) as other:
            stored = {"ckptgate-device": [ours.fileno()], "ckptgate-lock": [other.fd]}
            monkeypatch.setattr("ckptgate.app.keeping.received_fds", lambda: stored)
            with pytest.raises(UnusableError, match="has another spool"):
                held_by_manager(config)
        stored["ckptgate-lock"] = [lock.fd]
        with pytest.raises(UnusableError, match="no state of a fuse session"):
            held_by_manager(config)
        state = tmp_path / "one/session.state"
        state.write_text('{"version": 99}')
        with pytest.raises(FormatVersionError, match="version 99"):
            held_by_manager(config)
        state.write_bytes(FuseSession(-1).state())
        held = held_by_manager(config)
        assert held is not None
        assert (held.device, held.lock) == (ours.fileno(), lock.fd)
        monkeypatch.setattr("ckptgate.app.keeping.received_fds", dict)
        assert held_by_manager(config) is None


def test_a_session_that_is_over_is_not_taken_over(tmp_path: Path, monkeypatch) -> None:
    SqliteSpool.create_or_open(str(tmp_path / "one"), store_url="/store", host="h").close()
    config = Config(store="/store", spool=str(tmp_path / "one"), mountpoint="/mnt")
    reader, writer = os.pipe()
    os.close(reader)
    fd = os.open(tmp_path / "one/lock", os.O_RDWR | os.O_CREAT)
    # A pipe without a reader polls as a dead session does.
    stored = {"ckptgate-device": [writer], "ckptgate-lock": [fd]}
    monkeypatch.setattr("ckptgate.app.keeping.received_fds", lambda: stored)
    assert held_by_manager(config) is None
    for closed in (writer, fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)


def test_a_manager_is_given_descriptors_by_name_and_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        with open(tmp_path / "kept", "w") as kept:
            assert store_fd("one", kept.fileno())
        data, fds, _, _ = socket.recv_fds(manager, 4096, 4)
        assert data == b"FDSTORE=1\nFDNAME=one"
        assert os.readlink(f"/proc/self/fd/{fds[0]}") == str(tmp_path / "kept")
        os.close(fds[0])
        code = "from ckptgate_adapters.systemd.stored import barrier; print(barrier())"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            data, fds, _, _ = socket.recv_fds(manager, 4096, 4)
            assert data == b"BARRIER=1"
            assert child.poll() is None
            os.close(fds[0])
            assert child.communicate()[0] == b"True\n"
    assert not barrier()


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/system-ckptgate.slice/ckptgate@a.service\n",
         ("ckptgate@a.service", False)),
        ("1:cpu:/x\n0::/system.slice/ckptgate@a.service/main\n", ("ckptgate@a.service", False)),
        ("0::/user.slice/user-1.slice/user@1.service/app.slice/ckptgate@b.service\n",
         ("ckptgate@b.service", True)),
        ("0::/user.slice/user-1.slice/session-2.scope\n", ("", False)),
        ("", ("", False)),
    ],
)  # fmt: skip
def test_a_service_knows_its_unit(cgroup: str, unit: tuple[str, bool]) -> None:
    assert own_unit(cgroup) == unit
