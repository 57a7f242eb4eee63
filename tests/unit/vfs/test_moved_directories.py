"""Plain names that were renamed here, and whose rename the store is still to see."""

from __future__ import annotations

import os

import pytest

from ckptgate.errors import MissingError, TransientStoreError
from ckptgate.model.moves import Move
from ckptgate.ports.spool import PlainOpKind
from ckptgate.ports.store import PlainKind


def give(world, path):
    """The store was given all that is here, as the publisher does."""
    file = world.spool.node(world.walk(world.a, path).attr.ino).file
    found = os.stat(world.spool.data_path(file))
    world.catalog.add_plain(path, world.read(world.a, path), mtime_ns=found.st_mtime_ns)
    while path := path.rpartition("/")[0]:
        world.catalog.add_plain(path, kind=PlainKind.DIR)
    with world.spool.transaction():
        world.spool.update_file(file, size=found.st_size, mtime_ns=found.st_mtime_ns)
        for op in world.spool.plain_ops():
            world.spool.drop_plain_op(op.id)


def in_the_store(world, *paths):
    for path in paths:
        kind = PlainKind.FILE if path.endswith(".txt") else PlainKind.DIR
        world.catalog.add_plain(path, path.encode() if kind is PlainKind.FILE else b"", kind=kind)


def rename_there(world):
    """The publisher works one rename off: first in the store, then in the queue."""
    op = next(op for op in world.spool.plain_ops() if op.op is PlainOpKind.RENAME)
    for found in (world.catalog.plain, world.catalog.plain_bytes):
        for path in [p for p in found if p == op.path or p.startswith(f"{op.path}/")]:
            found[op.to + path[len(op.path) :]] = found.pop(path)
    return op


def test_a_file_stays_when_its_directory_is_renamed_before_the_store_knows(world):
    """I11: the store doesn't have it there yet, which says nothing."""
    world.mkdir(world.a, "d")
    world.write(world.a, "d/value.log", b"1")
    give(world, "d/value.log")
    world.rename(world.a, "d", "e")
    world.clock.seconds += 10
    assert world.read(world.a, "e/value.log") == b"1"
    world.unlink(world.a, "e/value.log")
    assert world.names(world.a, "e") == []
    world.rmdir(world.a, "e")
    assert [op.op for op in world.spool.plain_ops()] == ["rename", "remove", "rmdir"]


def test_what_only_the_store_has_is_found_in_a_renamed_directory(world):
    in_the_store(world, "d", "d/s", "d/s/x.txt", "d/y.txt")
    world.rename(world.a, "d", "e")
    world.rename(world.a, "e/s", "e/t")
    world.mkdir(world.a, "d")
    assert world.names(world.a, "e") == ["t", "y.txt"]
    assert world.names(world.a, "e/t") == ["x.txt"]
    assert world.names(world.a, "d") == []
    assert world.read(world.a, "e/t/x.txt") == b"d/s/x.txt"
    for path in ("d/y.txt", "e/s", "d/s"):
        assert not world.exists(world.a, path)
    world.write(world.a, "e/y.txt", b"")
    opened = world.vfs.open(world.a, world.walk(world.a, "e/t/x.txt").attr.ino, os.O_RDWR)
    assert os.pread(opened.fd, 99, 0) == b"d/s/x.txt"
    world.close(world.a, opened)


@pytest.mark.parametrize("is_done", [0, 1, 2])
def test_it_is_found_however_far_the_publisher_is(world, is_done):
    """Also between the store's rename and the end of the queue's."""
    in_the_store(world, "d", "d/x.txt", "d/y.txt")
    world.rename(world.a, "d", "e")
    world.rename(world.a, "e", "f")
    opened = world.vfs.open(world.a, world.walk(world.a, "f/y.txt").attr.ino, os.O_RDONLY)
    for _ in range(is_done):
        op = rename_there(world)
        if is_done == 2:
            world.spool.drop_plain_op(op.id)
    assert world.names(world.a, "f") == ["x.txt", "y.txt"]
    assert world.read(world.a, "f/x.txt") == b"d/x.txt"
    assert world.vfs.read(world.a, opened.fh, 0, 99) == b"d/y.txt"
    world.close(world.a, opened)


