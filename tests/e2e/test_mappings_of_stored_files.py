"""A mapping that is kept while the publisher stores its file, and the file opened once more."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Gateway, cli, until

pytestmark = [pytest.mark.fuse]


@pytest.fixture(params=["true", "false"], ids=["passthrough", "loop"])
def node(request, require, tmp_path) -> Iterator[Gateway]:
    """A mount whose store is on another file system: nothing can be linked into it."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    memory = Path("/dev/shm")
    is_other = memory.is_dir() and memory.stat().st_dev != tmp_path.stat().st_dev
    require(is_other, "there is no second file system for the store")
    with tempfile.TemporaryDirectory(dir=memory) as store:
        made = Gateway(tmp_path, "node", Path(store), f"passthrough = {request.param}\n{FAST}")
        try:
            yield made.start()
        finally:
            made.destroy()


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDWR | os.O_APPEND], ids=["write", "append"])
def test_a_mapping_and_a_later_descriptor_write_the_same_bytes(node: Gateway, flags: int):
    """I1: what is committed has what both have written."""
    path = node.mnt / "run" / "step-1"
    path.mkdir(parents=True)
    file = path / "a.txt"
    file.write_bytes(b"-" * 12000)
    with file.open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), 0)
    with contextlib.closing(mapped):
        data = node.store / "run" / ".ckptgate" / "attempts"
        until("the file is stored", lambda: list(data.glob("step-1.0/data/*/*")))
        until("the row says so", lambda: node.attempts("step-1")[0]["stored_bytes"] == 12000)
        inode = file.stat().st_ino
        fd = os.open(file, flags)
        try:
            assert os.fstat(fd).st_ino == inode
            mapped[4096:4103] = b"mapping"
            os.pwrite(fd, b"descriptor", 0)
            assert os.pread(fd, 7, 4096) == b"mapping"
        finally:
            os.close(fd)
        mapped[8192:8197] = b"later"
        mapped.flush()
    done = cli("commit", path, "--all")
    assert done.returncode == 0, done.stderr
    published = node.store / "run" / "step-1" / "a.txt"
    until("the checkpoint is published", published.exists)
    committed = published.read_bytes()
    assert committed[4096:4103] == b"mapping"
    assert committed[8192:8197] == b"later"
    assert committed.startswith(b"descriptor" if not flags & os.O_APPEND else b"---")
    assert committed.endswith(b"descriptor" if flags & os.O_APPEND else b"---")
