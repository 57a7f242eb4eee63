"""The spool under kill -9, two writers, and a full or read-only disk: nothing acknowledged is lost.

Real processes, real signals, real file systems.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import time

import pytest
from tests.facilities import lacking

from ckptgate.errors import CkptError, FullError, UnusableError
from ckptgate.model.states import FileState
from ckptgate.ports.spool import ROOT_INO, NodeKind, NodeRow
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool

ROUNDS = 20

# Each transaction makes a node, a name, a file and a handle; then its name is acknowledged.
WRITER = """
import os, sys
from ckptgate.ports.spool import HandleRow, NodeKind, NodeRow
from ckptgate_adapters.sqlite_spool import SqliteSpool

spool = SqliteSpool.attach(sys.argv[1])
for i in range(int(sys.argv[3])):
    name = f"{sys.argv[2]}-{i}"
    with spool.transaction():
        file = spool.add_file()
        with open(spool.data_path(file.file), "xb") as stream:
            stream.write(name.encode())
        row = NodeRow(ino=0, kind=NodeKind.FILE, attempt=None, mode=0o600, uid=0, gid=0, size=i,
                      mtime_ns=0, ctime_ns=0, file=file.file)
        node = spool.add_node(row)
        spool.link(1, name, node.ino)
        spool.add_handle(HandleRow(fh=spool.next_handle(), ino=node.ino, file=file.file,
                                   pid=1, start=1))
        spool.remember_reply(i, os.urandom(20000))
        spool.set_meta("count", str(int(spool.get_meta("count") or 0) + 1))
    os.write(1, f"{name} {node.ino} {file.file}\\n".encode())
    if i % 50 == 49:
        spool.make_durable()
"""


def make(path) -> SqliteSpool:
    return SqliteSpool.create_or_open(str(path), store_url="file:///store", host="h")


def start(path: str, tag: str, count: int) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", WRITER, path, tag, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


def check_whole(spool: SqliteSpool, acknowledged: dict[str, tuple[int, int]]) -> None:
    """All that was acknowledged is there, and every transaction is there as a whole or not."""
    connection = sqlite3.connect(spool.path + "/spool.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    (files,) = connection.execute("SELECT count(*) FROM files").fetchone()
    connection.close()
    found = spool.children(ROOT_INO)
    for name, (ino, file) in acknowledged.items():
        node = spool.child(ROOT_INO, name)
        assert node is not None, name
        assert (node.ino, node.file) == (ino, file)
    for name, node in found:
        assert node.file is not None
        row = spool.file(node.file)
        assert row is not None
        assert row.state is FileState.OPEN
        with open(spool.data_path(node.file), encoding="utf-8") as stream:
            assert stream.read() == name
    assert spool.nameless_nodes() == []
    assert len(found) == files == len(spool.handles()) == int(spool.get_meta("count") or 0)


def read_acknowledged(stream, into: dict[str, tuple[int, int]]) -> None:
    for line in stream.read().decode().splitlines(keepends=True):
        if line.endswith("\n"):
            name, ino, file = line.split()
            into[name] = (int(ino), int(file))


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path):
    """I11, I10: killed at any moment, the writer leaves whole transactions and all told ones."""
    path = str(tmp_path / "spool")
    make(path).close()
    acknowledged: dict[str, tuple[int, int]] = {}
    chance = random.Random(20)
    for i in range(ROUNDS):
        with start(path, f"r{i}", 100_000) as child:
            assert child.stdout is not None
            first = child.stdout.readline().decode().split()
            acknowledged[first[0]] = (int(first[1]), int(first[2]))
            time.sleep(chance.uniform(0, 0.05))
            child.kill()
            read_acknowledged(child.stdout, acknowledged)
        spool = make(path)
        check_whole(spool, acknowledged)
        spool.drop_orphans()
        check_whole(spool, acknowledged)
        if i % 3:
            spool.close()
        else:
            # The next writer finds a journal that somebody else has open, too.
            kept = spool
    kept.close()
    assert len(acknowledged) > ROUNDS


def test_two_processes_write_at_once_and_lose_nothing(tmp_path):
    """I11: each sees the other's numbers, names and counts."""
    path = str(tmp_path / "spool")
    spool = make(path)
    acknowledged: dict[str, tuple[int, int]] = {}
    with start(path, "a", 120) as first, start(path, "b", 120) as second:
        for i in range(60):
            with spool.transaction():
                spool.set_meta("mine", str(i))
        for child in (first, second):
            assert child.stdout is not None
            read_acknowledged(child.stdout, acknowledged)
    assert first.returncode == second.returncode == 0
    assert len(acknowledged) == 240
    assert len({ino for ino, _ in acknowledged.values()}) == 240
    assert spool.get_meta("mine") == "59"
    check_whole(spool, acknowledged)
    spool.close()


