"""What a worker can do to a tree: the same code for a mount and for the plain directory beside it.

Run as a program it is a worker: it reads one JSON request a line, `[move, root, arguments]`, does
it, and answers `["ok", value]` or `["error", errno]`. Descriptors stay open under names between
requests. Imports the standard library only: it is started often.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Moves"]


class Moves:
    """All moves, below one root at a time; methods that begin with `do_` are moves."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def call(self, move: str, root: str, words: list[Any]) -> list[Any]:
        """Do a move; its value or errno."""
        action: Callable[..., Any] = getattr(self, f"do_{move}")
        try:
            return ["ok", action(root, *words)]
        except OSError as exc:
            return ["error", exc.errno]

    # Files

    def do_open(self, root: str, key: str, path: str, flags: int) -> None:
        """Open and keep it."""
        fd = os.open(f"{root}/{path}", flags, 0o644)
        self.do_close(root, key)
        self._open[key] = fd

    def do_close(self, root: str, key: str) -> None:
        fd = self._open.pop(key, None)
        if fd is not None:
            os.close(fd)

    def do_close_all(self, root: str) -> None:
        for key in list(self._open):
            self.do_close(root, key)

    def do_pwrite(self, root: str, key: str, offset: int, text: str) -> int:
        return os.pwrite(self._open[key], text.encode(), offset)

    def do_write(self, root: str, key: str, text: str) -> int:
        return os.write(self._open[key], text.encode())

    def do_pread(self, root: str, key: str) -> str:
        return os.pread(self._open[key], 1 << 20, 0).decode("latin-1")

    def do_ftruncate(self, root: str, key: str, size: int) -> None:
        os.ftruncate(self._open[key], size)

    def do_fsync(self, root: str, key: str) -> None:
        os.fsync(self._open[key])

    def do_fstat(self, root: str, key: str) -> list[int]:
        found = os.fstat(self._open[key])
        return [found.st_size, found.st_nlink]

    def do_map(self, root: str, key: str, text: str) -> None:
        """Store through a shared mapping, as much of *text* as the file is long."""
        size = os.fstat(self._open[key]).st_size
        if size:
            with mmap.mmap(self._open[key], size) as mapped:
                data = text.encode()[:size]
                mapped[: len(data)] = data

    def do_fork_write(self, root: str, key: str, text: str) -> None:
        """A child that inherited the descriptor writes and exits; the parent's stays open."""
        pid = os.fork()
        if not pid:
            os.write(self._open[key], text.encode())
            os._exit(0)
        os.waitpid(pid, 0)

    def do_put(self, root: str, path: str, text: str) -> None:
        with open(f"{root}/{path}", "wb") as stream:
            stream.write(text.encode())

    def do_append(self, root: str, path: str, text: str) -> None:
        with open(f"{root}/{path}", "ab") as stream:
            stream.write(text.encode())

    def do_read(self, root: str, path: str) -> str:
        with open(f"{root}/{path}", "rb") as stream:
            return stream.read().decode("latin-1")

    def do_truncate(self, root: str, path: str, size: int) -> None:
        os.truncate(f"{root}/{path}", size)

    # Names and attributes

    def do_exclusive(self, root: str, path: str) -> None:
        os.close(os.open(f"{root}/{path}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    def do_unlink(self, root: str, path: str) -> None:
        os.unlink(f"{root}/{path}")

    def do_rename(self, root: str, old: str, new: str) -> None:
        os.rename(f"{root}/{old}", f"{root}/{new}")

    def do_mkdir(self, root: str, path: str = "") -> None:
        os.mkdir(f"{root}/{path}" if path else root)

    def do_rmdir(self, root: str, path: str = "") -> None:
        os.rmdir(f"{root}/{path}" if path else root)

    def do_symlink(self, root: str, target: str, path: str) -> None:
        os.symlink(target, f"{root}/{path}")

    def do_chmod(self, root: str, path: str, mode: int) -> None:
        os.chmod(f"{root}/{path}", mode)

    def do_utime(self, root: str, path: str, ns: int) -> None:
        os.utime(f"{root}/{path}", ns=(ns, ns))

    def do_listdir(self, root: str, path: str = "") -> list[str]:
        return sorted(os.listdir(f"{root}/{path}" if path else root))

    def do_rmtree(self, root: str) -> None:
        shutil.rmtree(root)

    def do_point(self, root: str, name: str, target: str) -> None:
        """A pointer by a link of another name that is renamed over it."""
        os.symlink(target, f"{root}/.{name}.new")
        os.replace(f"{root}/.{name}.new", f"{root}/{name}")

    def do_readlink(self, root: str, path: str) -> str:
        return os.readlink(f"{root}/{path}")

    def do_commit(self, root: str, value: str) -> None:
        os.setxattr(root, "user.ckptgate.commit", value.encode())

    def do_state(self, root: str) -> dict[str, Any]:
        return json.loads(os.getxattr(root, "user.ckptgate.state"))

    # Whole trees

    def do_tree(self, root: str) -> list[list[Any]]:
        """Everything below: path, kind, mode, size, links, and bytes or target; sorted."""
        return sorted(_walk(root, ""))

    def do_digest(self, root: str) -> str:
        """Names, kinds and digests in a line, read by descriptors: one version, or an error."""
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _digest(top)
        finally:
            os.close(top)


def _walk(root: str, below: str) -> Iterator[list[Any]]:
    for name in os.listdir(f"{root}/{below}" if below else root):
        if name == ".ckptgate":
            continue
        path = f"{below}/{name}" if below else name
        full = f"{root}/{path}"
        found = os.lstat(full)
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode):
            yield [path, "dir", mode, 0, 0, ""]
            yield from _walk(root, path)
        elif stat.S_ISLNK(found.st_mode):
            yield [path, "link", 0, found.st_size, found.st_nlink, os.readlink(full)]
        else:
            with open(full, "rb") as stream:
                data = stream.read().decode("latin-1")
            yield [path, "file", mode, found.st_size, found.st_nlink, data]


def _digest(fd: int) -> str:
    total: list[str] = []
    for name in sorted(os.listdir(fd)):
        if name == ".ckptgate":
            continue
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            try:
                value = f"({_digest(inner)})"
            finally:
                os.close(inner)
        elif stat.S_ISLNK(found.st_mode):
            value = "-> " + os.readlink(name, dir_fd=fd)
        else:
            file = os.open(name, os.O_RDONLY, dir_fd=fd)
            try:
                value = hashlib.sha256(os.pread(file, 1 << 20, 0)).hexdigest()[:8]
            finally:
                os.close(file)
        total.append(f"{name}: {value}")
    return ", ".join(total)


def observe(runs: list[str], names: list[str], moves: Moves) -> list[list[str]]:
    """Digests of what is at the names, until a byte comes in: [run, name, digest]."""
    seen: set[tuple[str, str, str]] = set()
    os.set_blocking(0, False)
    while True:
        for run in runs:
            for name in names:
                kind, value = moves.call("digest", f"{run}/{name}", [])
                # What is replaced or retired during a walk ends it; a part of it says nothing.
                if kind == "ok":
                    seen.add((run, name, value))
        try:
            if os.read(0, 1) is not None:
                return sorted([*item] for item in seen)
        except BlockingIOError:
            time.sleep(0.005)


def main() -> None:
    """A worker, or with arguments an observer."""
    moves = Moves()
    if len(sys.argv) > 1:
        runs, names = json.loads(sys.argv[1])
        print("ready", flush=True)
        print(json.dumps(observe(runs, names, moves)), flush=True)
        return
    for line in sys.stdin:
        print(json.dumps(moves.call(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
