"""The FUSE driver on a real kernel: files, names and attributes of a toy file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from pathlib import Path

import pytest
from tests.e2e.toy_mounts import _ANY, Toy, _libc, mounted, wait_for

from ckptgate_adapters.fuse import channel

pytestmark = pytest.mark.fuse


def test_files_are_written_and_read_back(toy: Toy) -> None:
    data = os.urandom((3 << 20) + 17)
    path = toy.mnt / "a"
    path.write_bytes(data)
    assert path.read_bytes() == data
    assert path.stat().st_size == len(data)
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"middle")
    assert path.read_bytes()[1 << 20 :][:6] == b"middle"
    os.truncate(path, 100)
    assert path.read_bytes() == data[:100]
    with path.open("wb") as file:
        file.write(b"short")
        file.flush()
        os.fsync(file.fileno())
    assert path.read_bytes() == b"short"


def test_append_and_direct_io_at_any_alignment(toy: Toy) -> None:
    path = toy.mnt / "log"
    for line in (b"one\n", b"two\n"):
        with path.open("ab") as file:
            file.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    assert os.pwrite(fd, b"XYZ", 1) == 3
    assert os.pread(fd, 5, 0) == b"oXYZt"
    os.close(fd)
    assert path.read_bytes() == b"oXYZtwo\n"


def test_shared_mappings_see_writes_and_are_seen(toy: Toy) -> None:
    path = toy.mnt / "map"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as view:
        view[4096:4099] = b"abc"
        view.flush()
        assert os.pread(file.fileno(), 3, 4096) == b"abc"
    assert path.read_bytes()[4096:4099] == b"abc"


def test_names_are_renamed_exchanged_and_removed(toy: Toy) -> None:
    (toy.mnt / "a").write_text("a")
    (toy.mnt / "b").write_text("b")
    exchange = [-100, bytes(toy.mnt / "a"), -100, bytes(toy.mnt / "b")]
    assert _libc.renameat2(*exchange, 2) == 0
    assert (toy.mnt / "a").read_text() == "b"
    assert (toy.mnt / "b").read_text() == "a"
    assert _libc.renameat2(*exchange, 1) == -1
    assert ctypes.get_errno() == errno.EEXIST
    os.rename(toy.mnt / "a", toy.mnt / "b")
    assert (toy.mnt / "b").read_text() == "b"
    (toy.mnt / "d").mkdir()
    with pytest.raises(OSError, match="Operation not permitted"):
        os.link(toy.mnt / "b", toy.mnt / "c")
    with pytest.raises(OSError, match="Operation not permitted"):
        os.mkfifo(toy.mnt / "fifo")
    os.symlink("b", toy.mnt / "s")
    assert os.readlink(toy.mnt / "s") == "b"
    os.rmdir(toy.mnt / "d")
    assert sorted(os.listdir(toy.mnt)) == ["b", "s"]


def test_an_unlinked_file_lives_until_it_is_closed(toy: Toy) -> None:
    path = toy.mnt / "gone"
    with path.open("w+b") as file:
        file.write(b"before")
        file.flush()
        path.unlink()
        assert not path.exists()
        file.write(b" after")
        file.flush()
        assert os.pread(file.fileno(), 100, 0) == b"before after"
        assert os.fstat(file.fileno()).st_nlink == 0


def test_a_directory_of_5000_names_is_listed_whole(toy: Toy) -> None:
    names = [f"file-{number:05d}-{'x' * (number % 40)}" for number in range(5000)]
    for name in names:
        os.mknod(toy.mnt / name, 0o644)
    assert sorted(os.listdir(toy.mnt)) == sorted(names)
    with os.scandir(toy.mnt) as listing:
        assert sum(item.stat().st_size == 0 for item in listing) == 5000


def test_extended_attributes_keep_the_size_protocol(toy: Toy) -> None:
    path = toy.mnt / "x"
    path.touch()
    os.setxattr(path, "user.one", b"1" * 1000)
    os.setxattr(path, "user.two", b"")
    assert os.getxattr(path, "user.one") == b"1" * 1000
    assert os.getxattr(path, "user.two") == b""
    assert os.listxattr(path) == ["user.one", "user.two"]
    buffer = ctypes.create_string_buffer(10)
    assert _libc.getxattr(bytes(path), b"user.one", buffer, 10) == -1
    assert ctypes.get_errno() == errno.ERANGE
    os.removexattr(path, "user.one")
    with pytest.raises(OSError, match="No data"):
        os.getxattr(path, "user.one")


def test_holes_copies_and_allocation_work(toy: Toy) -> None:
    path, copy = toy.mnt / "sparse", toy.mnt / "copy"
    with path.open("w+b") as file:
        os.pwrite(file.fileno(), b"end", 1 << 20)
    is_whole = toy.options.get("is_complete", True)
    with path.open("rb") as source, copy.open("w+b") as target:
        hole = os.lseek(source.fileno(), 0, os.SEEK_HOLE)
        assert hole == (0 if is_whole else (1 << 20) + 3)
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        done = 0
        while done < (1 << 20) + 3:
            done += os.copy_file_range(source.fileno(), target.fileno(), 1 << 30)
    assert copy.read_bytes() == path.read_bytes()
    with copy.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 20)
    assert copy.stat().st_size == 2 << 20


def test_attributes_change_and_locks_stay_in_the_kernel(toy: Toy) -> None:
    path = toy.mnt / "f"
    path.touch()
    path.chmod(0o640)
    os.chown(path, 12, 34)
    os.utime(path, ns=(10**18, 10**18 + 7))
    seen = path.stat()
    assert (seen.st_mode & 0o7777, seen.st_uid, seen.st_gid) == (0o640, 12, 34)
    assert seen.st_mtime_ns == 10**18 + 7
    before = time.time_ns()
    os.utime(path)
    assert path.stat().st_mtime_ns >= before - 10**9
    with path.open("r+b") as one, path.open("r+b") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.statvfs(toy.mnt)
    counts = toy.counts()
    assert "SETLK" not in counts


def test_passthrough_means_no_read_and_no_write_reaches_the_server(plain: Toy) -> None:
    if not plain.is_passing():
        pytest.skip(f"passthrough is {plain.ask('passthrough')}")
    data = os.urandom(4 << 20)
    (plain.mnt / "a").write_bytes(data)
    assert (plain.mnt / "a").read_bytes() == data
    with (plain.mnt / "a").open("r+b") as one, (plain.mnt / "a").open("rb") as two:
        one.write(b"changed")
        one.flush()
        assert os.pread(two.fileno(), 7, 0) == b"changed"
    counts = plain.counts()
    assert counts.get("READ", 0) == counts.get("WRITE", 0) == 0
    assert counts["OPEN"] == 3
    # Every id was closed with its last handle.
    wait_for(lambda: plain.counts().get("RELEASE", 0) == 4)


def test_a_bug_in_a_handler_is_eio_not_einval(plain: Toy) -> None:
    for name in ("bug-1", "no-errno-1"):
        with pytest.raises(OSError, match=_ANY) as caught:
            os.stat(plain.mnt / name)
        assert caught.value.errno == errno.EIO
    (plain.mnt / "fine").write_text("still alive")
    assert "ZeroDivisionError" in plain.log()


def test_what_would_block_is_done_on_the_pool(plain: Toy) -> None:
    (plain.mnt / "slow-dir").mkdir()
    (plain.mnt / "slow-file").write_bytes(b"x" * 100)
    assert (plain.mnt / "slow-file").read_bytes() == b"x" * 100
    assert plain.ask("done").count("make slow-dir") == 1


def test_names_that_are_not_utf8_are_refused(plain: Toy) -> None:
    with pytest.raises(OSError, match=_ANY) as caught:
        os.mkdir(bytes(plain.mnt) + b"/\xff\xfe")
    assert caught.value.errno == errno.EILSEQ


def test_an_incomplete_open_beside_a_passing_one_is_no_error(plain: Toy) -> None:
    (plain.mnt / "a").write_bytes(b"x" * 10000)
    with (plain.mnt / "a").open("r+b", buffering=0) as passing:
        os.rename(plain.mnt / "a", plain.mnt / "partial-a")
        with (plain.mnt / "partial-a").open("rb") as other:
            assert other.read() == b"x" * 10000
        passing.write(b"y")
    assert (plain.mnt / "partial-a").read_bytes()[:1] == b"y"


def test_the_mode_of_an_open_inode_never_changes(plain: Toy) -> None:
    (plain.mnt / "partial-a").write_bytes(b"x" * 10000)
    with (plain.mnt / "partial-a").open("rb") as cached:
        os.rename(plain.mnt / "partial-a", plain.mnt / "a")
        with (plain.mnt / "a").open("rb") as other:
            assert other.read() == cached.read() == b"x" * 10000
    wait_for(lambda: plain.counts()["RELEASE"] == 3)
    reads = plain.counts()["READ"]
    with (plain.mnt / "a").open("rb") as passing:
        assert passing.read() == b"x" * 10000
    assert plain.counts()["READ"] == (reads if plain.is_passing() else reads + 1)


def test_invalidation_makes_the_kernel_ask_again(sticky: Toy) -> None:
    path = sticky.mnt / "a"
    path.write_text("1")
    ino = path.stat().st_ino
    os.stat(path)
    before = sticky.counts()["LOOKUP"]
    os.stat(path)
    assert sticky.counts()["LOOKUP"] == before
    sticky.ask("inval-name 1 a")
    sticky.ask(f"inval-node {ino}")

    def asked_again() -> bool:
        os.stat(path)
        return sticky.counts()["LOOKUP"] > before

    wait_for(asked_again)


def test_an_idle_server_uses_no_cpu(plain: Toy) -> None:
    os.listdir(plain.mnt)
    before = plain.ask("cpu")
    time.sleep(1.0)
    assert plain.ask("cpu") - before < 0.02


def test_serve_ends_on_stop_and_on_unmount(tmp_path: Path) -> None:
    with mounted(tmp_path) as toy:
        os.listdir(toy.mnt)
        assert toy.ask("stop") == "stopping"
        assert toy.process.stdout is not None
        assert toy.process.stdout.readline() == '"served"\n'
        # The session is alive: a next server goes on with it.
        toy.take_over()
        os.mkdir(toy.mnt / "d")
        channel.unmount(str(toy.mnt))
        assert toy.process.stdout is not None
        assert toy.process.stdout.readline() == '"served"\n'


def test_an_abort_ends_the_session(tmp_path: Path) -> None:
    with mounted(tmp_path) as toy:
        os.listdir(toy.mnt)
        assert channel.connection_of(str(toy.mnt)) is not None
        holder = os.open(toy.mnt, os.O_RDONLY)
        channel.abort(str(toy.mnt))
        assert toy.process.stdout is not None
        assert toy.process.stdout.readline() == '"served"\n'
        with pytest.raises(OSError, match=_ANY):
            os.listdir(holder)
        os.close(holder)
