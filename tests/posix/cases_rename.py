"""rename(2) and renameat2(2): every kind of source against every kind of target."""

from __future__ import annotations

import os
import shutil

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, get, later, opened, put

KINDS = ("file", "empty", "full", "link", "missing")


def _make(name: str, kind: str) -> None:
    if kind == "file":
        put(name, name.encode())
    elif kind in {"empty", "full"}:
        os.mkdir(name)
        if kind == "full":
            put(f"{name}/inner", name.encode())
    elif kind == "link":
        os.symlink("somewhere", name)


def _what(name: str) -> str:
    if not os.path.lexists(name):
        return "nothing"
    if os.path.islink(name):
        return f"link {os.readlink(name)}"
    if os.path.isdir(name):
        return f"dir {sorted(os.listdir(name))}"
    return f"file {get(name)}"


def _clear() -> None:
    for name in os.listdir("."):
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        else:
            os.unlink(name)


def _matrix(flags: int) -> Observation:
    found: Observation = {}
    for source in KINDS:
        for target in KINDS:
            _make("source", source)
            _make("target", target)
            result = err(kernel.rename2, "source", "target", flags)
            found[f"{source} to {target}"] = [result, _what("source"), _what("target")]
            _clear()
    return found


@case
def rename_of_each_to_each() -> Observation:
    return _matrix(0)


@case
def rename_without_replacing() -> Observation:
    return _matrix(kernel.RENAME_NOREPLACE)


@case
def rename_that_exchanges() -> Observation:
    found = _matrix(kernel.RENAME_EXCHANGE)
    return {name: seen for name, seen in found.items() if not _has_directory(name)}


@case
def rename_that_exchanges_directories() -> Observation:
    found = _matrix(kernel.RENAME_EXCHANGE)
    return {name: seen for name, seen in found.items() if _has_directory(name)}


def _has_directory(label: str) -> bool:
    return bool({"empty", "full"} & set(label.split()))


@case
def rename_flags() -> Observation:
    put("a", b"1")
    put("b", b"2")
    both = kernel.RENAME_EXCHANGE | kernel.RENAME_NOREPLACE
    return {
        "both": err(kernel.rename2, "a", "b", both),
        "unknown": err(kernel.rename2, "a", "b", 64),
        "to itself": err(os.rename, "a", "a"),
        "to itself without replacing": err(kernel.rename2, "a", "a", kernel.RENAME_NOREPLACE),
        "content": [get("a"), get("b")],
    }


@case
def rename_with_whiteout() -> Observation:
    put("a", b"1")
    return {"result": err(kernel.rename2, "a", "b", kernel.RENAME_WHITEOUT)}


@case
def rename_into_itself() -> Observation:
    os.makedirs("a/b/c")
    return {
        "below": err(os.rename, "a", "a/x"),
        "far below": err(os.rename, "a", "a/b/c/x"),
        "to its parent": err(os.rename, "a/b", "a"),
        "exchange with below": err(kernel.rename2, "a", "a/b", kernel.RENAME_EXCHANGE),
        "dot": err(os.rename, ".", "x"),
        "to dot": err(os.rename, "a", "."),
        "dot dot": err(os.rename, "a/..", "x"),
        "to dot dot": err(os.rename, "a", "a/.."),
    }


@case
def rename_by_wrong_paths() -> Observation:
    put("file", b"1")
    os.mkdir("dir")
    return {
        "from a missing directory": err(os.rename, "missing/a", "b"),
        "to a missing directory": err(os.rename, "file", "missing/a"),
        "from below a file": err(os.rename, "file/a", "b"),
        "to below a file": err(os.rename, "file", "file/a"),
        "a file with a slash": err(os.rename, "file", "new/"),
        "a directory with a slash": err(os.rename, "dir", "new/"),
        "empty": err(os.rename, "", "x"),
        "to empty": err(os.rename, "file", ""),
    }


@case
def rename_between_directories() -> Observation:
    os.makedirs("a/sub")
    os.mkdir("b")
    put("a/f", b"1")
    put("a/sub/g", b"2")
    put("b/f", b"old")
    inode = os.stat("a/f").st_ino
    directory = os.stat("a/sub").st_ino
    os.rename("a/f", "b/f")
    os.rename("a/sub", "b/sub")
    return {
        "file keeps its inode": os.stat("b/f").st_ino == inode,
        "directory keeps its inode": os.stat("b/sub").st_ino == directory,
        "content": [get("b/f"), get("b/sub/g")],
        "links": [os.stat("a").st_nlink, os.stat("b").st_nlink],
        "left": os.listdir("a"),
        "dot dot": os.path.samefile("b/sub/..", "b"),
    }


@case
def rename_of_a_directory_with_open_files() -> Observation:
    os.mkdir("d")
    with opened("d/f") as fd:
        os.write(fd, b"before ")
        os.rename("d", "e")
        os.write(fd, b"after")
        directory = os.open("e", os.O_RDONLY)
        os.rename("e/f", "e/g")
        os.rename("e", "f")
        found = {
            "content": get("f/g"),
            "listing": os.listdir(directory),
            "by descriptor": os.stat("g", dir_fd=directory).st_size,
        }
        os.close(directory)
    return found


@case
def rename_over_an_open_directory() -> Observation:
    os.mkdir("a")
    put("a/f", b"1")
    os.mkdir("b")
    fd = os.open("b", os.O_RDONLY)
    os.rename("a", "b")
    found = {
        "old lists": err(os.listdir, fd),
        "old nlink": os.fstat(fd).st_nlink,
        "create in the old": err(os.open, "x", os.O_CREAT | os.O_RDWR, dir_fd=fd),
        "new": os.listdir("b"),
    }
    os.close(fd)
    return found


@case
def rename_changes_times() -> Observation:
    os.mkdir("a")
    os.mkdir("b")
    put("a/f", b"1")
    before = {path: os.stat(path) for path in ("a/f", "a", "b")}
    later()
    os.rename("a/f", "b/f")
    moved, left, entered = os.stat("b/f"), os.stat("a"), os.stat("b")
    return {
        "ctime of the file": moved.st_ctime_ns > before["a/f"].st_ctime_ns,
        "mtime of the file": moved.st_mtime_ns == before["a/f"].st_mtime_ns,
        "mtime of the old directory": left.st_mtime_ns > before["a"].st_mtime_ns,
        "mtime of the new directory": entered.st_mtime_ns > before["b"].st_mtime_ns,
        "ctime of the old directory": left.st_ctime_ns > before["a"].st_ctime_ns,
        "ctime of the new directory": entered.st_ctime_ns > before["b"].st_ctime_ns,
    }


@case
def save_by_rename() -> Observation:
    put("config", b"old", 0o600)
    found = []
    for number in range(20):
        put("config.new", b"%d" % number)
        os.rename("config.new", "config")
        found.append(get("config"))
    return {"seen": found == [str(number) for number in range(20)], "there": os.listdir(".")}
