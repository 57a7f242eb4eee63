"""The spool's limit as callers see it, and whose bytes a moved file has."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest

from ckptgate.errors import FullError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import CONTACT_META, ROOM_META, Contact, LocalBytes, SpoolRoom
from ckptgate.vfs.settings import VfsSettings

MIB = 1 << 20


def set_room(world, *, used: int, limit: int = 8 * MIB, is_full: bool = False) -> None:
    room = SpoolRoom(used=used, limit=limit, is_full=is_full)
    world.spool.set_meta(ROOM_META, msgspec.json.encode(room).decode())
    world.clock.sleep(1.0)


@pytest.fixture
def limited(world):
    world.vfs._ctx.settings = VfsSettings(spool_max_bytes=8 * MIB)
    return world


def test_a_full_spool_takes_no_new_files_and_lets_open_ones_go_on(limited):
    world = limited
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/old.bin", b"1")
    opened = world.open_new(world.a, "step-1/w.bin")
    set_room(world, used=8 * MIB, is_full=True)
    with pytest.raises(FullError) as refused:
        world.open_new(world.a, "step-1/more.bin")
    assert refused.value.errno == errno.ENOSPC
    assert "spool_max" in str(refused.value)
    ino = world.walk(world.a, "step-1/old.bin").attr.ino
    with pytest.raises(FullError):
        world.vfs.open(world.a, ino, os.O_RDWR)
    assert world.read(world.a, "step-1/old.bin") == b"1"
    assert os.pwrite(opened.fd, b"goes on", 0) == 7
    world.close(world.a, opened)
    world.mkdir(world.a, "step-1/sub")
    world.unlink(world.a, "step-1/old.bin")
    set_room(world, used=6 * MIB)
    world.write(world.a, "step-1/more.bin", b"again")


def test_without_a_limit_nothing_is_refused_whatever_an_earlier_mount_counted(world):
    set_room(world, used=8 * MIB, is_full=True)
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w.bin", b"1")


@pytest.mark.parametrize(("used", "left"), [(0, 8 * MIB), (3 * MIB, 5 * MIB), (9 * MIB, 0)])
def test_statfs_shows_the_limit_and_what_is_left_of_it(limited, used: int, left: int):
    set_room(limited, used=used)
    found = limited.vfs.statfs(limited.a)
    assert found.blocks * found.fragment_size == 8 * MIB
    assert found.blocks_available * found.fragment_size == left
    assert found.blocks_free * found.fragment_size == left


def stored(world, path: str) -> int:
    """The file at *path* as if the store had it; its number."""
    file = world.spool.node(world.walk(world.a, path).attr.ino).file
    for state in (FileState.DIGESTED, FileState.STORED):
        world.spool.update_file(file, state=state, key=".ckptgate/attempts/step-1.0/data/m/1")
    return file


def test_a_file_that_is_moved_into_another_checkpoint_is_stored_with_that(world):
    """I9: what the store has of it belongs to the old one, and goes when that goes."""
    for name in ("step-1", "step-2"):
        world.mkdir(world.a, name)
    world.write(world.a, "step-1/w.bin", b"1")
    file = stored(world, "step-1/w.bin")
    world.rename(world.a, "step-1/w.bin", "step-2/w.bin")
    row = world.spool.file(file)
    assert (row.state, row.key) == (FileState.QUIET, "")
    assert world.read(world.a, "step-2/w.bin") == b"1"


def test_a_file_that_is_moved_out_of_a_checkpoint_is_digested_anew(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w.bin", b"1")
    file = stored(world, "step-1/w.bin")
    world.rename(world.a, "step-1/w.bin", "w.pt")
    assert world.spool.file(file).state is FileState.QUIET


def test_a_committed_checkpoint_s_file_is_not_moved_out_but_copied(world):
    world.commit("", "step-1", {"w.bin": b"good"})
    world.mkdir(world.a, "step-2")
    with pytest.raises(OSError) as refused:
        world.rename(world.a, "step-1/w.bin", "step-2/w.bin")
    assert refused.value.errno == errno.EXDEV
    assert world.names(world.a, "step-2") == []
    assert world.exists(world.a, "step-1/w.bin")
    assert LocalBytes.FULL


def committed_before(world, size: int) -> None:
    """A checkpoint of this node with so many bytes."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w.bin", b"x" * size)
    row = world.commit_own("", "step-1")
    for _, _, file in world.spool.files_of_attempt(row.id):
        world.spool.update_file(file.file, size=size)


def begin(world) -> None:
    world.mkdir(world.a, "step-2")


def under_way(world) -> None:
    """Another save waits for the store; when it is there its copy can go."""
    world.mkdir(world.b, "step-7")
    world.spool.update_attempt(world.attempt("step-7").id, state=AttemptState.SEALED)


def test_a_first_file_waits_for_the_room_of_the_checkpoint_before(limited, caplog):
    world = limited
    committed_before(world, 3 * MIB)
    set_room(world, used=6 * MIB)
    under_way(world)
    begin(world)
    waits = []

    def look() -> None:
        waits.append(world.clock.seconds)
        if len(waits) == 5:
            room = SpoolRoom(used=4 * MIB, limit=8 * MIB)
            world.spool.set_meta(ROOM_META, msgspec.json.encode(room).decode())

    world.clock.on_sleep = look
    world.write(world.a, "step-2/w.bin", b"1")
    assert len(waits) == 5
    assert "room-awaited" in caplog.text
    set_room(world, used=8 * MIB - 1)
    count = len(waits)
    world.write(world.a, "step-2/more.bin", b"1")
    # set_room sleeps once; the second file waits for nothing.
    assert len(waits) == count


def test_a_save_that_may_not_fit_goes_on_after_its_wait(limited, caplog):
    world = limited
    committed_before(world, 3 * MIB)
    set_room(world, used=6 * MIB)
    under_way(world)
    begin(world)
    before = world.clock.seconds
    world.write(world.a, "step-2/w.bin", b"it is smaller than the last one")
    assert 59 < world.clock.seconds - before < 62
    assert "room-short" in caplog.text


@pytest.mark.parametrize(("is_low", "most_s"), [(True, 2), (False, 6)])
def test_nobody_waits_long_where_nothing_is_on_its_way(limited, caplog, is_low: bool, most_s: int):
    world = limited
    committed_before(world, 3 * MIB)
    set_room(world, used=6 * MIB)
    room = SpoolRoom(used=6 * MIB, limit=8 * MIB, is_low=is_low)
    world.spool.set_meta(ROOM_META, msgspec.json.encode(room).decode())
    begin(world)
    for row in world.spool.plain_ops():
        world.spool.drop_plain_op(row.id)
    before = world.clock.seconds
    world.write(world.a, "step-2/w.bin", b"1")
    assert 1 < world.clock.seconds - before < most_s
    assert "nothing is on its way" in caplog.text


def test_nobody_waits_for_a_store_that_is_away(limited, caplog):
    world = limited
    committed_before(world, 3 * MIB)
    set_room(world, used=6 * MIB)
    begin(world)
    away = Contact(away_ns=1, error="no route")
    world.spool.set_meta(CONTACT_META, msgspec.json.encode(away).decode())
    before = world.clock.seconds
    world.write(world.a, "step-2/w.bin", b"1")
    assert world.clock.seconds - before < 1
    assert "the store is away" in caplog.text


def test_a_run_s_first_checkpoint_and_what_is_in_none_wait_for_nothing(limited):
    world = limited
    set_room(world, used=8 * MIB - 1)
    before = world.clock.seconds
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w.bin", b"1")
    world.write(world.a, "log.txt", b"1")
    assert world.clock.seconds - before < 1
