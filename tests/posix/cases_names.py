"""Making and removing names; what a name may be."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, get, opened, put


def _things() -> list[str]:
    """One of each kind of name."""
    put("file", b"f")
    os.mkdir("empty")
    os.mkdir("full")
    put("full/x", b"x")
    os.symlink("file", "link")
    os.symlink("empty", "dirlink")
    os.symlink("nowhere", "dangling")
    return ["file", "empty", "full", "link", "dirlink", "dangling", "missing"]


def _of_each(call: Callable[[str], object]) -> Observation:
    """What the call says to each kind of name, and to paths that go wrong."""
    found: Observation = {}
    for name in (*_things(), "file/x", "missing/x", "", ".", "..", "empty/.", "full/..", "link/x"):
        found[f"{name!r}"] = err(call, name)
        for made in ("missing", "nowhere"):
            if os.path.isdir(made):
                os.rmdir(made)
            elif os.path.lexists(made):
                os.unlink(made)
        _restore()
    return found


def _restore() -> None:
    """Have the things again that a call took away."""
    if not os.path.lexists("file"):
        put("file", b"f")
    for name in ("empty", "full"):
        if not os.path.lexists(name):
            os.mkdir(name)
    if not os.path.lexists("full/x"):
        put("full/x", b"x")
    for name, target in (("link", "file"), ("dirlink", "empty"), ("dangling", "nowhere")):
        if not os.path.lexists(name):
            os.symlink(target, name)


@case
def mkdir_of_each() -> Observation:
    return _of_each(os.mkdir)


@case
def rmdir_of_each() -> Observation:
    return _of_each(os.rmdir)


@case
def unlink_of_each() -> Observation:
    return _of_each(os.unlink)


@case
def stat_of_each() -> Observation:
    return _of_each(os.stat)


@case
def readlink_of_each() -> Observation:
    return _of_each(os.readlink)


@case
def listdir_of_each() -> Observation:
    return _of_each(os.listdir)


@case
def chdir_of_each() -> Observation:
    here = os.getcwd()

    def there_and_back(name: str) -> None:
        os.chdir(name)
        os.chdir(here)

    return _of_each(there_and_back)


@case
def symlink_to_each() -> Observation:
    return _of_each(lambda name: os.symlink("target", name))


@case
def create_of_each() -> Observation:
    return _of_each(lambda name: os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)))


@case
def chmod_of_each() -> Observation:
    return _of_each(lambda name: os.chmod(name, 0o755))


@case
def utime_of_each() -> Observation:
    return _of_each(lambda name: os.utime(name, (5, 6)))


@case
def truncate_of_each() -> Observation:
    return _of_each(lambda name: os.truncate(name, 3))


@case
def names_with_a_trailing_slash() -> Observation:
    found: Observation = {}
    for name in _things():
        path = f"{name}/"
        found[f"stat {path}"] = err(os.stat, path)
        found[f"lstat {path}"] = err(os.lstat, path)
        found[f"unlink {path}"] = err(os.unlink, path)
        found[f"rename {path}"] = err(os.rename, path, "q")
        if os.path.lexists("q"):
            os.rename("q", name)
        found[f"mkdir {path}"] = err(os.mkdir, path)
        found[f"rmdir {path}"] = err(os.rmdir, path)
        _restore()
    return found


@case
def hard_links() -> Observation:
    put("a", b"1")
    os.mkdir("d")
    os.symlink("a", "s")
    found: Observation = {"of a file": err(os.link, "a", "b")}
    found["nlink"] = os.stat("a").st_nlink
    found["same inode"] = os.path.lexists("b") and os.path.samefile("a", "b")
    found["of a symlink"] = err(os.link, "s", "t", follow_symlinks=False)
    return found


@case
def hard_links_that_are_never_made() -> Observation:
    put("a", b"1")
    put("there")
    os.mkdir("d")
    return {
        "of a directory": err(os.link, "d", "e"),
        "of nothing": err(os.link, "missing", "e"),
        "to a name that is there": err(os.link, "a", "there"),
        "to a missing directory": err(os.link, "a", "missing/e"),
        "through a file": err(os.link, "a", "there/e"),
    }


@case
def symlinks() -> Observation:
    os.symlink("some/where", "s")
    found = os.lstat("s")
    target = "t" * 4095
    result: Observation = {
        "readlink": os.readlink("s"),
        "size": found.st_size,
        "mode": oct(found.st_mode),
        "nlink": found.st_nlink,
        "blocks": found.st_blocks,
        "empty": err(os.symlink, "", "e"),
        "4095 bytes": err(os.symlink, target, "long"),
        "4096 bytes": err(os.symlink, target + "t", "longer"),
        "existing": err(os.symlink, "x", "s"),
        "lchmod": err(kernel.call, "fchmodat", kernel.AT_FDCWD, b"s", 0o600, 0x100),
        "lchown": err(os.chown, "s", 1, 2, follow_symlinks=False),
        "owner": [os.lstat("s").st_uid, os.lstat("s").st_gid],
        "lutimes": err(os.utime, "s", (5, 6), follow_symlinks=False),
        "mtime": os.lstat("s").st_mtime,
        "dots": err(os.symlink, "./a/../b", "dots"),
        "odd": err(os.symlink, "a b\nc", "odd"),
        "odd target": os.readlink("odd") if os.path.lexists("odd") else None,
    }
    if os.path.lexists("long"):
        result["long target"] = os.readlink("long") == target
    return result


@case
def symlinks_that_lead_out() -> Observation:
    return {
        "absolute": err(os.symlink, "/etc/hostname", "a"),
        "far up": err(os.symlink, "../../../../../../../../../../out", "b"),
    }


@case
def symlinks_that_are_followed() -> Observation:
    os.mkdir("d")
    put("d/f", b"inner")
    os.symlink("d", "l1")
    os.symlink("l1", "l2")
    os.symlink("l2/f", "l3")
    for number in range(41):
        os.symlink(f"chain{number + 1}" if number < 40 else "d/f", f"chain{number}")
    os.symlink("self", "self")
    return {
        "content": get("l3"),
        "through two": sorted(os.listdir("l2")),
        "create by link": err(put, "l2/new", b"1"),
        "40 links": err(os.stat, "chain1"),
        "41 links": err(os.stat, "chain0"),
        "loop": err(os.stat, "self"),
        "loop in the middle": err(os.stat, "self/x"),
        "unlink of the link only": err(os.unlink, "l3"),
        "still there": os.path.exists("d/f"),
    }


def _renamed(name: str) -> None:
    put("a")
    os.rename("a", name)


@case
def lengths_of_names() -> Observation:
    found: Observation = {}
    for label, name in {
        "255": "n" * 255,
        "256": "n" * 256,
        "255 in umlauts": "ä" * 127 + "x",
        "256 in umlauts": "ä" * 128,
    }.items():
        found[f"create {label}"] = err(put, name, b"1")
        found[f"stat {label}"] = err(os.stat, name)
        found[f"mkdir {label}"] = err(os.mkdir, name + "d" if len(name) < 200 else name[:-1] + "d")
        found[f"symlink {label}"] = err(os.symlink, "x", "s" + name[1:])
        found[f"rename to {label}"] = err(_renamed, "r" + name[1:])
    found["listed"] = sorted(len(os.fsencode(name)) for name in os.listdir("."))
    return found


@case
def bytes_of_names() -> Observation:
    names = [
        b"blank inside", b" lead", b"trail ", b"-dash", b"~", b"*?[x]", b"quote'\"", b"back\\slash",
        "ünïcode".encode(), "日本語".encode(), "é".encode(), "é".encode(), b"UPPER", b"upper",
        b".hidden", b"...", b"..x", b"a:b", b"%41", b"semi;colon", b"@", b"#", b"con", b"nul.txt",
    ]  # fmt: skip
    found: Observation = {}
    for name in names:
        found[repr(name)] = err(lambda name=name: os.close(os.open(name, os.O_CREAT | os.O_RDWR)))
    found["listed"] = sorted(repr(name) for name in os.listdir(b"."))
    return found


@case
def names_that_are_no_text() -> Observation:
    found: Observation = {}
    for label, name in {
        "not UTF-8": b"\xff\xfe",
        "newline": b"a\nb",
        "control": b"a\x01b",
        "delete": b"a\x7fb",
    }.items():
        found[f"create {label}"] = err(
            lambda name=name: os.close(os.open(name, os.O_CREAT | os.O_RDWR))
        )
        found[f"stat {label} without"] = err(os.stat, name + b"-none")
    return found


@case
def deep_trees() -> Observation:
    here = os.open(".", os.O_RDONLY)
    name = "d" * 100
    depth = 0
    for _ in range(30):
        os.mkdir(name)
        os.chdir(name)
        depth += 1
    put("f", b"deep")
    found: Observation = {"depth": depth, "content": get("f")}
    path = "/".join([name] * 30) + "/f"
    os.fchdir(here)
    found["by path"] = get(path)
    found["up"] = os.path.samefile("/".join([name] * 30) + "/.." * 30, ".")
    found["too long"] = err(os.stat, "x/" * 2100)
    found["path of 4096"] = err(os.stat, "./" * 2048)
    found["path of 4095"] = err(os.stat, "./" * 2047 + ".")
    os.close(here)
    return found


@case
def paths_over_the_limit() -> Observation:
    here = os.open(".", os.O_RDONLY)
    name = "d" * 200
    results = []
    for _ in range(25):
        results.append(err(os.mkdir, name))
        if results[-1] != "ok":
            break
        os.chdir(name)
    os.fchdir(here)
    os.close(here)
    return {"last": results[-1]}


@case
def special_files() -> Observation:
    found: Observation = {
        "fifo": err(os.mkfifo, "fifo"),
        "socket": err(os.mknod, "socket", stat.S_IFSOCK | 0o644),
        "character device": err(os.mknod, "null", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
        "block device": err(os.mknod, "block", stat.S_IFBLK | 0o666, os.makedev(7, 0)),
    }
    return found


@case
def mknod_of_files() -> Observation:
    found: Observation = {
        "file": err(os.mknod, "file", stat.S_IFREG | 0o640),
        "default": err(os.mknod, "default", 0o600),
        "again": err(os.mknod, "file", stat.S_IFREG | 0o640),
        "directory": err(os.mknod, "dir", stat.S_IFDIR | 0o755),
        "mode": oct(os.stat("file").st_mode),
        "size": os.stat("file").st_size,
        "written": err(put, "file", b"1"),
    }
    return found


@case
def the_working_directory() -> Observation:
    os.mkdir("d")
    os.chdir("d")
    first = os.path.basename(os.getcwd())
    os.rename("../d", "../e")
    second = os.path.basename(os.getcwd())
    put("f", b"1")
    there = os.listdir("../e")
    os.unlink("f")
    found: Observation = {"before": first, "renamed": second, "create": there}
    os.rmdir("../e")
    found["removed: getcwd"] = err(os.getcwd)
    found["removed: create"] = err(put, "x", b"1")
    found["removed: stat ."] = err(os.stat, ".")
    found["removed: list"] = err(os.listdir, ".")
    found["removed: stat .."] = err(os.stat, "..")
    return found


@case
def names_are_made_again() -> Observation:
    put("a", b"first", 0o600)
    first = os.stat("a").st_ino
    with opened("a", os.O_RDONLY):
        os.unlink("a")
        os.mkdir("a")
        second = os.stat("a").st_ino
    os.rmdir("a")
    os.symlink("x", "a")
    os.unlink("a")
    put("a", b"last")
    return {
        "other inode": first != second,
        "content": get("a"),
        "mode": oct(os.stat("a").st_mode),
        "there": os.listdir("."),
    }


@case
def removal_of_a_tree_by_descriptors() -> Observation:
    import shutil

    for number in range(5):
        os.makedirs(f"t/{number}/x")
        put(f"t/{number}/f", b"1")
    os.symlink("..", "t/up")
    shutil.rmtree("t")
    return {"there": os.listdir(".")}
