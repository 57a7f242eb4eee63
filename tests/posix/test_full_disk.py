"""A full spool disk: the error comes from write or fsync, never from close alone."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Gateway, until
from tests.e2e.test_bad_places import tmpfs

pytestmark = [pytest.mark.fuse]

CHUNK = b"x" * 65536


@pytest.fixture(scope="module", params=["passthrough", "loop"])
def small(request, require, tmp_path_factory) -> Iterator[Gateway]:
    """A mount whose spool has a disk of 24 MB."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "mounting a tmpfs needs root")
    base = tmp_path_factory.mktemp(request.param)
    (base / "store").mkdir()
    with tmpfs(base / "node", "size=24m"):
        config = f"passthrough = {'true' if request.param == 'passthrough' else 'false'}\n{FAST}"
        node = Gateway(base, "node", base / "store", config).start()
        try:
            yield node
        finally:
            node.destroy()


@pytest.fixture(params=["checkpoint", "plain"])
def place(small: Gateway, request) -> Path:
    number = sum(1 for _ in small.mnt.iterdir())
    path = small.mnt / f"run{number}" / ("step-1" if request.param == "checkpoint" else "plain")
    path.parent.mkdir()
    path.mkdir()
    return path


@contextlib.contextmanager
def filled(path: Path) -> Iterator[int]:
    """A file that has taken all room; it is removed at the end."""
    # The room of a removed file comes back once the kernel has let go of it.
    until("room", lambda: os.statvfs(path.parent).f_bavail * 4096 > 6_000_000)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError) as caught:
            while True:
                os.write(fd, CHUNK)
        assert caught.value.errno == errno.ENOSPC
        yield fd
    finally:
        os.close(fd)
        os.unlink(path)


def test_a_write_says_that_the_disk_is_full_and_what_was_written_stays(place: Path):
    with filled(place / "big") as fd:
        os.fsync(fd)
        size = os.fstat(fd).st_size
        assert size > 4_000_000
        assert os.pread(fd, 65536, size - 65536) == CHUNK
        with pytest.raises(OSError) as caught:
            os.posix_fallocate(fd, 0, 64 << 20)
        assert caught.value.errno == errno.ENOSPC
        with open(place / "small", "wb", buffering=0) as stream:
            with pytest.raises(OSError) as caught:
                stream.write(CHUNK)
            assert caught.value.errno == errno.ENOSPC
        os.unlink(place / "small")
    with filled(place / "again"):
        pass


def test_a_store_through_a_mapping_is_not_lost_silently(small: Gateway, place: Path):
    """With passthrough it is SIGBUS, as locally; without, msync and fsync say it."""
    with filled(place / "big"):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            code = 99
            with contextlib.suppress(BaseException):
                fd = os.open(place / "mapped", os.O_RDWR | os.O_CREAT)
                os.ftruncate(fd, 8 << 20)
                view = mmap.mmap(fd, 8 << 20)
                for at in range(0, 8 << 20, 4096):
                    view[at] = 1
                try:
                    view.flush()
                    os.fsync(fd)
                    code = 0
                except OSError as exc:
                    code = exc.errno or 98
            os._exit(code)
        status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGBUS
        assert "passthrough = true" in small.config.read_text()
    else:
        assert os.WEXITSTATUS(status) in {errno.ENOSPC, errno.EIO}
