"""Times of directories, and users' own extended attributes."""

from __future__ import annotations

import errno
import os

import pytest

from ckptgate.errors import CkptError, InvalidNameError, MissingError
from ckptgate.ports.spool import PlainOpKind, PlainOpRow
from ckptgate.ports.store import PlainKind
from ckptgate.vfs.interface import Caller, SetAttr

PLACES = pytest.mark.parametrize("place", ["run/plain", "run/step-1"])


def _times(world, path: str) -> tuple[int, int]:
    attr = world.walk(world.a, path).attr
    return attr.mtime_ns, attr.ctime_ns


def _prepared(world, place: str) -> None:
    world.mkdir(world.a, "run")
    world.mkdir(world.a, place)
    world.write(world.a, f"{place}/f", b"1")
    world.mkdir(world.a, f"{place}/d")


@PLACES
def test_making_and_removing_names_moves_the_times_of_a_directory(world, place):
    _prepared(world, place)
    calls = [
        lambda: world.write(world.a, f"{place}/g", b"1"),
        lambda: world.mkdir(world.a, f"{place}/e"),
        lambda: world.symlink(world.a, "f", f"{place}/s"),
        lambda: world.rename(world.a, f"{place}/g", f"{place}/h"),
        lambda: world.rename(world.a, f"{place}/h", f"{place}/f", 2),
        lambda: world.unlink(world.a, f"{place}/h"),
        lambda: world.rmdir(world.a, f"{place}/e"),
    ]
    for number, call in enumerate(calls):
        before = _times(world, place)
        world.clock.sleep(1)
        call()
        after = _times(world, place)
        assert after[0] > before[0], number
        assert after[1] > before[1], number


@PLACES
def test_times_of_a_directory_that_were_set_stay_until_a_name_changes(world, place):
    _prepared(world, place)
    ino = world.walk(world.a, f"{place}/d").attr.ino
    for value in (5, 2**62):
        world.vfs.setattr(world.a, ino, SetAttr(mtime_ns=value), None)
        assert _times(world, f"{place}/d")[0] == value
        world.write(world.a, f"{place}/d/x{value}", b"1")
        assert 5 < _times(world, f"{place}/d")[0] < 2**62


@PLACES
def test_attributes_of_users_are_kept_with_the_node(world, place):
    _prepared(world, place)
    for name in ("f", "d"):
        ino = world.walk(world.a, f"{place}/{name}").attr.ino
        world.vfs.setxattr(world.a, ino, "user.a", b"1", 0)
        world.rename(world.a, f"{place}/{name}", f"{place}/{name}2")
        assert world.vfs.getxattr(world.a, ino, "user.a") == b"1"
        assert list(world.vfs.listxattr(world.a, ino)) == ["user.a"]
        world.vfs.removexattr(world.a, ino, "user.a")
        assert list(world.vfs.listxattr(world.a, ino)) == []


def test_attributes_are_limited_and_those_of_others_refused(world):
    _prepared(world, "run/plain")
    ino = world.walk(world.a, "run/plain/f").attr.ino
    for name, value, flags, number in (
        ("user.big", b"x" * 70_000, 0, errno.ENOSPC),
        ("user.", b"1", 0, errno.EINVAL),
        ("user.none", b"1", os.XATTR_REPLACE, errno.ENODATA),
        ("user.flags", b"1", 64, errno.EINVAL),
        ("user.ckptgate.other", b"1", 0, errno.ENOTSUP),
        ("trusted.a", b"1", 0, errno.ENOTSUP),
    ):
        with pytest.raises(CkptError) as caught:
            world.vfs.setxattr(world.a, ino, name, value, flags)
        assert caught.value.errno == number, name
    world.vfs.setxattr(world.a, ino, "user.a", b"1", 0)
    with pytest.raises(CkptError) as caught:
        world.vfs.setxattr(world.a, ino, "user.a", b"1", os.XATTR_CREATE)
    assert caught.value.errno == errno.EEXIST


def test_a_removed_node_takes_its_attributes_along(world):
    _prepared(world, "run/plain")
    ino = world.walk(world.a, "run/plain/f").attr.ino
    world.vfs.setxattr(world.a, ino, "user.a", b"1", 0)
    world.unlink(world.a, "run/plain/f")
    world.vfs.forget([(ino, 1000)])
    assert world.spool.xattrs(ino) == {}


