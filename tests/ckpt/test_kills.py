"""Kills and lost answers at every step of a save through `ckpt://`, and what clients then find."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ckpt.places import Place
from tests.e2e.harness import until

from ckptgate.app.asking import ask
from ckptgate_adapters.fsspec_ckpt import connection, messages
from ckptgate_adapters.fsspec_ckpt.journal import owners_in

RANK = """
import sys, fsspec
path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fs = fsspec.filesystem("ckpt", rank=rank, world_size=world)
with fs.open(f"{path}/rank{rank}.bin", "wb") as file:
    file.write(bytes([rank]) * 100_000)
fs.commit(path)
"""


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], list[str]]:
    """Have something done around the n-th request of this process; gives the requests' names."""

    def at(n: int, do: Callable[[], None], *, is_after: bool = False) -> list[str]:
        seen: list[str] = []
        real = connection._exchange

        def exchange(sock: socket.socket, request: messages.Request):
            if isinstance(request, messages.Hello):
                return real(sock, request)
            seen.append(type(request).__name__)
            is_nth = len(seen) == n + 1
            if is_nth and not is_after:
                do()
            reply = real(sock, request)
            if is_nth and is_after:
                do()
                raise ConnectionResetError("the reply is lost")
            return reply

        monkeypatch.setattr(connection, "_exchange", exchange)
        return seen

    return at


def _save(fs, path: str) -> None:
    """All kinds of requests that a save makes."""
    fs.makedirs(f"{path}/sub")
    with fs.open(f"{path}/sub/a.bin", "wb") as file:
        file.write(b"a" * 70_000)
    with fs.open(f"{path}/sub/a.bin", "wb") as file:
        file.write(b"again")
    fs.pipe(f"{path}/b.tmp.bin", b"b")
    fs.mv(f"{path}/b.tmp.bin", f"{path}/b.bin")
    fs.pipe(f"{path}/c.bin", b"c")
    fs.rm_file(f"{path}/c.bin")
    fs.commit(path, 0, 1)


FILES = {"sub/a.bin": b"again", "b.bin": b"b"}


def _committed(place: Place, fs, path: str) -> None:
    fs.wait(path, 60)
    for name, data in FILES.items():
        assert fs.cat(f"{path}/{name}") == data
        published = Path(place.store, path, name)
        until("the publication", published.exists)
        assert published.read_bytes() == data
    found = fs.find(path)
    assert sorted(found) == sorted(f"{path}/{name}" for name in FILES)


def _steps(fs, run: str, count) -> int:
    seen = count(10_000, lambda: None)
    _save(fs, f"{run}/step-0")
    fs.wait(f"{run}/step-0", 60)
    return len(seen)


def test_a_lost_answer_at_every_request_of_a_save_changes_nothing(place, fs, run, count):
    """I10: what is repeated is done once; no file and no name is there twice, or is missing."""
    steps = _steps(fs, run, count)
    for n in range(steps):
        count(n, lambda: None, is_after=True)
        _save(fs, f"{run}/step-{n + 1}")
    count(10_000, lambda: None)
    for n in range(steps):
        _committed(place, fs, f"{run}/step-{n + 1}")


@pytest.mark.full
def test_the_daemon_is_killed_at_every_request_of_a_save(place, fs, run, count):
    """I10, I11: before it is sent, and after it was done; the save is as if nothing had been."""
    steps = _steps(fs, run, count)
    saved: list[str] = []
    for n in range(steps):
        for is_after in (False, True):
            path = f"{run}/step-{2 * n + is_after + 1}"
            count(n, lambda: _kill(place.child("clients")), is_after=is_after)
            _save(fs, path)
            saved.append(path)
            # It is given up after twenty deaths in a minute.
            time.sleep(3.2)
    count(10_000, lambda: None)
    for path in saved:
        _committed(place, fs, path)


def test_a_daemon_killed_while_a_file_is_written_loses_nothing(place, fs, run):
    """I11: writes go on by the descriptor; the close finds the daemon that was started again."""
    path = f"{run}/step-1"
    with fs.open(f"{path}/a.bin", "wb") as file:
        file.write(b"a" * 500_000)
        _kill(place.child("clients"))
        file.write(b"b" * 500_000)
    fs.commit(path, 0, 1)
    fs.wait(path, 60)
    assert fs.cat(f"{path}/a.bin") == b"a" * 500_000 + b"b" * 500_000


