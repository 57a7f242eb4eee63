"""Listings: positions, and what the kernel is told of the names in them."""

from __future__ import annotations

import pytest

from ckptgate.ports.store import PlainKind


def test_a_listing_stays_what_it_was_while_it_is_read(world):
    world.mkdir(world.a, "step-1")
    for name in "abcdef":
        world.write(world.a, f"step-1/{name}", b"")
    fh = world.vfs.opendir(world.a, world.walk(world.a, "step-1").attr.ino)
    first = list(world.vfs.readdir(world.a, fh, 0))[:4]
    world.unlink(world.a, "step-1/c")
    world.write(world.a, "step-1/g", b"")
    rest = world.vfs.readdir(world.a, fh, first[-1].cookie)
    assert sorted(entry.name for entry in (*first, *rest)) == [".", "..", *"abcdef"]


def test_positions_in_a_listing_mean_the_same_to_a_successor(world):
    """I10: the mount was killed between two reads of a directory that others change."""
    world.mkdir(world.a, "step-1")
    for number in range(60):
        world.write(world.a, f"step-1/stays-{number}", b"")
        world.write(world.a, f"step-1/goes-{number}", b"")
    fh = world.vfs.opendir(world.a, world.walk(world.a, "step-1").attr.ino)
    first = list(world.vfs.readdir(world.a, fh, 0))[:50]
    for number in range(60):
        world.unlink(world.a, f"step-1/goes-{number}")
        world.write(world.a, f"step-1/comes-{number}", b"")
    world.vfs.releasedir(fh)
    rest = world.vfs.readdir(world.a, fh, first[-1].cookie)
    found = [entry.name for entry in (*first, *rest) if entry.name.startswith("stays")]
    assert sorted(found) == sorted(f"stays-{number}" for number in range(60))


def test_a_listing_gives_the_kernel_no_entry_that_is_not_so_any_more(world):
    """The names are those of its start; a node that lost its name must not get it back."""
    world.mkdir(world.a, "step-1")
    for name in "abcd":
        world.write(world.a, f"step-1/{name}", b"")
    fh = world.vfs.opendir(world.a, world.walk(world.a, "step-1").attr.ino)
    next(iter(world.vfs.readdir(world.a, fh, 0)))
    world.unlink(world.a, "step-1/a")
    world.write(world.a, "step-1/a", b"new")
    world.unlink(world.a, "step-1/b")
    world.rename(world.a, "step-1/d", "step-1/c")
    entries = {item.name: item.entry for item in world.vfs.readdir(world.a, fh, 2)}
    assert entries == dict.fromkeys("abcd")
    again = {item.name: item.entry for item in world.vfs.readdir(world.a, fh, 0)}
    assert {name for name, entry in again.items() if entry} == {"a", "c"}


@pytest.mark.parametrize("folder", ["", "logs"])
def test_a_name_that_cannot_be_shown_hides_no_other(world, folder):
    """Somebody put it into the store's own directory; a look-up says the same."""
    prefix = ""
    if folder:
        world.catalog.add_plain(folder, kind=PlainKind.DIR)
        prefix = f"{folder}/"
    world.catalog.add_plain(f"{prefix}good", b"1")
    world.catalog.add_plain(f"{prefix}\udcff", b"2")
    world.catalog.add_plain(f"{prefix}two\nlines", b"3")
    world.catalog.add_plain(f"{prefix}link", kind=PlainKind.SYMLINK, target="\udcff")
    assert world.names(world.a, folder) == ["good"]
    assert world.read(world.a, f"{prefix}good") == b"1"
    for name in ("two\nlines", "link"):
        assert not world.exists(world.a, f"{prefix}{name}")


def test_a_listing_shows_no_link_that_has_a_checkpoints_name(world):
    """As a look-up: a save through it would go wherever it leads."""
    world.catalog.add_plain("step-1", kind=PlainKind.SYMLINK, target="/etc")
    world.catalog.add_plain("best", kind=PlainKind.SYMLINK, target="step-7")
    assert not world.exists(world.a, "step-1")
    assert world.names(world.a) == ["best"]
    assert not world.exists(world.a, "step-1")
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    assert world.names(world.a) == ["best", "step-1"]
    assert world.names(world.b) == ["best"]
