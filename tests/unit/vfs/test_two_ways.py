"""A revision's directories, which its job reaches by two ways: its root's and the committed one's.

The kernel has one place for each directory that it knows. With one number found in two places it
moves the directory to and fro, and fails with ESTALE while either place is busy.
"""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
from tests.unit.vfs.conftest import ROOT, World
from tests.unit.vfs.test_meanwhile import before_the_change

from ckptgate.errors import CkptError, ExistsError, MissingError
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Caller

TREE = {"a": b"1", "d/b": b"2", "d/e/f/g": b"3", "h": b"4"}


def number_of(world: World, caller: Caller, parent: int, name: str) -> int:
    """By which number the kernel knows what it finds there."""
    entry = world.vfs.lookup(caller, parent, name)
    return entry.number or entry.attr.ino


def walk(world: World, caller: Caller, start: int, path: str) -> int:
    for part in path.split("/"):
        start = number_of(world, caller, start, part)
    return start


def listed(world: World, caller: Caller, number: int) -> dict[str, NodeKind]:
    fh = world.vfs.opendir(caller, number)
    entries = list(world.vfs.readdir(caller, fh, 0))
    world.vfs.releasedir(fh)
    # A look-up counts for the directory that the kernel asks, so it is to ask each time.
    assert all(entry.entry is None for entry in entries)
    return {entry.name: entry.kind for entry in entries if entry.name not in {".", ".."}}


@pytest.fixture
def ways(world: World) -> list[int]:
    """Numbers of the same directory, `d`: of the committed one, below its root, by the path."""
    world.commit("", "step-1", TREE)
    root = number_of(world, world.a, ROOT, "step-1")
    committed = number_of(world, world.a, root, "d")
    world.mkdir(world.a, "step-1/new")
    world.mkdir(world.a, "step-1/new/inner")
    path = walk(world, world.a, ROOT, "step-1/d")
    return [committed, number_of(world, world.a, root, "d"), path]


def places(world: World, caller: Caller, number: int, found: dict[int, set[int]]) -> None:
    """Number of each directory below -> numbers of those in which it is found."""
    for name, kind in listed(world, caller, number).items():
        if kind is NodeKind.DIR:
            child = number_of(world, caller, number, name)
            found.setdefault(child, set()).add(number)
            places(world, caller, child, found)


def test_the_kernel_finds_each_directory_in_one_place(world, ways):
    """Whichever directory a process of the job had open when the revision began."""
    found: dict[int, set[int]] = {}
    base = world.spool.attempt(world.attempt("step-1").base)
    for start in (ROOT, base.root, *ways, walk(world, world.a, ways[0], "e")):
        places(world, world.a, start, found)
    assert len(set(ways)) == 3
    assert [number for number, parents in found.items() if len(parents) > 1] == []
    # new, new/inner, d, d/e, d/e/f by two ways at least, and step-1.
    assert len(found) >= 11


@pytest.mark.parametrize("way", range(3))
def test_all_ways_lead_to_the_same_names(world, ways, way):
    number = ways[way]
    assert listed(world, world.a, number) == {"b": NodeKind.FILE, "e": NodeKind.DIR}
    inner = walk(world, world.a, number, "e/f")
    world.vfs.mkdir(world.a, inner, "made", 0o755)
    for other in ways:
        assert sorted(listed(world, world.a, walk(world, world.a, other, "e/f"))) == ["g", "made"]
    opened = world.vfs.create(world.a, inner, "file", os.O_WRONLY | os.O_CREAT, 0o644)[1]
    world.close(world.a, opened)
    world.vfs.rename(world.a, inner, "file", walk(world, world.a, number, "e"), "moved", 0)
    assert world.exists(world.a, "step-1/d/e/moved")
    assert world.vfs.getattr(world.a, inner, None) == world.walk(world.a, "step-1/d/e/f").attr
    # Others see nothing of it.
    assert world.names(world.b, "step-1/d/e/f") == ["g"]


def test_names_and_times_that_are_changed_by_another_way_are_asked_for_each_time(world, ways):
    for number in ways:
        for name in ("b", "e"):
            assert world.vfs.lookup(world.a, number, name).timeout_s == 0.0
        assert world.vfs.mkdir(world.a, number, f"made{number}", 0o755).timeout_s == 0.0
    for number in ways[1:]:
        assert world.vfs.getattr(world.a, number, None).timeout_s == 0.0
    world.commit_own("", "step-1", k=1)
    assert world.walk(world.a, "step-1/d/b").timeout_s > 0


