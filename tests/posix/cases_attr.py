"""stat(2) and what changes it: modes, owners, times, links, sizes; statfs, extended attributes."""

from __future__ import annotations

import os
import stat
import time

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, later, opened, put


def _changed(path: str, call, *more: str) -> list[str]:
    """Which times of which paths a call moves."""
    paths = (path, *more)
    before = [os.lstat(name) for name in paths]
    later()
    call()
    after = [os.lstat(name) for name in paths]
    return sorted(
        f"{name} {field[3:8]}"
        for name, old, new in zip(paths, before, after, strict=True)
        for field in ("st_mtime_ns", "st_ctime_ns")
        if getattr(new, field) > getattr(old, field)
    )


@case
def stat_of_new_things() -> Observation:
    put("f", b"12345")
    os.mkdir("d")
    os.symlink("f", "s")
    found: Observation = {}
    for name in ("f", "d", "s"):
        seen = os.lstat(name)
        found[name] = [oct(seen.st_mode), seen.st_nlink, seen.st_uid, seen.st_gid]
        found[f"{name} inode"] = seen.st_ino > 1
        found[f"{name} same device"] = seen.st_dev == os.stat(".").st_dev
        found[f"{name} now"] = abs(seen.st_mtime - time.time()) < 5
        found[f"{name} block size"] = seen.st_blksize
    found["sizes"] = [os.stat("f").st_size, os.lstat("s").st_size]
    found["size of the directory"] = os.stat("d").st_size
    found["fstat is stat"] = _same_by_descriptor("f")
    return found


def _in_turn(call, *arguments) -> None:
    for these in arguments:
        call(*these)
        later()


def _same_by_descriptor(name: str) -> bool:
    with opened(name, os.O_RDONLY) as fd:
        a, b = os.fstat(fd), os.stat(name)
        return (a.st_ino, a.st_size, a.st_mode, a.st_mtime_ns) == (
            b.st_ino, b.st_size, b.st_mode, b.st_mtime_ns,
        )  # fmt: skip


@case
def inode_numbers() -> Observation:
    for name in ("a", "b", "c"):
        put(name)
    numbers = {os.stat(name).st_ino for name in ("a", "b", "c")}
    os.rename("a", "z")
    return {
        "distinct": len(numbers),
        "kept by a rename": os.stat("z").st_ino in numbers,
        "as in readdir": {entry.inode() for entry in os.scandir(".")} == numbers,
    }


@case
def links_of_directories() -> Observation:
    os.mkdir("d")
    found = [os.stat("d").st_nlink]
    os.mkdir("d/a")
    os.mkdir("d/b")
    put("d/f")
    os.symlink("x", "d/s")
    found.append(os.stat("d").st_nlink)
    os.rmdir("d/a")
    found.append(os.stat("d").st_nlink)
    os.rename("d/b", "b")
    found.append(os.stat("d").st_nlink)
    return {"nlink": found}


@case
def modes() -> Observation:
    put("f")
    os.mkdir("d")
    found: Observation = {}
    for mode in (0, 0o777, 0o4755, 0o2755, 0o1777, 0o7777, 0o644):
        for name in ("f", "d"):
            found[f"{name} {mode:o}"] = [err(os.chmod, name, mode), oct(os.stat(name).st_mode)]
    with opened("f", os.O_RDONLY) as fd:
        found["fchmod of a reader"] = [err(os.fchmod, fd, 0o611), oct(os.stat("f").st_mode)]
    return found


@case
def modes_at_creation() -> Observation:
    found: Observation = {}
    for mask in (0, 0o022, 0o077, 0o777):
        os.umask(mask)
        os.close(os.open(f"f{mask:o}", os.O_CREAT | os.O_RDWR, 0o6777))
        os.mkdir(f"d{mask:o}", 0o7777)
        found[f"{mask:o}"] = [oct(os.stat(f"{kind}{mask:o}").st_mode) for kind in "fd"]
    os.umask(0o022)
    with opened("readonly", os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o444) as fd:
        found["write to a file made read-only"] = err(os.write, fd, b"1")
    with opened("none", os.O_CREAT | os.O_RDWR | os.O_EXCL, 0) as fd:
        found["write to a file made without rights"] = err(os.write, fd, b"1")
    return found


@case
def owners() -> Observation:
    put("f", b"", 0o644)
    os.mkdir("d")
    found: Observation = {}
    for uid, gid in ((12, 34), (-1, 56), (78, -1), (-1, -1)):
        for name in ("f", "d"):
            result = err(os.chown, name, uid, gid)
            found[f"{name} {uid} {gid}"] = [result, os.stat(name).st_uid, os.stat(name).st_gid]
    os.chmod("f", 0o6755)
    os.chmod("d", 0o6755)
    os.chown("f", 1, 1)
    os.chown("d", 1, 1)
    found["set-id of a file"] = oct(os.stat("f").st_mode)
    found["set-id of a directory"] = oct(os.stat("d").st_mode)
    os.chmod("f", 0o2644)
    os.chown("f", 2, 2)
    found["a lock bit stays"] = oct(os.stat("f").st_mode)
    return found


