"""The publisher gives a local copy up at the worst moment: while the mount is opening it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptgate.engine.fetch import drop_copy
from ckptgate.ports.spool import LocalBytes


@pytest.fixture
def evicted(world):
    """What gives the copy of a committed file up; a fetch makes a new one."""
    world.commit("", "step-1", {"w": b"good"})
    file = world.spool.node(world.walk(world.a, "step-1/w").attr.ino).file
    path = Path(world.spool.data_path(file))

    def evict():
        with world.spool.transaction():
            drop_copy(world.spool, world.spool.file(file))

    def fetch(asked, offset, length):
        world.catalog.fetched.append((asked, offset, length))
        path.unlink(missing_ok=True)
        path.write_bytes(b"good")
        world.spool.update_file(file, local=LocalBytes.FULL)

    world.catalog.fetch = fetch
    return evict


def once(action, at):
    """Have *action* happen once, right after the catalog or the system answered *at*."""
    owner, name = at
    real = getattr(owner, name)
    done: list[str] = []

    def wrapped(*args, **kwargs):
        answer = real(*args, **kwargs)
        if not done and (name != "open" or "/data/" in str(args[0])):
            done.append(name)
            action()
        return answer

    return wrapped


@pytest.mark.parametrize("moment", ["before the open", "after the open"])
def test_a_reader_gets_the_bytes_from_the_store(world, evicted, monkeypatch, moment: str):
    """I8: whatever the publisher gives up."""
    ino = world.walk(world.a, "step-1/w").attr.ino
    at = (world.catalog, "is_local") if moment == "before the open" else (os, "open")
    with monkeypatch.context() as patch:
        patch.setattr(*at, once(evicted, at))
        opened = world.vfs.open(world.a, ino, os.O_RDONLY)
    # Not passed through: a second reader's bytes will be in another file.
    assert not opened.is_complete
    world.vfs.ensure(world.a, opened.fh, 0, 4)
    assert world.catalog.fetched
    assert os.pread(opened.fd, 10, 0) == b"good"
    path = world.spool.data_path(world.spool.node(ino).file)
    assert os.path.samestat(os.fstat(opened.fd), os.stat(path))


@pytest.mark.parametrize("moment", ["before the open", "after the open"])
def test_a_writer_s_revision_begins_with_the_bytes_from_the_store(
    world, evicted, monkeypatch, moment: str
):
    at = (world.catalog, "is_local") if moment == "before the open" else (os, "open")
    with monkeypatch.context() as patch:
        patch.setattr(*at, once(evicted, at))
        for _ in range(3):
            ino = world.walk(world.a, "step-1/w").attr.ino
            try:
                opened = world.vfs.open(world.a, ino, os.O_RDWR)
                break
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
    assert world.catalog.fetched
    assert os.pread(opened.fd, 10, 0) == b"good"
    world.close(world.a, opened)


def test_an_open_of_a_committed_file_is_its_last_use_and_changes_nothing_else(world):
    world.commit("", "step-1", {"w": b"good"})
    ino = world.walk(world.a, "step-1/w").attr.ino
    file = world.spool.node(ino).file
    before = os.stat(world.spool.data_path(file))
    world.clock.sleep(1000.0)
    world.close(world.a, world.vfs.open(world.a, ino, os.O_RDONLY))
    assert 0 < world.clock.now_ns() - world.spool.last_use_ns(file) < 100_000
    after = os.stat(world.spool.data_path(file))
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)


def test_an_open_of_a_file_that_is_still_written_leaves_its_times_alone(world):
    """A digest counts only while the ctime is what it was."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"good")
    ino = world.walk(world.a, "step-1/w").attr.ino
    path = world.spool.data_path(world.spool.node(ino).file)
    before = os.stat(path)
    world.close(world.a, world.vfs.open(world.a, ino, os.O_RDONLY))
    assert os.stat(path).st_ctime_ns == before.st_ctime_ns