def test_a_number_is_kept_as_long_as_the_kernel_knows_it(world, ways):
    """Look-ups by all ways are those of one node."""
    node = world.walk(world.a, "step-1/d/e").attr.ino
    numbers = [number_of(world, world.a, number, "e") for number in ways]
    assert {world.vfs.getattr(world.a, number, None).ino for number in numbers} == {node}
    world.vfs.unlink(world.a, walk(world, world.a, numbers[0], "f"), "g")
    world.again(lambda: world.vfs.rmdir(world.a, numbers[1], "f"))
    world.again(lambda: world.vfs.rmdir(world.a, ways[2], "e"))
    counts = world.vfs._ctx.memory.lookups
    while counts.get(node):
        assert world.spool.node(node) is not None
        world.vfs.forget([(numbers[counts[node] % 3], 1)])
    assert world.spool.node(node) is None


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("other", range(3))
def test_a_directory_that_was_removed_by_one_way_is_removed_by_all(world, ways, way, other):
    """The kernel marks it dead only where it was removed."""
    world.unlink(world.a, "step-1/d/b")
    world.unlink(world.a, "step-1/d/e/f/g")
    parent = walk(world, world.a, ways[way], "e")
    kept = walk(world, world.a, ways[other], "e/f")
    world.again(lambda: world.vfs.rmdir(world.a, parent, "f"))
    assert not world.exists(world.a, "step-1/d/e/f")
    for change in (
        lambda: world.vfs.mkdir(world.a, kept, "x", 0o755),
        lambda: world.vfs.symlink(world.a, kept, "x", "y"),
        lambda: world.vfs.create(world.a, kept, "x", os.O_CREAT | os.O_WRONLY, 0o644),
        lambda: world.vfs.rename(world.a, ROOT, "step-1", kept, "x", 0),
        lambda: world.vfs.lookup(world.a, kept, "g"),
        lambda: world.vfs.unlink(world.a, kept, "g"),
        lambda: world.vfs.rmdir(world.a, kept, "g"),
    ):
        with pytest.raises(OSError, match=r".") as caught:
            change()
        assert caught.value.errno in {errno.ENOENT, errno.EPERM}
    with contextlib.suppress(MissingError):
        assert listed(world, world.a, kept) == {}


def two(world: World, ways: list[int], first, second) -> list[int]:
    """Do *first* by one way while *second* is done by another; their errnos, 0 for success."""
    results = [0, 0]

    def attempt(number: int, call, way: int) -> None:
        try:
            world.again(lambda: call(way))
        except OSError as exc:
            results[number] = exc.errno or -1

    before_the_change(world, lambda: attempt(1, second, ways[2]))
    attempt(0, first, ways[1])
    return results


def test_what_two_do_by_two_ways_is_done_once(world, ways):
    """The kernel keeps two from one directory only where they come by the same way."""
    vfs, a, a2 = world.vfs, world.a, world.a2
    assert two(
        world, ways, lambda way: vfs.unlink(a, way, "b"), lambda way: vfs.unlink(a2, way, "b")
    ) == [errno.ENOENT, 0]
    assert two(
        world,
        ways,
        lambda way: vfs.mkdir(a, way, "x", 0o755),
        lambda way: vfs.mkdir(a2, way, "x", 0o755),
    ) == [errno.EEXIST, 0]
    assert two(
        world, ways, lambda way: vfs.rmdir(a, way, "x"), lambda way: vfs.rmdir(a2, way, "x")
    ) == [errno.ENOENT, 0]
    vfs.mkdir(a, ways[2], "x", 0o755)
    inner = [walk(world, a, way, "x") for way in ways]
    assert two(
        world,
        ways,
        lambda way: vfs.rmdir(a, way, "x"),
        lambda _: vfs.mkdir(a2, inner[2], "y", 0o755),
    ) == [errno.ENOTEMPTY, 0]
    vfs.rmdir(a, inner[1], "y")
    assert two(
        world,
        ways,
        lambda _: vfs.mkdir(a, inner[1], "y", 0o755),
        lambda way: vfs.rmdir(a2, way, "x"),
    ) == [errno.ENOENT, 0]
    assert two(
        world,
        ways,
        lambda way: vfs.rename(a, way, "e", way, "z", 0),
        lambda way: vfs.rename(a2, way, "e", way, "y", 0),
    ) == [errno.ENOENT, 0]