@case
def times_that_are_set() -> Observation:
    put("f")
    os.mkdir("d")
    found: Observation = {}
    for name in ("f", "d"):
        for label, value in {
            "past": 1,
            "zero": 0,
            "before 1970": -5 * 10**9 - 7,
            "2001": 10**18 + 123456789,
            "2100": 4102444800 * 10**9 + 1,
        }.items():
            os.utime(name, ns=(value, value))
            found[f"{name} {label}"] = os.stat(name).st_mtime_ns
    with opened("f", os.O_RDONLY) as fd:
        os.utime(fd, ns=(7, 8))
    found["by descriptor"] = os.stat("f").st_mtime_ns
    os.utime("f", (99, 100))
    put("f", b"1")
    found["a write moves it again"] = abs(os.stat("f").st_mtime - time.time()) < 5
    return found


@case
def times_that_are_left_or_now() -> Observation:
    put("f")
    now, omit = (0, kernel.UTIME_NOW), (0, kernel.UTIME_OMIT)
    found: Observation = {}
    os.utime("f", (1000, 2000))
    kernel.utimensat("f", omit, (3000, 5))
    found["atime left"] = os.stat("f").st_atime_ns
    found["mtime set"] = os.stat("f").st_mtime_ns
    kernel.utimensat("f", (4000, 6), omit)
    found["atime set"] = os.stat("f").st_atime_ns
    found["mtime left"] = os.stat("f").st_mtime_ns
    kernel.utimensat("f", omit, now)
    found["mtime now"] = abs(os.stat("f").st_mtime - time.time()) < 5
    found["atime still"] = os.stat("f").st_atime_ns
    before = os.stat("f").st_ctime_ns
    later()
    kernel.utimensat("f", omit, omit)
    found["both left: ctime stays"] = os.stat("f").st_ctime_ns == before
    found["bad ns"] = err(kernel.utimensat, "f", (0, 10**9), (0, 0))
    return found


@case
def access_times_of_directories_and_links() -> Observation:
    os.mkdir("d")
    os.symlink("x", "s")
    os.utime("d", (1000, 2000))
    os.utime("s", (1000, 2000), follow_symlinks=False)
    return {
        "directory": [os.stat("d").st_atime, os.stat("d").st_mtime],
        "link": [os.lstat("s").st_atime, os.lstat("s").st_mtime],
    }


@case
def a_read_moves_the_access_time() -> Observation:
    put("f", b"12345")
    os.utime("f", (1000, 2000))
    later()
    with opened("f", os.O_RDONLY) as fd:
        os.read(fd, 5)
    with opened("f", os.O_RDONLY) as fd:
        return {"moved": os.fstat(fd).st_atime > 2000}


@case
def what_moves_the_times_of_a_file() -> Observation:
    put("f", b"12345")

    def write(data: bytes) -> None:
        with opened("f", os.O_RDWR) as fd:
            os.write(fd, data)

    def ftruncate(size: int) -> None:
        with opened("f", os.O_RDWR) as fd:
            os.ftruncate(fd, size)

    return {
        "write": _changed("f", lambda: write(b"x")),
        "write of nothing": _changed("f", lambda: write(b"")),
        "read": _changed("f", lambda: os.close(os.open("f", os.O_RDONLY))),
        "open to write": _changed("f", lambda: os.close(os.open("f", os.O_RDWR))),
        "ftruncate": _changed("f", lambda: ftruncate(2)),
        "ftruncate to the same size": _changed("f", lambda: ftruncate(2)),
        "truncate": _changed("f", lambda: os.truncate("f", 9)),
        "truncate to the same size": _changed("f", lambda: os.truncate("f", 9)),
        "truncating open": _changed("f", lambda: put("f")),
        "chmod": _changed("f", lambda: os.chmod("f", 0o600)),
        "chmod to the same": _changed("f", lambda: os.chmod("f", 0o600)),
        "chown": _changed("f", lambda: os.chown("f", 1, 1)),
        "utime": _changed("f", lambda: os.utime("f")),
        "rename": _changed("f", lambda: _in_turn(os.rename, ("f", "g"), ("g", "f"))),
    }


@case
def what_moves_the_times_of_a_directory() -> Observation:
    os.mkdir("d")
    os.mkdir("e")
    put("e/moved")
    return {
        "create": _changed("d", lambda: put("d/f", b"1")),
        "write": _changed("d", lambda: put("d/f", b"12")),
        "mkdir": _changed("d", lambda: os.mkdir("d/sub")),
        "symlink": _changed("d", lambda: os.symlink("x", "d/s")),
        "rename inside": _changed("d", lambda: os.rename("d/f", "d/g")),
        "rename to another": _changed("d", lambda: os.rename("d/g", "e/g"), "e"),
        "rename over": _changed("d", lambda: os.rename("e/g", "d/sub/o"), "e", "d/sub"),
        "rename back": _changed("d", lambda: os.rename("d/sub/o", "d/o"), "d/sub"),
        "chmod of an entry": _changed("d", lambda: os.chmod("d/o", 0o600)),
        "unlink": _changed("d", lambda: os.unlink("d/o")),
        "rmdir": _changed("d", lambda: os.rmdir("d/sub")),
        "rename of itself": _changed(".", lambda: os.rename("d", "q")),
        "a failed mkdir": _changed("e", lambda: err(os.mkdir, "e/moved")),
        "a failed unlink": _changed("e", lambda: err(os.unlink, "e/none")),
    }


