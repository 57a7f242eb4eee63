"""Listings: positions, kinds and inode numbers, changes while one is open."""

from __future__ import annotations

import os

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, put


@case
def entries_of_a_directory() -> Observation:
    put("f")
    os.mkdir("d")
    os.symlink("f", "s")
    fd = os.open(".", os.O_RDONLY)
    found = {name: (ino, kind) for ino, kind, name in kernel.dirents(fd)}
    os.close(fd)
    up = os.stat("..").st_ino
    return {
        "kinds": {name: kind for name, (_, kind) in sorted(found.items())},
        "inodes": all(found[name][0] == os.lstat(name).st_ino for name in ("f", "d", "s", ".")),
        "dot dot": found[".."][0] == up,
    }


@case
def entries_of_an_empty_directory() -> Observation:
    fd = os.open(".", os.O_RDONLY)
    names = [name for _, _, name in kernel.dirents(fd)]
    again = [name for _, _, name in kernel.dirents(fd)]
    os.lseek(fd, 0, os.SEEK_SET)
    rewound = [name for _, _, name in kernel.dirents(fd)]
    os.close(fd)
    return {"first": sorted(names), "at the end": again, "rewound": sorted(rewound)}


@case
def a_rewound_listing_is_new() -> Observation:
    put("a")
    fd = os.open(".", os.O_RDONLY)
    kernel.dirents(fd)
    put("b")
    os.unlink("a")
    os.lseek(fd, 0, os.SEEK_SET)
    names = sorted(name for _, _, name in kernel.dirents(fd))
    os.close(fd)
    return {"names": names}


@case
def positions_in_a_listing() -> Observation:
    for number in range(50):
        put(f"f{number}")
    positions = kernel.telldir_positions()
    names = [name for _, name in positions]
    at = {name: position for position, name in positions}
    middle = names[25]
    return {
        "count": len(set(names)),
        "distinct": len(set(at.values())),
        "rest": kernel.names_after(at[middle]) == names[26:],
        "end": kernel.names_after(at[names[-1]]),
        "from the start": len(kernel.names_after(0)),
    }


@case
def names_are_removed_while_they_are_listed() -> Observation:
    for number in range(400):
        put(f"f{number}")
    seen = []
    with os.scandir(".") as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(entry.name)
    return {"seen": len(seen), "distinct": len(set(seen)), "left": len(os.listdir("."))}


@case
def names_that_stay_are_listed_once() -> Observation:
    for number in range(300):
        put(f"stay{number}")
    seen: list[str] = []
    with os.scandir(".") as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 10 == 0:
                put(f"new{number}")
            if number % 10 == 5:
                os.rename(f"new{number - 5}", f"moved{number}")
    stayed = [name for name in seen if name.startswith("stay")]
    return {"once each": sorted(stayed) == sorted(f"stay{number}" for number in range(300))}


@case
def a_removed_directory_lists_nothing() -> Observation:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    os.rmdir("d")
    found = {"list": err(kernel.dirents, fd), "names": []}
    os.close(fd)
    return found


@case
def listings_need_the_right_to_read() -> Observation:
    from tests.posix.suite import as_user

    os.mkdir("d", 0o711)
    put("d/f", b"1")
    return {
        "list": as_user(lambda: err(os.listdir, "d")),
        "known name": as_user(lambda: err(os.stat, "d/f")),
    }


@case
def walks() -> Observation:
    for outer in range(5):
        for inner in range(5):
            os.makedirs(f"t/{outer}/{inner}")
            put(f"t/{outer}/{inner}/f", b"x" * inner)
    os.symlink("..", "t/loop")
    found = sorted((path, sorted(names), sorted(files)) for path, names, files in os.walk("t"))
    return {"walk": found}
