"""open(2), openat(2), openat2(2): flags against what is there, and what a descriptor may do."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, get, opened, put


def _kinds() -> list[str]:
    put("file", b"content")
    os.mkdir("dir")
    os.symlink("file", "link")
    os.symlink("dir", "dirlink")
    os.symlink("nothing", "dangling")
    os.symlink("loop", "loop")
    return ["file", "dir", "link", "dirlink", "dangling", "loop", "missing"]


def _matrix(flags: dict[str, int], suffix: str = "") -> Observation:
    found: Observation = {}
    for name in _kinds():
        for label, value in flags.items():

            def attempt(name=name, value=value) -> None:
                os.close(os.open(name + suffix, value, 0o644))

            found[f"{label} {name}{suffix}"] = err(attempt)
            if name in {"dangling", "missing"}:
                for made in ("nothing", "missing"):
                    if os.path.lexists(made):
                        os.unlink(made)
    found["content"] = get("file")
    return found


@case
def open_to_read() -> Observation:
    return _matrix({
        "RDONLY": os.O_RDONLY,
        "NOFOLLOW": os.O_NOFOLLOW,
        "DIRECTORY": os.O_DIRECTORY,
        "PATH": os.O_PATH,
        "PATH|NOFOLLOW": os.O_PATH | os.O_NOFOLLOW,
        "NOATIME": os.O_NOATIME,
        "NONBLOCK": os.O_NONBLOCK,
    })  # fmt: skip


@case
def open_to_write() -> Observation:
    return _matrix({
        "WRONLY": os.O_WRONLY,
        "RDWR": os.O_RDWR,
        "RDWR|NOFOLLOW": os.O_RDWR | os.O_NOFOLLOW,
        "RDWR|DIRECTORY": os.O_RDWR | os.O_DIRECTORY,
        "RDWR|APPEND": os.O_RDWR | os.O_APPEND,
        "RDWR|SYNC": os.O_RDWR | os.O_SYNC,
        "RDWR|DSYNC": os.O_RDWR | os.O_DSYNC,
    })  # fmt: skip


@case
def open_to_create() -> Observation:
    return _matrix({
        "CREAT": os.O_CREAT | os.O_RDWR,
        "CREAT|RDONLY": os.O_CREAT,
        "CREAT|EXCL": os.O_CREAT | os.O_EXCL | os.O_RDWR,
        "CREAT|NOFOLLOW": os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR,
        "CREAT|DIRECTORY": os.O_CREAT | os.O_DIRECTORY,
    })  # fmt: skip


@case
def open_with_a_trailing_slash() -> Observation:
    return _matrix({"RDONLY": os.O_RDONLY, "CREAT": os.O_CREAT | os.O_RDWR}, suffix="/")


@case
def open_to_truncate() -> Observation:
    found: Observation = {}
    for label, flags in {
        "WRONLY|TRUNC": os.O_WRONLY | os.O_TRUNC,
        "RDONLY|TRUNC": os.O_RDONLY | os.O_TRUNC,
        "RDWR|CREAT|TRUNC": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
        "RDWR|CREAT|EXCL|TRUNC": os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_TRUNC,
    }.items():
        put("a", b"12345")
        found[label] = err(lambda flags=flags: os.close(os.open("a", flags)))
        found[f"{label} size"] = os.stat("a").st_size
    return found


@case
def truncating_open_keeps_the_inode_and_the_mode() -> Observation:
    put("a", b"12345", 0o640)
    before = os.stat("a")
    with opened("a", os.O_RDWR) as reader:
        put("a", b"xy", 0o777)
        seen = os.pread(reader, 100, 0).decode()
    after = os.stat("a")
    return {
        "same inode": before.st_ino == after.st_ino,
        "mode": oct(after.st_mode),
        "a descriptor from before sees": seen,
    }


@case
def access_mode_of_a_descriptor() -> Observation:
    put("a", b"12345")
    found: Observation = {}
    for label, flags in {"RDONLY": os.O_RDONLY, "WRONLY": os.O_WRONLY, "RDWR": os.O_RDWR}.items():
        with opened("a", flags) as fd:
            found[f"{label} read"] = err(os.pread, fd, 1, 0)
            found[f"{label} write"] = err(os.pwrite, fd, b"1", 0)
            found[f"{label} ftruncate"] = err(os.ftruncate, fd, 5)
            found[f"{label} fallocate"] = err(kernel.fallocate, fd, 0, 0, 10)
            found[f"{label} fsync"] = err(os.fsync, fd)
            found[f"{label} fchmod"] = err(os.fchmod, fd, 0o600)
            found[f"{label} getfl"] = fcntl.fcntl(fd, fcntl.F_GETFL) & 3
    return found


@case
def path_descriptors() -> Observation:
    put("a", b"12345")
    os.symlink("a", "l")
    fd = os.open("a", os.O_PATH)
    link = os.open("l", os.O_PATH | os.O_NOFOLLOW)
    found = {
        "read": err(os.read, fd, 1),
        "fchmod": err(os.fchmod, fd, 0o600),
        "fstat size": os.fstat(fd).st_size,
        "chmod by /proc": err(os.chmod, f"/proc/self/fd/{fd}", 0o611),
        "mode": oct(os.stat("a").st_mode),
        "open by /proc": err(lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))),
        "link is a link": stat.S_ISLNK(os.fstat(link).st_mode),
        "readlink of it": os.readlink("", dir_fd=link),
    }
    os.close(fd)
    os.close(link)
    return found


@case
def descriptors_of_directories() -> Observation:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    found: Observation = {
        "read": err(os.read, fd, 10),
        "write": err(os.write, fd, b"1"),
        "ftruncate": err(os.ftruncate, fd, 0),
        "fsync": err(os.fsync, fd),
        "fdatasync": err(os.fdatasync, fd),
        "lseek": err(os.lseek, fd, 0, os.SEEK_SET),
        "fchmod": err(os.fchmod, fd, 0o700),
        "flock": err(fcntl.flock, fd, fcntl.LOCK_EX),
        "fallocate": err(kernel.fallocate, fd, 0, 0, 10),
        "mkdirat": err(os.mkdir, "x", dir_fd=fd),
        "openat": err(lambda: os.close(os.open("f", os.O_CREAT | os.O_RDWR, dir_fd=fd))),
        "syncfs": err(kernel.call, "syncfs", fd),
    }
    os.rmdir("x", dir_fd=fd)
    os.unlink("f", dir_fd=fd)
    os.rmdir("d")
    found["of a removed one: openat"] = err(os.open, "f", os.O_CREAT | os.O_RDWR, dir_fd=fd)
    found["of a removed one: mkdirat"] = err(os.mkdir, "f", dir_fd=fd)
    found["of a removed one: symlinkat"] = err(os.symlink, "a", "f", dir_fd=fd)
    found["of a removed one: openat ."] = err(os.open, ".", os.O_RDONLY, dir_fd=fd)
    found["of a removed one: openat .."] = err(os.stat, "..", dir_fd=fd)
    found["of a removed one: listdir"] = err(os.listdir, fd)
    found["of a removed one: nlink"] = os.fstat(fd).st_nlink
    found["of a removed one: fchmod"] = err(os.fchmod, fd, 0o711)
    os.close(fd)
    return found


@case
def openat2_resolves_below() -> Observation:
    os.mkdir("d")
    put("d/f", b"1")
    os.symlink("f", "d/link")
    os.symlink("../d/f", "d/out")
    fd = os.open("d", os.O_RDONLY)

    def attempt(path: str, resolve: int) -> str:
        return err(lambda: os.close(kernel.openat2(path, os.O_RDONLY, resolve=resolve, dir_fd=fd)))

    found = {
        "beneath": attempt("f", kernel.RESOLVE_BENEATH),
        "beneath by link": attempt("link", kernel.RESOLVE_BENEATH),
        "beneath, out": attempt("out", kernel.RESOLVE_BENEATH),
        "beneath, ..": attempt("../d/f", kernel.RESOLVE_BENEATH),
        "no links": attempt("link", kernel.RESOLVE_NO_SYMLINKS),
    }
    os.close(fd)
    return found


@case
def unnamed_temporary_files() -> Observation:
    def make(flags: int) -> str:
        try:
            fd = os.open(".", os.O_TMPFILE | flags, 0o640)
        except OSError as exc:
            return errno.errorcode[exc.errno or 0]
        os.write(fd, b"12345")
        seen = os.fstat(fd)
        os.close(fd)
        return f"{oct(seen.st_mode)} {seen.st_size} {seen.st_nlink}"

    found: Observation = {
        "RDWR": make(os.O_RDWR),
        "WRONLY|EXCL": make(os.O_WRONLY | os.O_EXCL),
        "left": os.listdir("."),
        "RDONLY": err(os.open, ".", os.O_TMPFILE | os.O_RDONLY),
    }
    return found


@case
def unnamed_temporary_files_get_a_name() -> Observation:
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o640)
    except OSError as exc:
        return {"result": errno.errorcode[exc.errno or 0]}
    os.write(fd, b"12345")
    result = err(kernel.linkat, f"/proc/self/fd/{fd}", "named", kernel.AT_SYMLINK_FOLLOW)
    os.close(fd)
    return {"result": result, "content": get("named")}


@case
def the_file_offset_is_shared_by_duplicates() -> Observation:
    put("a", b"0123456789")
    with opened("a", os.O_RDWR) as fd:
        other = os.dup(fd)
        os.read(fd, 4)
        seen = os.read(other, 2).decode()
        os.close(os.dup(other))
        at = os.lseek(fd, 0, os.SEEK_CUR)
        os.close(other)
        still = os.read(fd, 2).decode()
    return {"read": seen, "offset": at, "after close of a duplicate": still}


@case
def a_file_is_opened_by_a_relative_name_of_another_directory() -> Observation:
    os.mkdir("d")
    put("d/f", b"1")
    fd = os.open("d", os.O_PATH)
    os.rename("d", "e")
    found = {
        "openat after rename": err(lambda: os.close(os.open("f", os.O_RDONLY, dir_fd=fd))),
        "create": err(lambda: os.close(os.open("g", os.O_CREAT | os.O_RDWR, dir_fd=fd))),
        "there": sorted(os.listdir("e")),
        "old name": err(os.listdir, "d"),
        "dot dot": os.path.samefile(f"/proc/self/fd/{fd}/..", "."),
    }
    os.close(fd)
    return found