def test_a_client_that_is_killed_leaves_a_torn_file_that_nobody_sees(place, fs, run):
    """Nothing half-written is published, nor seen by others."""
    fs.makedirs(run, exist_ok=True)
    code = """
import sys, fsspec
fs = fsspec.filesystem("ckpt")
file = fs.open(sys.argv[1], "wb")
file.write(b"half" * 100_000)
file.flush()
print("written", flush=True)
sys.stdin.read()
"""
    with place.start(code, f"{run}/step-1/a.bin", run_id="job-killed") as process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    until(
        "the torn close",
        lambda: "torn-close" in place.log() or "handle" in place.log().rpartition("torn")[2],
    )
    assert not fs.exists(f"{run}/step-1")
    assert "step-1" not in os.listdir(Path(place.store, run))
    looked = "import sys, fsspec; print(fsspec.filesystem('ckpt').exists(sys.argv[1]))"
    done = place.python(looked, f"{run}/step-1/a.bin", run_id="job-killed")
    assert done.stdout == "False\n", done.stderr


def test_a_reader_that_dies_after_a_restart_of_the_daemon_tears_nothing(place, fs, run):
    """I11: what it has open was written and closed by another."""
    code = """
import sys, fsspec
fs = fsspec.filesystem("ckpt", job="readers")
files = [fs.open(path, "rb") for path in sys.argv[1:]]
print("open", flush=True)
sys.stdin.read()
"""
    same = place.fs(job="readers")
    same.pipe(f"{run}/step-2/a.bin", b"a" * 1000)
    same.pipe(f"{run}/more.txt", b"more")
    before = place.log().count("torn-close")
    with place.start(code, f"{run}/step-2/a.bin", f"{run}/more.txt") as process:
        assert process.stdout.readline() == "open\n", process.stderr.read()
        daemon = place.child("clients")
        _kill(daemon)
        until("another daemon", lambda: place.child("clients") not in {0, daemon})
        process.kill()
    until("the end of its files", lambda: not owners_in(str(place.spool)))
    assert place.log().count("torn-close") == before
    assert same.cat(f"{run}/more.txt") == b"more"
    same.commit(f"{run}/step-2", 0, 1)
    same.wait(f"{run}/step-2", 60)
    until("the copy", lambda: same.is_stored(f"{run}/more.txt"), 60)


def test_a_file_that_is_merely_forgotten_is_not_kept(fs, run, caplog):
    file = fs.open(f"{run}/step-1/a.bin", "wb")
    file.write(b"x")
    del file
    assert not fs.exists(f"{run}/step-1/a.bin")
    assert "nothing of it is kept" in caplog.text


def test_a_daemon_that_is_gone_with_its_supervisor_is_an_error_at_close(place, fs, run):
    """Never is a half-written file taken for a whole one: a new daemon knows nothing of it."""
    path = f"{run}/step-1/a.bin"
    file = fs.open(path, "wb")
    file.write(b"half")
    info, child, publisher = place.info(), place.child("clients"), place.child("publisher")
    assert info is not None
    _kill(info.pid)
    left = [Path(f"/proc/{pid}") for pid in (child, publisher)]
    until("the end of its children", lambda: not any(path.exists() for path in left))
    with pytest.raises(OSError, match="started anew"):
        file.close()
    asked = {"op": "commit", "run": run, "name": "step-1", "all": True}
    new = until("a new daemon", place.info)
    # Its publisher may still be starting.
    assert ask(new, asked)["torn"] == ["a.bin"]


def test_ranks_that_start_at_once_get_one_daemon(tmp_path):
    place = Place.make(tmp_path)
    try:
        ranks = [
            place.start(RANK, "run/step-1", str(rank), "4", run_id="four") for rank in range(4)
        ]
        for process in ranks:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
        fs = place.fs()
        until("the commit", lambda: fs.exists("run/step-1"), 60)
        assert len(fs.ls("run/step-1")) == 4
        assert place.log().count("serving store=") == 1
    finally:
        place.end()
