"""The FUSE driver on a real kernel: new nodes under old names, and servers that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.toy_mounts import (
    Client,
    Toy,
    mounted,
    wait_for,
)

pytestmark = pytest.mark.fuse


def published(toy: Toy, *, directory: bool) -> Path:
    """A published node that the kernel knows and believes for an hour."""
    path = toy.mnt / "published"
    if directory:
        path.mkdir()
        (path / "file").write_text("old")
        (path / "sub").mkdir()
        os.listdir(path)
        os.stat(path / "file")
    else:
        path.write_text("old content")
    toy.ask("publish published")
    os.stat(path)
    return path


def test_estale_at_open_reaches_the_new_node(sticky: Toy) -> None:
    path = published(sticky, directory=False)
    old = path.stat().st_ino
    with path.open("rb") as reader:
        for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_CREAT):
            sticky.ask("publish published")
            os.stat(path)
            before = path.stat().st_ino
            fd = os.open(path, flags, 0o644)
            assert os.fstat(fd).st_ino != before
            os.write(fd, b"new")
            os.close(fd)
        assert reader.read() == b"old content"
        assert os.fstat(reader.fileno()).st_ino == old
    assert path.read_bytes() == b"new"
    assert sticky.ask("done").count("new-version") == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 3),
        lambda path: os.chmod(path, 0o600),
        lambda path: os.utime(path, (1, 1)),
        lambda path: os.chown(path, 1, 1),
    ],
    ids=["truncate", "chmod", "utime", "chown"],
)
def test_estale_at_a_change_by_path_reaches_the_new_node(sticky: Toy, change: Any) -> None:
    path = published(sticky, directory=False)
    before = path.stat().st_ino
    change(path)
    assert path.stat().st_ino != before
    assert sticky.ask("done").count("new-version") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "new").mkdir(),
        lambda path: (path / "new").write_text("x"),
        lambda path: (path / "file").unlink(),
        lambda path: (path / "sub").rmdir(),
        lambda path: os.rename(path / "file", path / "other"),
        lambda path: os.rename(path / "file", path.parent / "outside"),
        lambda path: os.symlink("x", path / "link"),
        lambda path: os.mknod(path / "node", 0o644),
    ],
    ids=["mkdir", "create", "unlink", "rmdir", "rename", "rename-out", "symlink", "mknod"],
)
def test_estale_at_a_change_in_a_directory_reaches_its_new_node(sticky: Toy, change: Any) -> None:
    path = published(sticky, directory=True)
    before = path.stat().st_ino
    change(path)
    assert path.stat().st_ino != before
    assert sticky.ask("done").count("new-version") == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_mkdir_that_a_killed_server_was_doing_happens_once(plain: Toy, when: str) -> None:
    """I10: a crash at any point and a restart reach the same result as no crash."""
    (plain.root / "stall").touch()
    path = plain.mnt / f"stall-{when}-dir"
    # mkdir of a process of its own: this one must stay able to unmount.
    maker = subprocess.Popen([sys.executable, "-c", f"import os; os.mkdir({str(path)!r})"])
    wait_for(lambda: plain.counts().get("LOOKUP", 0) >= 1)
    if when == "after":
        wait_for(lambda: f"make {path.name}" in plain.ask("done"))
        assert plain.counts()["MKDIR"] == 1
    plain.kill()
    (plain.root / "stall").unlink()
    assert maker.poll() is None
    plain.process = plain.start(resume=True)
    assert maker.wait(10) == 0
    assert path.is_dir()
    assert plain.ask("done").count(f"make {path.name}") == 1


def test_a_killed_server_ends_while_an_invalidation_waits_for_a_request(plain: Toy) -> None:
    """I10: the kernel holds the sender, deaf to SIGKILL, until its successor answers the mkdir."""
    (plain.root / "stall").touch()
    path = plain.mnt / "stall-after-dir"
    maker = subprocess.Popen([sys.executable, "-c", f"import os; os.mkdir({str(path)!r})"])
    wait_for(lambda: f"make {path.name}" in plain.ask("done"))
    plain.ask("inval-name 1 other")
    time.sleep(0.2)  # until the kernel has it
    plain.process.kill()
    plain.process.wait(5)
    plain.kill()
    (plain.root / "stall").unlink()
    plain.process = plain.start(resume=True)
    assert maker.wait(10) == 0
    assert path.is_dir()


def test_a_create_that_a_killed_server_had_done_gets_its_handle(plain: Toy) -> None:
    (plain.root / "stall").touch()
    path = plain.mnt / "stall-after-file"
    program = f"f = open({str(path)!r}, 'xb'); f.write(b'content'); f.close()"
    maker = subprocess.Popen([sys.executable, "-c", program])
    wait_for(lambda: f"make {path.name}" in plain.ask("done"))
    plain.kill()
    (plain.root / "stall").unlink()
    plain.process = plain.start(resume=True)
    assert maker.wait(10) == 0
    assert path.read_bytes() == b"content"
    assert plain.ask("done").count(f"make {path.name}") == 1
    assert "request-replayed" in plain.log()


@pytest.mark.parametrize("passthrough", [True, False])
def test_open_files_and_waiting_calls_survive_a_kill(
    tmp_path: Path, passthrough: bool, client: Client, other_client: Client
) -> None:
    """I11: nothing acknowledged is lost by kill -9."""
    with mounted(tmp_path, passthrough=passthrough) as toy:
        path, mnt = toy.mnt / "big", str(toy.mnt)
        client.run(f"mnt = {mnt!r}; f = open(mnt + '/big', 'w+b', buffering=0)")
        client.run("os.mkdir(mnt + '/other'); listing = os.open(mnt, os.O_RDONLY)")
        assert client.run("f.write(b'a' * 1000)") == 1000
        is_passing = passthrough and toy.is_passing()
        toy.kill()
        if is_passing:
            assert client.run("f.write(b'b' * 1000)") == 1000
        client.begin("os.listdir(mnt + '/other')")
        other_client.begin(f"os.mkdir({mnt!r} + '/made')")
        assert client.is_waiting()
        assert other_client.is_waiting()
        toy.process = toy.start(resume=True)
        assert client.end() == []
        assert other_client.end() is None
        # The same backing id, or the same cached mode: no EIO.
        client.run("again = open(mnt + '/big', 'r+b', buffering=0)")
        assert client.run("len(again.read())") == (2000 if is_passing else 1000)
        assert client.run("f.write(b'c' * 1000)") == 1000
        assert client.run("os.fsync(f.fileno())") is None
        assert client.run("os.ftruncate(f.fileno(), 1500)") is None
        assert client.run("os.fstat(f.fileno()).st_size") == 1500
        assert client.run("sorted(os.listdir(listing))") == ["big", "made", "other"]
        assert client.run("[os.close(listing), f.close(), again.close()]") == [None] * 3
        assert path.read_bytes() == b"a" * 1000 + (b"b" if is_passing else b"c") * 500
        counts = toy.counts()
        if is_passing:
            assert counts.get("WRITE", 0) == counts.get("READ", 0) == 0
        # All closed: another mode is possible again.
        wait_for(lambda: os.path.getsize(toy.root / "session.opens") % 40 == 0)


def test_without_the_list_of_open_files_a_successor_is_careful(plain: Toy, client: Client) -> None:
    path = plain.mnt / "big"
    client.run(f"f = open({str(path)!r}, 'w+b', buffering=0)")
    client.run("f.write(b'a' * 1000)")
    is_passing = plain.is_passing()
    plain.take_over(forget_opens=True)
    assert client.run("f.write(b'b')") == 1
    (plain.mnt / "new").write_bytes(b"new")
    assert (plain.mnt / "new").read_bytes() == b"new"
    if is_passing:
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
    client.run("f.close()")
    assert path.read_bytes() == b"a" * 1000 + b"b"
    assert "passthrough-off reason=open-files-unknown" in plain.log()


def test_writing_goes_on_through_ten_kills(plain: Toy) -> None:
    path = plain.mnt / "steady"
    program = (
        "import os, sys\n"
        f"f = open({str(path)!r}, 'wb', buffering=0)\n"
        "for i in range(2000):\n"
        "    f.write(b'%08d' % i)\n"
        "    if i % 100 == 0: os.stat(sys.argv[1]); os.makedirs(sys.argv[1] + '/d%d' % i)\n"
        "    if i % 100 == 0: print(i, flush=True)\n"
        "f.close()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(plain.mnt)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(10):
        writer.stdout.readline()
        plain.take_over()
    for _ in writer.stdout:
        pass
    assert writer.wait(20) == 0
    writer.stdout.close()
    assert path.read_bytes() == b"".join(b"%08d" % number for number in range(2000))
    assert len(os.listdir(plain.mnt)) == 21
