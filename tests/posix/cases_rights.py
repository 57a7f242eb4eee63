"""What other users may do: every class of mode bits against every call."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from tests.posix.suite import NOBODY, Observation, as_user, case, err, opened, put

OTHER = 4242
LOOKING = frozenset({
    "stat", "read", "write", "read and write", "append", "open without atime", "open as path",
    "list", "access r", "access w", "access x", "chdir", "exec bit",
})  # fmt: skip
"""Calls that change nothing; they come first."""


def _calls() -> dict[str, Callable[[], object]]:
    """What a user does to `d/f`, the directory `d` and the empty directory `d/e`."""

    def opens(path: str, flags: int) -> Callable[[], object]:
        return lambda: os.close(os.open(path, flags, 0o644))

    return {
        "stat": lambda: os.stat("d/f"),
        "read": opens("d/f", os.O_RDONLY),
        "write": opens("d/f", os.O_WRONLY),
        "read and write": opens("d/f", os.O_RDWR),
        "append": opens("d/f", os.O_WRONLY | os.O_APPEND),
        "open without atime": opens("d/f", os.O_RDONLY | os.O_NOATIME),
        "open as path": opens("d/f", os.O_PATH),
        "list": lambda: os.listdir("d"),
        "access r": lambda: _access("d/f", os.R_OK),
        "access w": lambda: _access("d/f", os.W_OK),
        "access x": lambda: _access("d/f", os.X_OK),
        "chdir": lambda: os.chdir("d"),
        "exec bit": lambda: os.stat("d/f/."),
        "truncate": lambda: os.truncate("d/f", 3),
        "truncating open": opens("d/f", os.O_RDONLY | os.O_TRUNC),
        "chmod": lambda: os.chmod("d/f", os.stat("d/f").st_mode & 0o7777),
        "chown": lambda: os.chown("d/f", OTHER, -1),
        "utime now": lambda: os.utime("d/f"),
        "utime": lambda: os.utime("d/f", (1, 2)),
        "create": opens("d/new", os.O_CREAT | os.O_EXCL | os.O_RDWR),
        "create existing": opens("d/f", os.O_CREAT | os.O_RDWR),
        "mkdir": lambda: os.mkdir("d/newdir"),
        "symlink": lambda: os.symlink("x", "d/newlink"),
        "rename": lambda: os.rename("d/f", "d/f"),
        "rename over": lambda: os.rename("d/g", "d/f"),
        "rename out": lambda: os.rename("d/e", "e"),
        "unlink": lambda: os.unlink("d/f"),
        "rmdir": lambda: os.rmdir("d/e"),
    }


def _access(path: str, mode: int) -> None:
    if not os.access(path, mode):
        raise PermissionError(13, "no")


def _build(directory: int, file: int, uid: int, gid: int) -> None:
    for name in ("d/f", "d/g", "d/new", "d/newlink"):
        if os.path.lexists(name):
            os.unlink(name)
    for name in ("d/newdir", "d/e", "e", "d"):
        if os.path.isdir(name):
            os.rmdir(name)
    os.mkdir("d")
    put("d/f", b"12345")
    put("d/g", b"g")
    os.mkdir("d/e")
    for name in ("d/f", "d/g", "d/e", "d"):
        os.chown(name, uid, gid)
    os.chmod("d/f", file)
    os.chmod("d", directory)


def _tried(directory: int, file: int, uid: int, gid: int, *groups: int) -> Observation:
    os.chmod(".", 0o777)
    found: Observation = {}
    _build(directory, file, uid, gid)
    for label, call in _calls().items():
        if label not in LOOKING:
            _build(directory, file, uid, gid)
        found[label] = as_user(partial(err, call), NOBODY, NOBODY, *groups)
    return found


@case
def rights_of_an_owner() -> Observation:
    return _tried(0o700, 0o600, NOBODY, NOBODY)


@case
def rights_of_an_owner_without_rights() -> Observation:
    return _tried(0o777, 0o077, NOBODY, NOBODY)


@case
def rights_of_a_group() -> Observation:
    return _tried(0o770, 0o060, OTHER, NOBODY)


@case
def rights_of_a_supplementary_group() -> Observation:
    return _tried(0o770, 0o660, OTHER, OTHER, OTHER)


@case
def rights_of_others() -> Observation:
    return _tried(0o777, 0o666, OTHER, OTHER)


@case
def rights_of_others_to_read() -> Observation:
    return _tried(0o755, 0o644, OTHER, OTHER)


@case
def rights_of_others_to_search() -> Observation:
    return _tried(0o711, 0o644, OTHER, OTHER)


@case
def rights_of_others_to_list() -> Observation:
    return _tried(0o744, 0o644, OTHER, OTHER)


@case
def rights_of_nobody() -> Observation:
    return _tried(0o700, 0o600, OTHER, OTHER)


@case
def rights_in_a_sticky_directory() -> Observation:
    return _tried(0o1777, 0o666, OTHER, OTHER)


@case
def rights_in_an_own_sticky_directory() -> Observation:
    return _tried(0o1777, 0o666, NOBODY, OTHER)


@case
def owners_of_what_a_user_makes() -> Observation:
    os.chmod(".", 0o777)
    os.mkdir("g")
    os.chown("g", 0, OTHER)
    os.chmod("g", 0o2777)

    def make() -> list[list[int | str]]:
        put("f", b"1")
        os.mkdir("d")
        os.symlink("x", "s")
        put("g/f", b"1", 0o2775)
        os.mkdir("g/d")
        os.chmod("g/f", 0o2775)
        return [
            [name, os.lstat(name).st_uid, os.lstat(name).st_gid, oct(os.lstat(name).st_mode)]
            for name in ("f", "d", "s", "g/f", "g/d")
        ]

    return {"made": as_user(make)}


@case
def set_id_bits_at_creation() -> Observation:
    os.chmod(".", 0o777)
    os.mkdir("g")
    os.chown("g", 0, OTHER)
    os.chmod("g", 0o2777)

    def make() -> list[str]:
        os.umask(0)
        put("f", b"", 0o6775)
        put("g/f", b"", 0o2775)
        put("g/h", b"", 0o2664)
        os.mkdir("g/d", 0o2775)
        return [oct(os.stat(name).st_mode) for name in ("f", "g/f", "g/h", "g/d")]

    def make_one() -> str:
        put("g/m", b"", 0o2775)
        return oct(os.stat("g/m").st_mode)

    return {
        "modes": as_user(make),
        "of a member": as_user(make_one, NOBODY, NOBODY, OTHER),
    }


@case
def a_write_takes_set_id_bits() -> Observation:
    os.chmod(".", 0o777)
    found: Observation = {}
    for mode in (0o6777, 0o2767, 0o4777):

        def write() -> str:
            with opened("f", os.O_RDWR) as fd:
                os.write(fd, b"1")
            return oct(os.stat("f").st_mode)

        put("f", b"12345")
        os.chmod("f", mode)
        found[f"write {mode:o} by a user"] = as_user(write)
        os.chmod("f", mode)
        found[f"write {mode:o} by root"] = write()
        for label, flags in {
            "open": os.O_WRONLY,
            "truncating open": os.O_WRONLY | os.O_TRUNC,
        }.items():
            os.chmod("f", mode)

            def reopen(flags=flags) -> str:
                os.close(os.open("f", flags))
                return oct(os.stat("f").st_mode)

            found[f"{label} {mode:o} by a user"] = as_user(reopen)

        def truncate() -> str:
            os.truncate("f", 2)
            return oct(os.stat("f").st_mode)

        os.chmod("f", mode)
        found[f"truncate {mode:o} by a user"] = as_user(truncate)
    return found


@case
def a_user_gives_files_away() -> Observation:
    os.chmod(".", 0o777)
    put("f", b"", 0o6755)
    os.chown("f", NOBODY, NOBODY)
    os.chmod("f", 0o6755)

    def give() -> list[str]:
        found = [err(os.chown, "f", OTHER, -1), err(os.chown, "f", -1, OTHER)]
        found.append(err(os.chown, "f", NOBODY, NOBODY))
        found.append(oct(os.stat("f").st_mode))
        found.append(err(os.chown, "f", -1, 777))
        found.append(err(os.chmod, "f", 0o2755))
        found.append(oct(os.stat("f").st_mode))
        return found

    return {"by its owner": as_user(give, NOBODY, NOBODY, 777)}


@case
def a_descriptor_outlives_the_rights() -> Observation:
    os.chmod(".", 0o777)
    put("f", b"12345")
    os.chmod("f", 0o666)

    def work() -> list[str]:
        with opened("f", os.O_RDWR) as fd:
            os.close(os.open("f", os.O_RDONLY))
            found = [err(os.fchmod, fd, 0o600), err(os.write, fd, b"1")]
            found.append(err(os.ftruncate, fd, 2))
            return found

    found = {"with rights": as_user(work)}
    fd = os.open("f", os.O_RDWR)
    os.chmod("f", 0)

    def without() -> list[str]:
        return [
            err(os.write, fd, b"1"),
            err(os.pread, fd, 1, 0),
            err(os.ftruncate, fd, 2),
            err(os.fsync, fd),
            err(os.open, "f", os.O_RDONLY),
        ]

    found["by an inherited descriptor"] = as_user(without)
    os.close(fd)
    return found


@case
def rights_change_at_once() -> Observation:
    os.chmod(".", 0o777)
    put("f", b"1")
    found = []
    for mode in (0o600, 0o604, 0o600, 0o606, 0o000):
        os.chmod("f", mode)
        found.append(as_user(lambda: err(lambda: os.close(os.open("f", os.O_RDONLY)))))
    os.mkdir("d", 0o755)
    put("d/f", b"1")
    for mode in (0o700, 0o701, 0o700):
        os.chmod("d", mode)
        found.append(as_user(lambda: err(os.stat, "d/f")))
    return {"seen": found}


@case
def attributes_of_foreign_files() -> Observation:
    os.chmod(".", 0o777)
    put("f", b"1", 0o644)

    def work() -> list[str]:
        return [
            err(os.setxattr, "f", "user.a", b"1"),
            err(os.removexattr, "f", "user.a"),
            err(os.setxattr, "f", "trusted.a", b"1"),
        ]

    return {"by a user": as_user(work)}