@case
def a_listing_moves_no_modification_time() -> Observation:
    put("f")
    return {"listdir": _changed(".", lambda: os.listdir("."))}


@case
def times_of_new_entries_agree() -> Observation:
    os.mkdir("d")
    later()
    put("d/f")
    file, directory = os.stat("d/f"), os.stat("d")
    return {
        "near": abs(file.st_mtime_ns - directory.st_mtime_ns) < 50_000_000,
        "mtime is ctime": abs(file.st_mtime_ns - file.st_ctime_ns) < 50_000_000,
    }


@case
def birth_times() -> Observation:
    put("f")
    seen = kernel.statx("f", kernel.STATX_BASIC | kernel.STATX_BTIME)
    return {"given": bool(seen["mask"] & kernel.STATX_BTIME)}


@case
def statx_agrees_with_stat() -> Observation:
    put("f", b"12345", 0o640)
    seen = kernel.statx("f", kernel.STATX_BASIC)
    known = os.stat("f")
    return {
        "same": [
            seen["ino"] == known.st_ino,
            seen["size"] == known.st_size,
            seen["mode"] == known.st_mode,
            seen["nlink"] == known.st_nlink,
        ],
        "basic": seen["mask"] & kernel.STATX_BASIC == kernel.STATX_BASIC,
        "forced": err(kernel.statx, "f", kernel.STATX_BASIC, 0x2100),
        "not synchronised": err(kernel.statx, "f", kernel.STATX_BASIC, 0x4100),
    }


@case
def blocks_follow_the_content() -> Observation:
    with opened("f") as fd:
        os.write(fd, b"x" * 100_000)
        os.fsync(fd)
        full = os.fstat(fd).st_blocks
        os.ftruncate(fd, 0)
        empty = os.fstat(fd).st_blocks
    return {"about its size": 100_000 // 512 <= full <= 300, "empty": empty}


@case
def sizes_are_seen_at_once() -> Observation:
    found = []
    with opened("f") as fd:
        for number in range(1, 5):
            os.pwrite(fd, b"x" * 1000, number * 1000)
            found.append([os.stat("f").st_size, os.fstat(fd).st_size])
        os.ftruncate(fd, 10)
        found.append([os.stat("f").st_size, os.fstat(fd).st_size])
    return {"sizes": found}


@case
def the_file_system() -> Observation:
    found = os.statvfs(".")
    with opened("f") as fd:
        by_descriptor = os.fstatvfs(fd)
    return {
        "longest name": found.f_namemax,
        "block sizes": [found.f_bsize, found.f_frsize],
        "free is at most all": found.f_bavail <= found.f_bfree <= found.f_blocks,
        "inodes": found.f_ffree <= found.f_files and found.f_files > 0,
        "not read-only": not found.f_flag & os.ST_RDONLY,
        "by descriptor": by_descriptor.f_blocks == found.f_blocks,
    }


@case
def limits_by_pathconf() -> Observation:
    found = {}
    for name in ("PC_NAME_MAX", "PC_PATH_MAX", "PC_PIPE_BUF", "PC_NO_TRUNC", "PC_CHOWN_RESTRICTED"):
        found[name] = os.pathconf(".", name)
    return found


@case
def room_is_taken_and_given_back() -> Observation:
    before = os.statvfs(".").f_bavail * os.statvfs(".").f_frsize
    with opened("f") as fd:
        os.posix_fallocate(fd, 0, 64 << 20)
        during = os.statvfs(".").f_bavail * os.statvfs(".").f_frsize
    os.unlink("f")
    return {"less": before - during > 16 << 20}


@case
def an_attribute_moves_the_change_time() -> Observation:
    put("f")
    return {"setxattr": _changed("f", lambda: err(os.setxattr, "f", "user.a", b"1"))}


@case
def setgid_directories() -> Observation:
    os.mkdir("d")
    os.chown("d", -1, 4321)
    os.chmod("d", 0o2775)
    put("d/f")
    os.mkdir("d/sub")
    os.mkdir("d/sub/deeper")
    os.symlink("x", "d/s")
    os.chmod("d", 0o775)
    put("d/g")
    return {
        name: [os.lstat(name).st_gid, oct(os.lstat(name).st_mode)]
        for name in ("d", "d/f", "d/sub", "d/sub/deeper", "d/s", "d/g")
    }


@case
def the_type_is_kept() -> Observation:
    put("f")
    os.mkdir("d")
    os.symlink("x", "s")
    with os.scandir(".") as entries:
        return {
            entry.name: [
                entry.is_file(follow_symlinks=False),
                entry.is_dir(follow_symlinks=False),
                entry.is_symlink(),
                stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode),
            ]
            for entry in entries
        }
