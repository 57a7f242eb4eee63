"""Readers who belong to no job: a checkpoint is there as a whole, or not at all (I8)."""

from __future__ import annotations

import os

import blake3
from tests.sim.checker import Checker
from tests.sim.machines import RUN, Mount
from tests.sim.scheduler import Scheduler

from ckptgate.errors import CkptError
from ckptgate.vfs.interface import Caller

__all__ = ["read_all", "read_once"]


def read_all(mount: Mount, caller: Caller, root: int) -> dict[str, bytes]:
    """All files below the directory *root*, as one look at it gives them."""
    found: dict[str, bytes] = {}
    places = [("", root)]
    while places:
        prefix, ino = places.pop()
        fh = mount.vfs.opendir(caller, ino)
        entries = [e for e in mount.vfs.readdir(caller, fh, 0) if e.name not in {".", ".."}]
        mount.vfs.releasedir(fh)
        for entry in entries:
            node = mount.vfs.lookup(caller, ino, entry.name).attr
            if node.kind == "dir":
                places.append((f"{prefix}{entry.name}/", node.ino))
            elif node.kind == "file":
                found[prefix + entry.name] = _read_file(mount, caller, node.ino, node.size)
    return found


def _read_file(mount: Mount, caller: Caller, ino: int, size: int) -> bytes:
    opened = mount.vfs.open(caller, ino, os.O_RDONLY)
    mount.opened[opened.fh] = opened.fd
    try:
        if not opened.is_complete:
            mount.vfs.ensure(caller, opened.fh, 0, size)
        return os.pread(opened.fd, 1 << 20, 0)
    finally:
        if mount.opened.pop(opened.fh, None) is not None:
            mount.vfs.flush(caller, opened.fh)
            mount.vfs.release(opened.fh)


def read_once(mount: Mount, caller: Caller, checker: Checker, scheduler: Scheduler) -> None:
    """I8: who belongs to no job reads a checkpoint whole, as it was committed, or not at all."""
    try:
        names = [n for n in mount.world.names(caller, RUN) if n.startswith("step-")]
        for name in names:
            entry = mount.world.walk(caller, f"{RUN}/{name}")
            files = read_all(mount, caller, entry.attr.ino)
            digests = {path: blake3.blake3(data).hexdigest() for path, data in files.items()}
            scheduler.note(f"read {name}: {len(digests)} files")
            checker.read(name, digests)
    except CkptError as exc:
        # It was replaced meanwhile, or the store is away: nothing was shown.
        scheduler.note(f"reader: {type(exc).__name__}")