@pytest.mark.parametrize("flags", [0, os.O_EXCL], ids=["shared", "exclusive"])
def test_a_file_that_two_make_by_two_ways_is_one(world, ways, flags):
    made = []

    def create(caller: Caller, way: int) -> None:
        # As the kernel: it looks the name up, and opens what is there.
        with contextlib.suppress(MissingError):
            ino = world.vfs.lookup(caller, way, "new").attr.ino
            if flags:
                raise ExistsError("new")
            made.append(world.vfs.open(caller, ino, os.O_WRONLY))
            return
        entry = world.vfs.create(caller, way, "new", os.O_CREAT | os.O_WRONLY | flags, 0o644)
        made.append(entry[1])

    results = two(world, ways, lambda way: create(world.a, way), lambda way: create(world.a2, way))
    assert results == [errno.EEXIST if flags else 0, 0]
    for opened in made:
        os.pwrite(opened.fd, b"x", 0)
        world.close(world.a, opened)
    assert world.read(world.a, "step-1/d/new") == b"x"


def test_a_checkpoint_that_gets_a_file_while_it_is_removed_stays(world):
    world.commit("", "step-1", {"a": b"1"})
    root = number_of(world, world.a, ROOT, "step-1")
    world.unlink(world.a, "step-1/a")
    with contextlib.suppress(CkptError):
        world.vfs.rmdir(world.a, ROOT, "step-1")
    before_the_change(world, lambda: world.vfs.mkdir(world.a2, root, "late", 0o755))
    with pytest.raises(CkptError) as caught:
        world.vfs.rmdir(world.a, ROOT, "step-1")
    assert caught.value.errno == errno.ENOTEMPTY
    assert world.names(world.a, "step-1") == ["late"]


def test_a_removed_checkpoint_is_empty_for_those_of_the_job_who_have_it_open(world):
    """As a removed directory of a local disk; others keep all that is in it."""
    world.commit("", "step-1", {"a": b"1", "d/b": b"2"})
    root = number_of(world, world.a, ROOT, "step-1")
    inner = number_of(world, world.a, root, "d")
    for path in ("step-1/a", "step-1/d/b"):
        world.unlink(world.a, path)
    for path in ("step-1/d", "step-1"):
        world.rmdir(world.a, path)
    for number in (root, inner):
        for call in (
            lambda ino=number: world.vfs.lookup(world.a2, ino, "b"),
            lambda ino=number: list(
                world.vfs.readdir(world.a2, world.vfs.opendir(world.a2, ino), 0)
            ),
            lambda ino=number: world.vfs.mkdir(world.a2, ino, "x", 0o755),
        ):
            with pytest.raises(MissingError):
                call()
    assert world.names(world.b, "step-1") == ["a", "d"]
    assert world.vfs.lookup(world.b, inner, "b").attr.size == 1


def test_who_has_a_directory_open_that_was_made_again_is_told_estale_once(world):
    """The kernel repeats a call once after ESTALE; who is there again has the removed one open."""
    world.commit("", "step-1", {"d/b": b"2"})
    root = number_of(world, world.a, ROOT, "step-1")
    inner = number_of(world, world.a, root, "d")
    world.unlink(world.a, "step-1/d/b")
    world.rmdir(world.a, "step-1/d")
    world.mkdir(world.a, "step-1/d")
    # Nothing knows the old copy any more.
    for row in world.spool.nameless_nodes():
        count = world.vfs._ctx.memory.lookups.get(row.ino, 0)
        world.vfs.forget([(row.ino, count)])
    for _ in range(2):
        for number in (errno.ESTALE, errno.ENOENT):
            with pytest.raises(CkptError) as caught:
                world.vfs.mkdir(world.a, inner, "x", 0o755)
            assert caught.value.errno == number


def test_who_has_a_replaced_checkpoint_open_is_told_estale_once(world):
    """The name was saved again: by its path it is another directory."""
    world.commit("", "step-1", {"a": b"1"})
    root = number_of(world, world.a, ROOT, "step-1")
    world.write(world.a, "step-1/a", b"2")
    world.commit_own("", "step-1", k=1)
    for expected in (errno.ESTALE, errno.ENOENT, errno.ESTALE):
        with pytest.raises(CkptError) as caught:
            world.vfs.unlink(world.a, root, "a")
        assert caught.value.errno == expected
    with pytest.raises(CkptError) as caught:
        world.vfs.unlink(world.a2, root, "a")
    assert caught.value.errno == errno.ESTALE
    world.clock.seconds += 10
    with pytest.raises(CkptError) as caught:
        world.vfs.unlink(world.a, root, "a")
    assert caught.value.errno == errno.ESTALE
    world.unlink(world.a, "step-1/a")