def test_what_was_in_the_way_of_a_renamed_directory_is_not_found_in_it(world):
    in_the_store(world, "d", "d/x.txt", "e", "e/old.txt", "e/x.txt")
    for name in ("old.txt", "x.txt"):
        world.unlink(world.a, f"e/{name}")
    world.rename(world.a, "d", "e")
    assert world.names(world.a, "e") == ["x.txt"]
    assert not world.exists(world.a, "e/old.txt")
    assert world.read(world.a, "e/x.txt") == b"d/x.txt"
    world.unlink(world.a, "e/x.txt")
    assert not world.exists(world.a, "e/x.txt")
    assert world.names(world.a, "e") == []


@pytest.mark.parametrize("is_done", [0, 1, 2])
def test_what_was_moved_out_of_the_way_is_not_found_in_what_came_there(world, is_done):
    """The store may have done none of it, one rename, or both and not have said so."""
    in_the_store(world, "d", "d/s", "d/x.txt", "e", "e/y.txt")
    world.rename(world.a, "d", "old")
    world.rename(world.a, "e", "d")
    world.unlink(world.a, "d/y.txt")
    for number in range(is_done):
        op = rename_there(world)
        if number == 0 and is_done == 2:
            world.spool.drop_plain_op(op.id)
    for name in ("s", "x.txt", "y.txt"):
        assert not world.exists(world.a, f"d/{name}")
    assert world.names(world.a, "d") == []
    assert world.names(world.a, "old") == ["s", "x.txt"]


def test_a_directory_that_was_made_and_renamed_here_is_listed_without_the_store(world):
    world.mkdir(world.a, "d")
    world.rename(world.a, "d", "e")

    def away(path):
        raise TransientStoreError(path)

    world.catalog.plain_list = world.catalog.plain_stat = away
    assert world.names(world.a, "e") == []
    with pytest.raises(MissingError):
        world.walk(world.a, "e/x.txt")


def test_what_is_told_of_directories_says_which_renames_it_has_in_it(world):
    """Of a shared job; those of other members, its own come in order."""
    world.mkdir(world.s, "run")
    world.mkdir(world.s, "run/step-1")
    world.mkdir(world.s, "run/step-1/tmp")
    row = world.attempt("step-1")
    member = world.spool.get_meta("member")
    world.rename(world.s, "run/step-1/tmp", "run/step-1/final")
    world.spool.add_move(row.id, Move(member="other-1", n=4, path="final", to="last"))
    world.mkdir(world.s, "run/step-1/final/sub")
    world.rename(world.s, "run/step-1/final/sub", "run/step-1/sub")
    told = [(op.op, op.path, op.to, dict(op.after)) for op in world.spool.name_ops(row.id)]
    assert told == [
        ("mkdir", "tmp", "", {}),
        ("rename", "tmp", "final", {}),
        ("mkdir", "final/sub", "", {"other-1": 5}),
        ("rename", "final/sub", "sub", {"other-1": 5}),
    ]
    own = [move for move in world.spool.moves(row.id) if move.member == member]
    assert [(move.n, move.path, move.to) for move in own] == [
        (1, "tmp", "final"),
        (3, "final/sub", "sub"),
    ]


def test_a_file_that_was_renamed_away_and_back_comes_to_the_store(world):
    """I11: its first copy is still queued, and its removal behind that."""
    world.write(world.a, "a.txt", b"1")
    world.rename(world.a, "a.txt", "b.txt")
    world.rename(world.a, "b.txt", "a.txt")
    there = set()
    for op in world.spool.plain_ops():
        if op.op is PlainOpKind.PUT:
            there.add(op.path)
        else:
            there.discard(op.path)
    assert there == {"a.txt"}
    before = len(world.spool.plain_ops())
    world.close(world.a, world.open_new(world.a, "a.txt"))
    assert len(world.spool.plain_ops()) == before
