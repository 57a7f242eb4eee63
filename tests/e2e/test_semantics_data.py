"""Bytes of files: what each call does in an open checkpoint and in a plain directory.

All of it twice: with kernel passthrough, and with the loop that moves the bytes itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.parametrize("shared", [True, False], indirect=True, ids=["passthrough", "loop"]),
]


def test_truncating_open_over_an_existing_name(place: Path):
    path = place / "a"
    path.write_bytes(b"old bytes")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert os.fstat(fd).st_size == 0
    os.write(fd, b"new")
    os.close(fd)
    assert path.read_bytes() == b"new"


def test_exclusive_create(place: Path):
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(fd)
    with pytest.raises(FileExistsError):
        os.open(place / "a", os.O_RDWR | os.O_CREAT | os.O_EXCL)


def test_a_closed_file_is_opened_again_and_changed(place: Path):
    path = place / "a"
    path.write_bytes(b"0123456789")
    with path.open("r+b") as stream:
        stream.seek(4)
        stream.write(b"xx")
        stream.seek(0, os.SEEK_END)
        stream.write(b"end")
    assert path.read_bytes() == b"0123xx6789end"


def test_append_from_two_descriptors(place: Path):
    path = place / "log"
    first = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    second = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in range(50):
        os.write((first, second)[number % 2], b"%02d\n" % number)
    os.close(first)
    os.close(second)
    assert path.read_text().split() == [f"{n:02d}" for n in range(50)]


def test_direct_io_at_any_alignment(place: Path):
    path = place / "a"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.write(fd, b"x" * 1000) == 1000
        assert os.pwrite(fd, b"y" * 77, 12345) == 77
        assert os.pread(fd, 100, 950) == b"x" * 50 + b"\0" * 50
        aligned = mmap.mmap(-1, 8192)
        aligned.write(b"z" * 8192)
        assert os.pwritev(fd, [aligned], 8192) == 8192
    finally:
        os.close(fd)
    data = path.read_bytes()
    assert (len(data), data[:1000], data[8192:]) == (16384, b"x" * 1000, b"z" * 8192)


def test_writes_out_of_order_and_holes(place: Path):
    path = place / "a"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"end", 1_000_000)
    os.pwrite(fd, b"start", 0)
    assert os.fstat(fd).st_size == 1_000_003
    assert os.lseek(fd, 0, os.SEEK_HOLE) < 1_000_000
    assert os.lseek(fd, 100_000, os.SEEK_DATA) > 100_000
    os.close(fd)
    assert path.read_bytes() == b"start" + b"\0" * 999_995 + b"end"
    assert path.stat().st_blocks * 512 < 1_000_000


def test_truncating_up_before_the_write_and_down_after_it(place: Path):
    path = place / "a"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 300_000)
    assert os.fstat(fd).st_size == path.stat().st_size == 300_000
    os.pwrite(fd, b"abc", 0)
    os.ftruncate(fd, 2)
    assert os.fstat(fd).st_size == path.stat().st_size == 2
    os.close(fd)
    os.truncate(path, 5)
    assert path.read_bytes() == b"ab\0\0\0"
    os.truncate(path, 0)
    assert path.stat().st_size == 0


def test_large_and_vectored_writes_are_complete(place: Path):
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    block = os.urandom(7 * 1024 * 1024 + 13)
    assert os.write(fd, block) == len(block)
    assert os.writev(fd, [b"a" * 10, b"b" * 100_000]) == 100_010
    os.close(fd)
    assert (place / "a").read_bytes() == block + b"a" * 10 + b"b" * 100_000


def test_copies_made_by_the_kernel(place: Path, tmp_path: Path):
    source = tmp_path / "source"
    data = os.urandom(3_000_000)
    source.write_bytes(data)
    with source.open("rb") as stream, (place / "sent").open("wb") as out:
        sent = 0
        while sent < len(data):
            sent += os.sendfile(out.fileno(), stream.fileno(), sent, len(data) - sent)
    assert (place / "sent").read_bytes() == data
    with (place / "sent").open("rb") as stream, (place / "ranged").open("wb") as out:
        left = len(data)
        while left:
            left -= os.copy_file_range(stream.fileno(), out.fileno(), left)
    assert (place / "ranged").read_bytes() == data
    reading, writing = os.pipe()
    with source.open("rb") as stream, (place / "spliced").open("wb") as out:
        moved = os.splice(stream.fileno(), writing, 65536)
        assert os.splice(reading, out.fileno(), moved) == moved
    os.close(reading)
    os.close(writing)
    assert (place / "spliced").read_bytes() == data[:moved]


def test_allocation_reserves_space(place: Path):
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 1_000_000)
    os.close(fd)
    assert (place / "a").stat().st_size == 1_000_000


def test_fsync_of_files_and_directories(place: Path):
    fd = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"1")
    os.fsync(fd)
    os.write(fd, b"2")
    os.fdatasync(fd)
    os.write(fd, b"3")
    os.close(fd)
    reading = os.open(place / "a", os.O_RDONLY)
    os.fsync(reading)
    os.close(reading)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)
    assert (place / "a").read_bytes() == b"123"


def test_a_second_descriptor_sees_each_write_at_once(place: Path):
    with (place / "a").open("wb", buffering=0) as out, (place / "a").open("rb") as stream:
        for number in range(20):
            out.write(b"%03d" % number)
            assert stream.read() == b"%03d" % number
            assert os.stat(place / "a").st_size == 3 * number + 3


def test_private_mappings(place: Path):
    path = place / "a"
    path.write_bytes(b"a" * 10_000)
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    assert mapped[:] == b"a" * 10_000
    mapped[0:1] = b"b"
    assert mapped[:2] == b"ba"
    assert path.read_bytes() == b"a" * 10_000
    mapped.close()


def test_shared_mappings(place: Path):
    path = place / "a"
    path.write_bytes(b"a" * 10_000)
    with path.open("r+b") as stream:
        reading = mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        writing = mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED)
    writing[5000:5003] = b"xyz"
    assert reading[4999:5004] == b"axyza"
    writing.flush()
    assert path.read_bytes()[5000:5003] == b"xyz"
    writing.close()
    reading.close()


def test_parallel_reads_of_one_file(place: Path):
    path = place / "a"
    data = os.urandom(4_000_000)
    path.write_bytes(data)

    def read(part: int) -> bytes:
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.pread(fd, 250_000, part * 250_000)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(8) as pool:
        assert b"".join(pool.map(read, range(16))) == data


def test_parallel_writes_to_one_file(place: Path):
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    with ThreadPoolExecutor(8) as pool:
        done = pool.map(lambda n: os.pwrite(fd, bytes([n]) * 100_000, n * 100_000), range(16))
        assert list(done) == [100_000] * 16
    os.close(fd)
    assert (place / "a").read_bytes() == b"".join(bytes([n]) * 100_000 for n in range(16))


def test_a_file_without_a_name_goes_on(place: Path):
    path = place / "a"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"1234")
    path.unlink()
    assert not path.exists()
    assert os.fstat(fd).st_nlink == 0
    os.write(fd, b"5678")
    os.ftruncate(fd, 6)
    os.fsync(fd)
    assert os.pread(fd, 100, 0) == b"123456"
    path.write_bytes(b"another")
    assert os.pread(fd, 100, 0) == b"123456"
    os.close(fd)
    assert path.read_bytes() == b"another"


def test_a_file_is_renamed_while_it_is_written(place: Path):
    """As safetensors does: rename first, close later."""
    path = place / "model.bin"
    fd = os.open(place / ".tmpXYZ", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, b"first ")
    os.rename(place / ".tmpXYZ", path)
    os.write(fd, b"second")
    assert path.read_bytes() == b"first second"
    os.close(fd)
    assert path.read_bytes() == b"first second"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_rename_over_an_open_file_leaves_its_reader_the_old_bytes(place: Path):
    (place / "a").write_bytes(b"old")
    (place / "b").write_bytes(b"new")
    with (place / "a").open("rb") as stream:
        os.replace(place / "b", place / "a")
        assert stream.read() == b"old"
    assert (place / "a").read_bytes() == b"new"
    assert os.listdir(place) == ["a"]


def test_a_descriptor_outlives_the_process_that_opened_it(place: Path):
    """A forked child writes and closes after its parent has ended."""
    code = """
