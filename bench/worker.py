"""What the clients do, in processes of their own: one JSON request a line, one JSON answer a line.

Started by `clients.Worker` only. Imports nothing of the project: it is a trainer's process.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["OPERATIONS", "main"]


def _write(path: str, call: int, size: int) -> None:
    """Create a file and write it sequentially, without fsync."""
    block = os.urandom(call)
    _begin()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
    write = os.write
    for _ in range(size // call):
        write(fd, block)
    os.close(fd)


def _copy(source: str, path: str, call: int) -> None:
    """Create a file with another one's bytes, without fsync."""
    buffer = bytearray(call)
    view = memoryview(buffer)
    _begin()
    with open(source, "rb", buffering=0) as bytes_of:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        while count := bytes_of.readinto(buffer):
            os.write(fd, view[:count])
        os.close(fd)


def _make(directory: str) -> None:
    """Make a directory, unless it is there."""
    _begin()
    os.makedirs(directory, exist_ok=True)


def _text(path: str, text: str) -> None:
    """Write a small text in place."""
    _begin()
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _stored(path: str) -> float:
    """Wait until the store has a file, verified; seconds since the epoch."""
    _begin()
    while os.getxattr(path, "user.ckptgate.stored") != b"yes":
        time.sleep(0.005)
    return time.time()


def _read(path: str, call: int) -> None:
    """Read a file to its end."""
    vector = [bytearray(call)]
    _begin()
    fd = os.open(path, os.O_RDONLY)
    readv = os.readv
    while readv(fd, vector):
        pass
    os.close(fd)


def _map(path: str, call: int) -> None:
    """Copy all bytes out of a shared mapping."""
    buffer = bytearray(call)
    _begin()
    fd = os.open(path, os.O_RDONLY)
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        view = memoryview(mapping)
        for offset in range(0, len(view) - call + 1, call):
            buffer[:] = view[offset : offset + call]
        view.release()
    os.close(fd)


def _create(directory: str, count: int, size: int) -> None:
    """Create, write and close *count* small files."""
    block = os.urandom(size)
    names = [f"{directory}/f{number:06d}" for number in range(count)]
    _begin()
    for name in names:
        fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        if block:
            os.write(fd, block)
        os.close(fd)


def _stat(directory: str, count: int) -> None:
    """Stat the files that `_create` made."""
    names = [f"{directory}/f{number:06d}" for number in range(count)]
    _begin()
    for name in names:
        os.stat(name)


def _list(directory: str) -> int:
    """Names of a directory; how many."""
    _begin()
    return len(os.listdir(directory))


def _list_long(directory: str) -> int:
    """Names and attributes, as `ls -l`; how many."""
    _begin()
    with os.scandir(directory) as found:
        return sum(entry.stat(follow_symlinks=False).st_nlink > 0 for entry in found)


def _sample(directory: str, count: int, interval_s: float) -> dict[str, list[float]]:
    """Stat and create files in turn until the next line of input; seconds of each call."""
    names = [f"{directory}/f{number:06d}" for number in range(count)]
    stats: list[float] = []
    creates: list[float] = []
    _begin()
    while not select.select([sys.stdin], [], [], interval_s)[0]:
        began = time.perf_counter()
        os.stat(names[len(stats) % count])
        stats.append(time.perf_counter() - began)
        if len(stats) % 20 == 0:
            name = f"{directory}/new{len(stats)}"
            began = time.perf_counter()
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644))
            creates.append(time.perf_counter() - began)
    sys.stdin.readline()
    return {"stats": stats, "creates": creates}


def _commit(directory: str) -> None:
    """Say that the checkpoint is written."""
    _begin()
    os.setxattr(directory, "user.ckptgate.commit", b"all")


OPERATIONS: dict[str, Callable[..., Any]] = {
    "write": _write,
    "copy": _copy,
    "make": _make,
    "text": _text,
    "stored": _stored,
    "read": _read,
    "map": _map,
    "create": _create,
    "stat": _stat,
    "list": _list,
    "list_long": _list_long,
    "sample": _sample,
    "commit": _commit,
}

_state = {"at": 0.0, "began": 0.0}


def _begin() -> None:
    """Wait for the agreed moment; what came before it was preparation."""
    while time.monotonic() < _state["at"]:
        pass
    _state["began"] = time.monotonic()


def main() -> None:
    """Answer requests until the input ends."""
    # Not `for text in sys.stdin`: that reads ahead, and `_sample` looks for the next line.
    while text := sys.stdin.readline():
        request = json.loads(text)
        _state["at"] = request.pop("at")
        answer: dict[str, Any] = {}
        try:
            answer["result"] = OPERATIONS[request.pop("op")](**request)
        except Exception:  # noqa: BLE001 - told to whoever asked
            answer["error"] = traceback.format_exc()
        answer["ended"] = time.monotonic()
        answer["began"] = _state["began"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
