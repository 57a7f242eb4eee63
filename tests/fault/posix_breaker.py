"""Breaking the directory store's system calls, and what its trees must look like afterwards."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    Manifest,
    encode,
)
from ckptgate.testing.faults import CrashError
from ckptgate.testing.samples import MTIME_NS, manifest_of, store_checkpoint, store_file
from ckptgate_adapters.posix_store import PosixStore, syscalls

RUN = "exp/run"
CODES = [errno.EIO, errno.ENOSPC, errno.ESTALE]


class Breaker:
    """Makes the n-th mutating system call fail; `crash` lets nothing happen any more after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.set(at=0)
        for name in syscalls.MUTATING:
            monkeypatch.setattr(syscalls, name, self._wrapped(name, getattr(syscalls, name)))

    def set(self, *, at: int, when: str = "before", code: int = errno.EIO) -> None:
        self.at, self.when, self.code = at, when, code
        self.is_dead = False
        self.is_spent = False
        self.calls.clear()

    def end(self) -> None:
        """No more faults; whether there was one stays known."""
        self.at, self.is_dead = 0, False

    def _wrapped(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def broken(*args: object, **kwargs: object) -> object:
            with self._lock:
                if self.is_dead:
                    raise CrashError
                self.calls.append(name)
                is_hit = len(self.calls) == self.at
            if not is_hit:
                return call(*args, **kwargs)
            self.is_spent = True
            if self.when in {"after", "crash-after"}:
                call(*args, **kwargs)
            elif name == "close_written":
                # A failed close has closed.
                call(*args, **kwargs)
            if self.when.startswith("crash"):
                self.is_dead = True
                raise CrashError
            raise OSError(self.code, os.strerror(self.code))

        return broken


def each_fault(breaker: Breaker, base: Path, when: str, code: int = errno.EIO) -> Iterator[Path]:
    """A fresh store directory for each call that can fail, until a run meets no fault."""
    for at in count(1):
        root = base / f"{when}-{at}"
        root.mkdir()
        breaker.set(at=at, when=when, code=code)
        yield root
        if not breaker.is_spent:
            assert at > 3, "the adapter made hardly any call through its shim"
            return


def temps(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".tmp-*")]


def snapshot(top: Path) -> dict[str, tuple[object, ...]]:
    """All of a directory: kind, bytes or target, mode, mtime; without the gateway's own files."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        info = path.lstat()
        if name.startswith(".ckptgate"):
            found[name] = (path.read_bytes() if path.is_file() else "dir",)
        elif path.is_symlink():
            found[name] = (os.readlink(path), info.st_mtime_ns)
        else:
            contents = path.read_bytes() if path.is_file() else "dir"
            found[name] = (contents, stat.S_IMODE(info.st_mode), info.st_mtime_ns)
    return found


def other_entry(path: str, kind: EntryType, mode: int, target: str = "") -> FileEntry:
    return FileEntry(
        path=path,
        type=kind,
        mode=mode,
        mtime_ns=MTIME_NS,
        target=target,
        uid=os.getuid(),
        gid=os.getgid(),
    )


def rich_checkpoint(store: PosixStore, spool: Path) -> tuple[Manifest, bytes]:
    """Files, one of them linked, directories and a symlink."""
    spool.mkdir()
    (spool / "a").write_bytes(b"new a")
    (spool / "b").write_bytes(b"new b")
    one, two = str(spool / "a"), str(spool / "b")
    entries = [
        store_file(store, RUN, "step-1.1", "a.bin", one, mode=0o640, may_link=True, file=1),
        store_file(store, RUN, "step-1.1", "sub/b.bin", two, mode=0o600, file=2),
        other_entry("sub", EntryType.DIR, 0o750),
        other_entry("void", EntryType.DIR, 0o700),
        other_entry("l", EntryType.SYMLINK, 0o777, target="a.bin"),
    ]
    manifest = manifest_of(RUN, "step-1", "step-1.1", entries)
    return manifest, encode(manifest)


def occupy(store: PosixStore, root: Path, spool: Path, by: str) -> None:
    """Put something where the checkpoint is to appear."""
    if by == "older":
        spool.mkdir()
        old, data = store_checkpoint(
            store, RUN, "step-1.0", "step-1", str(spool), {"x": b"old", "y": b"old"}
        )
        store.publish(RUN, old, data)
    elif by == "foreign":
        place = root / RUN / "step-1"
        place.mkdir(parents=True)
        (place / "theirs").write_bytes(b"precious")


def check_kept(root: Path, by: str) -> None:
    """What was there before is somewhere below the run, whole."""
    kept = root / RUN / ".ckptgate"
    if by == "older":
        data = list((kept / "attempts" / "step-1.0" / "data").rglob("*"))
        assert [path.read_bytes() for path in data if path.is_file()] == [b"old", b"old"]
    elif by == "foreign":
        assert [path.read_bytes() for path in kept.glob("displaced/*/theirs")] == [b"precious"]
