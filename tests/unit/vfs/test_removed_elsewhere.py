"""Plain names that another node removes: they go here too, but for what is newer here."""

from __future__ import annotations

import os

import pytest
from tests.unit.vfs.test_meanwhile import before_the_change

from ckptgate.errors import MissingError, TransientStoreError
from ckptgate.ports.store import PlainKind


def in_the_store(world, *paths):
    for path in paths:
        kind = PlainKind.FILE if path.endswith(".txt") else PlainKind.DIR
        world.catalog.add_plain(path, path.encode() if kind is PlainKind.FILE else b"", kind=kind)


def removed_there(world, *paths):
    """Another node's doing; a moment later than what this one asked last."""
    for path in paths:
        del world.catalog.plain[path], world.catalog.plain_bytes[path]
    world.clock.seconds += 2


def given(world, path):
    """The publisher brought all that is here into the store."""
    file = world.spool.node(world.walk(world.a, path).attr.ino).file
    found = os.stat(world.spool.data_path(file))
    world.catalog.add_plain(path, world.read(world.a, path), mtime_ns=found.st_mtime_ns)
    with world.spool.transaction():
        world.spool.update_file(file, size=found.st_size, mtime_ns=found.st_mtime_ns)
        for op in world.spool.plain_ops():
            world.spool.drop_plain_op(op.id)


def test_a_directory_that_another_node_removes_goes_with_all_below_it(world):
    in_the_store(world, "d", "d/s", "d/s/x.txt", "d/y.txt", "z.txt")
    known = world.walk(world.a, "d/s").attr.ino
    assert world.names(world.a, "d/s") == ["x.txt"]
    assert world.names(world.a, "d") == ["s", "y.txt"]
    removed_there(world, "d/s/x.txt", "d/s", "d/y.txt", "d")
    assert not world.exists(world.a, "d")
    assert world.names(world.a) == ["z.txt"]
    with pytest.raises(MissingError):
        world.vfs.lookup(world.a, known, "x.txt")
    world.mkdir(world.a, "d")
    assert world.names(world.a, "d") == []


def test_a_listing_leaves_out_what_another_node_removed(world):
    """As a look-up does: else `rmdir` would find the directory not empty for ever."""
    in_the_store(world, "d", "d/s", "d/x.txt", "d/y.txt")
    assert world.names(world.a, "d") == ["s", "x.txt", "y.txt"]
    removed_there(world, "d/s", "d/x.txt")
    assert world.names(world.a, "d") == ["y.txt"]
    removed_there(world, "d/y.txt")
    world.rmdir(world.a, "d")
    assert not world.exists(world.a, "d")


def test_a_directory_made_here_goes_too_once_the_store_had_it(world):
    world.mkdir(world.a, "d")
    world.write(world.a, "d/x.txt", b"1")
    world.clock.seconds += 2
    assert world.names(world.a) == ["d"]
    in_the_store(world, "d")
    given(world, "d/x.txt")
    world.clock.seconds += 2
    assert world.names(world.a, "d") == ["x.txt"]
    removed_there(world, "d/x.txt", "d")
    assert world.names(world.a) == []
    assert not world.exists(world.a, "d")


def test_a_directory_that_became_a_file_there_is_one_here(world):
    in_the_store(world, "d")
    assert world.names(world.a) == ["d"]
    removed_there(world, "d")
    world.catalog.add_plain("d", b"now a file")
    assert world.read(world.a, "d") == b"now a file"


NEWER = {
    "written": lambda world: world.write(world.a, "d/s/new.txt", b"1"),
    "open": lambda world: world.vfs.open(
        world.a, world.walk(world.a, "d/s/mine.txt").attr.ino, os.O_RDWR
    ),
    "queued": lambda world: world.mkdir(world.a, "d/s/new"),
    "checkpoint": lambda world: world.mkdir(world.a, "d/s/step-1"),
    "pending": lambda world: world.write(world.a, "d/s/model.pt", b"1"),
}


@pytest.mark.parametrize("newer", NEWER.values(), ids=NEWER)
def test_a_directory_stays_for_what_is_newer_here(world, newer):
    """I11: nothing that was written here is lost by what another node removes."""
    in_the_store(world, "d", "d/s")
    world.write(world.a, "d/s/mine.txt", b"mine")
    given(world, "d/s/mine.txt")
    newer(world)
    removed_there(world, "d/s/mine.txt", "d/s", "d")
    assert world.names(world.a) == ["d"]
    assert world.names(world.a, "d") == ["s"]


def test_a_directory_of_which_the_store_cannot_be_asked_stays(world):
    in_the_store(world, "d")
    assert world.exists(world.a, "d")
    world.clock.seconds += 2
    asked = 0

    def away(path):
        nonlocal asked
        asked += 1
        raise TransientStoreError("away")

    world.catalog.plain_stat = away
    assert world.exists(world.a, "d")
    assert world.exists(world.a, "d")
    assert asked == 1


@pytest.mark.parametrize("kind", ["create", "mkdir", "symlink", "rename"])
def test_nothing_is_made_in_a_directory_that_goes_meanwhile(world, kind):
    """ENOENT, as in one that was removed: a file there would have no name, and be lost."""
    in_the_store(world, "d")
    world.write(world.a, "new.txt", b"1")
    ino = world.walk(world.a, "d").attr.ino
    change = {
        "create": lambda: world.vfs.create(world.a, ino, "f", os.O_WRONLY | os.O_CREAT, 0o644),
        "mkdir": lambda: world.vfs.mkdir(world.a, ino, "f", 0o755),
        "symlink": lambda: world.vfs.symlink(world.a, ino, "f", "to"),
        "rename": lambda: world.vfs.rename(world.a, 1, "new.txt", ino, "f", 0),
    }[kind]

    def gone():
        removed_there(world, "d")
        assert not world.exists(world.b, "d")

    before_the_change(world, gone)
    with pytest.raises(MissingError):
        change()
    assert world.spool.children(ino) == []
    assert world.names(world.a) == ["new.txt"]