def test_the_lock_of_a_killed_holder_is_free(tmp_path):
    """I10: a restart never waits for a dead one's lock."""
    spool = make(tmp_path / "spool")
    code = (
        "import sys, time\n"
        "from ckptgate_adapters.sqlite_spool import SpoolLock\n"
        "with SpoolLock(sys.argv[1], mountpoint='/m'):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", code, spool.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        child.stdout.readline()
        holder = SpoolLock(spool.path).holder() or {}
        assert (holder["pid"], holder["mountpoint"]) == (child.pid, "/m")
        child.kill()
        child.wait()
    with SpoolLock(spool.path) as lock:
        assert lock.fd >= 0
    spool.close()


@contextlib.contextmanager
def small_disk(path, *options: str):
    """A tmpfs at *path*; skips the test where it can't be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        lacking("needs root and the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path) -> None:
    """Leave no byte free."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, b"\0" * 4096)
    os.close(fd)


def add(spool: SqliteSpool, name: str) -> None:
    with spool.transaction():
        row = NodeRow(
            ino=0,
            kind=NodeKind.FILE,
            attempt=None,
            mode=0o600,
            uid=0,
            gid=0,
            size=0,
            mtime_ns=0,
            ctime_ns=0,
            target="x" * 5000,
        )
        spool.link(ROOT_INO, name, spool.add_node(row).ino)


def test_a_full_disk_is_refused_loudly_and_loses_nothing(tmp_path):
    """I11: what was committed before stays, what failed is undone as a whole, later goes on."""
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        spool = make(disk / "spool")
        fill(disk / "filler")
        done = 0
        with pytest.raises(FullError, match="no space is left") as caught:
            for done in range(100_000):
                add(spool, f"n{done}")
        assert caught.value.hint
        with pytest.raises(FullError):
            add(spool, "refused")
        names = [f"n{i}" for i in range(done)]
        assert [name for name, _ in spool.children(ROOT_INO)] == names
        assert spool.nameless_nodes() == []
        with pytest.raises(FullError), spool.transaction():
            spool.set_meta("part", "1")
            spool.remember_reply(1, b"x" * 1_000_000)
        assert spool.get_meta("part") is None
        with pytest.raises(FullError):
            spool.remember_reply(1, b"x" * 1_000_000)
        os.unlink(disk / "filler")
        add(spool, "later")
        spool.make_durable()
        spool.close()
        again = make(disk / "spool")
        assert [name for name, _ in again.children(ROOT_INO)] == [*names, "later"]
        again.close()


def test_a_spool_on_a_full_disk_still_opens_or_says_that_it_is_full(tmp_path):
    """I11: a daemon that is started again on a full disk loses nothing by trying."""
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        spool = make(disk / "spool")
        add(spool, "kept")
        spool.close()
        fill(disk / "filler")
        with contextlib.suppress(FullError):
            make(disk / "spool").close()
        with SpoolLock(spool.path) as lock:
            assert lock.fd >= 0
        os.unlink(disk / "filler")
        again = make(disk / "spool")
        assert again.child(ROOT_INO, "kept") is not None
        again.close()


@pytest.mark.parametrize("options", ["size=32k", "size=8m,nr_inodes=100"])
def test_a_disk_that_is_too_small_for_a_spool_is_full(tmp_path, options):
    with small_disk(tmp_path / "disk", options) as disk, pytest.raises(FullError):
        make(disk / "spool")


def test_a_read_only_disk_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        make(disk / "spool").close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        refused: list[CkptError] = []
        for opening in (
            lambda: make(disk / "spool"),
            lambda: make(disk / "other"),
            lambda: SqliteSpool.attach(str(disk / "spool")),
        ):
            with pytest.raises(UnusableError) as caught:
                opening()
            refused.append(caught.value)
        assert all(str(disk) in error.message and error.hint for error in refused)
