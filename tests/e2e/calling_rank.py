"""A rank that makes all kinds of calls in a loop and knows what each one must come to.

`python calling_rank.py PLACE... NUMBER`: works in a directory of its own in each PLACE until a line
comes on standard input, then prints one JSON object:

    calls      how many it made
    failed     those that came to anything else than on a local disk, in words
    slowest    [seconds, call]: the call that took longest
    write      seconds of the longest write to an open file
    kept       what it left in each place: name -> content

A call that is done twice shows: a second mkdir, O_EXCL, symlink, rename or unlink has another
result than the first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import select
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

KEPT = 12
BIG_BYTES = 1 << 20


class Rank:
    def __init__(self, places: list[str], number: int) -> None:
        self.number = number
        self.homes = [f"{place}/rank{number}" for place in places]
        self.kept: dict[str, dict[str, str]] = {home: {} for home in self.homes}
        self.calls = 0
        self.failed: list[str] = []
        self.slowest = (0.0, "")
        self.write = 0.0
        self.big = -1
        self.map: mmap.mmap | None = None

    def do(self, call: Callable[..., Any], *words: Any, error: int = 0, gives: Any = None) -> Any:
        """Make a call; note if it ends otherwise than by *error*, or gives something else."""
        began = time.monotonic()
        result, number = None, 0
        try:
            result = call(*words)
        except OSError as exc:
            number = exc.errno or -1
        took = time.monotonic() - began
        self.calls += 1
        what = f"{call.__name__}{words!r}"[:200]
        if took > self.slowest[0]:
            self.slowest = (took, what)
        if call in {os.write, os.pwrite}:
            self.write = max(self.write, took)
        if number != error:
            name = errno.errorcode.get(number, "success")
            self.failed.append(f"{what}: {name}, not {errno.errorcode.get(error, 'success')}")
        elif gives is not None and result != gives:
            self.failed.append(f"{what}: {str(result)[:200]}, not {str(gives)[:200]}")
        return result

    def begin(self) -> None:
        for home in self.homes:
            self.do(os.mkdir, home)
        self.big = self.do(os.open, f"{self.homes[0]}/big", os.O_CREAT | os.O_EXCL | os.O_RDWR)
        self.do(os.pwrite, self.big, bytes(BIG_BYTES), 0)
        self.map = mmap.mmap(self.big, BIG_BYTES)

    def cycle(self, k: int) -> None:
        home = self.homes[k % len(self.homes)]
        d = f"{home}/work{k}"
        self.do(os.mkdir, d)
        self.do(os.mkdir, d, error=errno.EEXIST)
        self.file(d, k)
        self.names(d)
        self.attributes(d)
        self.do(os.unlink, f"{d}/b")
        self.do(os.unlink, f"{d}/b", error=errno.ENOENT)
        self.do(names_in, d, gives=[])
        self.do(os.rmdir, d)
        self.do(os.rmdir, d, error=errno.ENOENT)
        self.keep(home, k)
        data = bytes([k % 251]) * 65536
        self.do(os.pwrite, self.big, data, (k % 15) * 65536, gives=65536)
        self.do(os.pread, self.big, 65536, (k % 15) * 65536, gives=data)
        if self.map is not None:
            self.map[-8:] = k.to_bytes(8, "big")

    def file(self, d: str, k: int) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        fd = self.do(os.open, f"{d}/a", flags, 0o644)
        self.do(os.open, f"{d}/a", flags, error=errno.EEXIST)
        if fd is None:
            return
        data = os.urandom(3000)
        for _ in range(2):
            self.do(os.write, fd, data, gives=3000)
        self.do(size_of, fd, gives=6000)
        self.do(os.pread, fd, 6000, 0, gives=data * 2)
        self.do(os.ftruncate, fd, 1000)
        self.do(size_of, fd, gives=1000)
        self.do(fcntl.flock, fd, fcntl.LOCK_EX)
        self.do(os.rename, f"{d}/a", f"{d}/b")
        self.do(os.rename, f"{d}/a", f"{d}/b", error=errno.ENOENT)
        if k % 7 == 0:
            self.do(os.fsync, fd)
        self.do(os.close, fd)
        more = self.do(os.open, f"{d}/b", os.O_WRONLY | os.O_APPEND)
        if more is not None:
            self.do(os.write, more, b"end", gives=3)
            self.do(os.close, more)
        self.do(content, f"{d}/b", gives=data[:1000] + b"end")

    def names(self, d: str) -> None:
        self.do(os.symlink, "b", f"{d}/l")
        self.do(os.symlink, "b", f"{d}/l", error=errno.EEXIST)
        self.do(os.readlink, f"{d}/l", gives="b")
        self.do(os.link, f"{d}/b", f"{d}/h", error=errno.EPERM)
        self.do(os.mkdir, f"{d}/s")
        self.do(os.rename, f"{d}/s", f"{d}/t")
        self.do(os.rmdir, f"{d}/b", error=errno.ENOTDIR)
        self.do(os.rmdir, d, error=errno.ENOTEMPTY)
        self.do(names_in, d, gives=["b", "l", "t"])
        self.do(os.stat, f"{d}/s", error=errno.ENOENT)
        self.do(os.rmdir, f"{d}/t")
        self.do(os.rmdir, f"{d}/t", error=errno.ENOENT)
        self.do(os.unlink, f"{d}/l")
        self.do(os.unlink, f"{d}/l", error=errno.ENOENT)

    def attributes(self, d: str) -> None:
        self.do(os.chmod, f"{d}/b", 0o640)
        self.do(mode_of, f"{d}/b", gives=0o640)
        self.do(set_times, f"{d}/b", 1_234_567_890_123_456_789)
        self.do(times_of, f"{d}/b", gives=1_234_567_890_123_456_789)
        self.do(os.truncate, f"{d}/b", 5)
        self.do(size_at, f"{d}/b", gives=5)
        self.do(os.setxattr, f"{d}/b", "user.note", b"x")
        self.do(os.getxattr, f"{d}/b", "user.note", gives=b"x")
        self.do(os.removexattr, f"{d}/b", "user.note")
        self.do(os.removexattr, f"{d}/b", "user.note", error=errno.ENODATA)
        self.do(os.statvfs, d)

    def keep(self, home: str, k: int) -> None:
        name, text = f"kept{k % KEPT}", f"{self.number} {k}"
        fd = self.do(os.open, f"{home}/new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        if fd is None:
            return
        self.do(os.write, fd, text.encode())
        self.do(os.close, fd)
        self.do(os.rename, f"{home}/new", f"{home}/{name}")
        self.kept[home][name] = text
        self.do(content, f"{home}/{name}", gives=text.encode())

    def end(self) -> dict[str, Any]:
        if self.map is not None:
            self.map.flush()
            self.map.close()
        self.do(os.close, self.big)
        for home, kept in self.kept.items():
            names = sorted([*kept, "big"] if home == self.homes[0] else kept)
            self.do(names_in, home, gives=names)
        return {
            "calls": self.calls,
            "failed": self.failed,
            "slowest": self.slowest,
            "write": self.write,
            "kept": self.kept,
        }


def names_in(path: str) -> list[str]:
    return sorted(os.listdir(path))


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def size_at(path: str) -> int:
    return os.stat(path).st_size


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def set_times(path: str, at: int) -> None:
    os.utime(path, ns=(at, at))


def times_of(path: str) -> int:
    return os.stat(path).st_mtime_ns


def content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def main() -> None:
    *places, number = sys.argv[1:]
    rank = Rank(places, int(number))
    rank.begin()
    print("begun", flush=True)
    k = 0
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        rank.cycle(k)
        k += 1
    print(json.dumps(rank.end()), flush=True)


if __name__ == "__main__":
    main()