def test_a_revision_has_the_attributes_and_a_committed_checkpoint_keeps_them(world):
    _prepared(world, "run/step-1")
    ino = world.walk(world.a, "run/step-1/f").attr.ino
    world.vfs.setxattr(world.a, ino, "user.a", b"1", 0)
    world.commit_own("run", "step-1")
    with pytest.raises(CkptError) as caught:
        world.vfs.setxattr(world.a, ino, "user.a", b"2", 0)
    assert caught.value.errno == errno.EPERM
    assert world.vfs.getxattr(world.a, ino, "user.a") == b"1"
    world.write(world.a, "run/step-1/new", b"1")
    copy = world.walk(world.a, "run/step-1/f").attr.ino
    assert copy != ino
    assert world.vfs.getxattr(world.a, copy, "user.a") == b"1"


def test_the_link_count_of_a_removed_directory_is_zero(world):
    _prepared(world, "run/plain")
    entry = world.walk(world.a, "run/plain/d")
    assert entry.attr.nlink == 2
    world.rmdir(world.a, "run/plain/d")
    assert world.vfs.getattr(world.a, entry.attr.ino, None).nlink == 0


def test_dot_dot_of_a_checkpoint_is_its_run(world):
    _prepared(world, "run/step-1")
    run = world.walk(world.a, "run").attr.ino
    fh = world.vfs.opendir(world.a, world.walk(world.a, "run/step-1").attr.ino)
    assert {item.name: item.ino for item in world.vfs.readdir(world.a, fh, 0)}[".."] == run


def test_a_name_that_goes_while_the_store_is_listed_is_not_listed(world):
    world.mkdir(world.a, "plain")
    for row in world.spool.plain_ops():
        world.spool.drop_plain_op(row.id)
    world.catalog.add_plain("plain/gone", b"1")
    row = world.spool.add_plain_op(PlainOpRow(id=0, op=PlainOpKind.REMOVE, path="plain/gone"))
    listed = world.catalog.plain_list

    def while_it_is_done(path: str):
        found = listed(path)
        world.spool.drop_plain_op(row.id)
        return found

    world.catalog.plain_list = while_it_is_done
    assert world.names(world.a, "plain") == []


def test_a_users_symlink_keeps_its_owner_when_the_store_has_it(world):
    world.mkdir(world.a, "plain")
    user = Caller(1000, 1000, 100, may_block=True)
    parent = world.walk(world.a, "plain").attr.ino
    world.vfs.symlink(user, parent, "s", "target")
    for row in world.spool.plain_ops():
        world.spool.drop_plain_op(row.id)
    world.catalog.add_plain("plain", kind=PlainKind.DIR)
    world.catalog.add_plain("plain/s", b"", kind=PlainKind.SYMLINK, target="target")
    world.clock.sleep(10)
    assert world.walk(world.a, "plain/s").attr.uid == 1000


def test_looking_for_a_name_that_cannot_be_is_a_plain_absence(world):
    world.mkdir(world.a, "plain")
    for row in world.spool.plain_ops():
        world.spool.drop_plain_op(row.id)
    world.catalog.add_plain("plain", kind=PlainKind.DIR)
    with pytest.raises(MissingError):
        world.walk(world.a, "plain/a\nb")
    with pytest.raises(InvalidNameError) as caught:
        world.walk(world.a, "plain/" + "n" * 256)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_who_changed_a_committed_files_attributes_sees_that_by_the_old_number_too(world):
    """I8: the kernel may know the name by that for a moment; nobody else sees the change."""
    world.commit("", "step-1", {"a": b"old"})
    ino = world.walk(world.a, "step-1/a").attr.ino
    before = world.vfs.getattr(world.b, ino, None)
    world.vfs.setattr(world.a, ino, SetAttr(mtime_ns=5, mode=0o400), None)
    seen = world.vfs.getattr(world.a, ino, None)
    assert (seen.ino, seen.mtime_ns, seen.mode, seen.size) == (ino, 5, 0o400, 3)
    assert seen.timeout_s == 0
    assert world.vfs.getattr(world.b, ino, None) == before
    world.write(world.a, "step-1/a", b"newer")
    assert world.vfs.getattr(world.a, ino, None).size == 3
