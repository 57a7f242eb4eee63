"""Several processes open a file for writing at once that has to be copied: all write one copy."""

from __future__ import annotations

import errno
import os

import pytest

from ckptgate.errors import CkptError
from ckptgate.model.states import FileState
from ckptgate.vfs import writing
from ckptgate.vfs.bytes import copy_file


def _stored(world, path: str) -> int:
    """A file of an open attempt that the store has already; its node."""
    world.write(world.a, path, b"0123456789")
    ino = world.walk(world.a, path).attr.ino
    file = world.spool.node(ino).file
    for state in (FileState.DIGESTED, FileState.STORED):
        world.spool.update_file(file, state=state, size=10)
    return ino


def _opened(world, path: str, flags: int):
    """As the kernel opens: after ESTALE it looks the name up again, once."""
    for last in (False, True):
        try:
            ino = world.walk(world.a, path).attr.ino
            return ino, world.vfs.open(world.a, ino, flags)
        except CkptError as exc:
            if exc.errno != errno.ESTALE or last:
                raise
    raise AssertionError


@pytest.mark.parametrize("path", ["run/step-1/f", "run/plain/f", "run/model.pt"])
@pytest.mark.parametrize("has_reader", [False, True])
def test_writers_that_open_at_once_write_the_same_bytes(world, monkeypatch, path, has_reader):
    for directory in ("run", "run/step-1", "run/plain"):
        world.mkdir(world.a, directory)
    ino = _stored(world, path)
    if has_reader:
        world.vfs.open(world.a, ino, os.O_RDONLY)
    first: list = []

    def copied_meanwhile(*args):
        copy_file(*args)
        if not first:
            first.append(None)
            first[0] = _opened(world, path, os.O_RDWR)
            os.pwrite(first[0][1].fd, b"A", 0)

    monkeypatch.setattr(writing, "copy_file", copied_meanwhile)
    node, second = _opened(world, path, os.O_RDWR)
    os.pwrite(second.fd, b"B", 9)
    assert first[0][0] == node
    assert os.pread(first[0][1].fd, 10, 0) == os.pread(second.fd, 10, 0) == b"A12345678B"
    world.close(world.a, first[0][1])
    world.close(world.a, second)
    assert world.read(world.a, path) == b"A12345678B"
    rows = world.spool.nodes_of_file(world.spool.node(node).file)
    assert [row.ino for row in rows] == [node]