import os, sys
parent = os.getpid()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, b"parent ")
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    pass
os.write(fd, b"child")
os.close(fd)
"""
    path = place / "a"
    # The pipe is at its end when both are gone.
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=30, capture_output=True)
    assert path.read_bytes() == b"parent child"


def test_locks(place: Path):
    path = place / "lock"
    path.touch()
    with path.open("r+b") as one, path.open("r+b") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_UN)
    code = """
import fcntl, sys
with open(sys.argv[1], "r+b") as f:
    try:
        fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("held")
"""
    with path.open("r+b") as one:
        fcntl.lockf(one, fcntl.LOCK_EX)
        held = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
    assert held.stdout == b"held\n"
    with path.open("r+b") as one, path.open("r+b") as two:
        _open_file_lock(one.fileno(), fcntl.F_WRLCK)
        with pytest.raises(OSError):
            _open_file_lock(two.fileno(), fcntl.F_WRLCK)
        _open_file_lock(one.fileno(), fcntl.F_UNLCK)
        _open_file_lock(two.fileno(), fcntl.F_WRLCK)


def _open_file_lock(fd: int, kind: int) -> None:
    import struct

    ofd_setlk = 37
    fcntl.fcntl(fd, ofd_setlk, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def test_files_of_no_name_and_foreign_kinds_are_refused(place: Path):
    with pytest.raises(OSError) as caught:
        os.open(place, os.O_TMPFILE | os.O_RDWR)
    assert caught.value.errno == errno.EOPNOTSUPP
    for make in (os.mkfifo, lambda p: os.mknod(p, 0o60600, os.makedev(7, 0))):
        with pytest.raises(OSError) as caught:
            make(place / "x")
        assert caught.value.errno in {errno.EPERM, errno.EOPNOTSUPP}
    assert os.listdir(place) == []


def test_a_mapping_of_a_file_that_is_closed_counts_as_a_write(place: Path):
    """Stores through a mapping after the close are seen by readers."""
    path = place / "a"
    path.write_bytes(b"a" * 5000)
    with path.open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), 0)
    mapped[0:3] = b"xyz"
    with contextlib.closing(mapped):
        mapped.flush()
    assert path.read_bytes()[:4] == b"xyza"
