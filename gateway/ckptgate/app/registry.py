"""Which mounts run on this machine: one small file each in the runtime directory.

It lets the command line find the daemon of a path. A file whose daemon is gone is ignored (the
spool's lock tells) and replaced by the next mount on that mount point.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ckptgate.app.config import SYSTEM_DIRECTORY, runtime_directory
from ckptgate.errors import CkptError, UnusableError
from ckptgate_adapters.sqlite_spool import SpoolLock

__all__ = ["MountInfo", "find_mount", "forget_mount", "list_mounts", "own_info", "register_mount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MountInfo:
    """A running mount.

    Attributes:
        mountpoint, store, spool: absolute paths; the first is "" where only clients are served.
        pid: its supervisor.
        start: the supervisor's start time in clock ticks, so that a pid used again isn't mistaken.
    """

    mountpoint: str
    store: str
    spool: str
    pid: int
    start: int

    @property
    def place(self) -> str:
        """What it is called by: its mount point, or its spool where it has none."""
        return self.mountpoint or self.spool

    @property
    def is_alive(self) -> bool:
        """Whether that very process runs, or the mount is kept while there is a next one."""
        return process_start(self.pid) == self.start or self._is_kept

    @property
    def _is_kept(self) -> bool:
        """Whether the spool's lock is held for this mount."""
        try:
            holder = SpoolLock(self.spool).holder()
        except CkptError:
            # Another user's.
            return False
        # One that has not said yet who it is may well be this mount's next supervisor.
        return holder is not None and holder.get("mountpoint", self.mountpoint) == self.mountpoint


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None if there is none or it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        # A dead process stays listed until its parent asks for it.
        return None if fields[0] in {b"Z", b"X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def own_info(*, mountpoint: str, store: str, spool: str) -> MountInfo:
    """What announces a mount whose supervisor is this process."""
    pid = os.getpid()
    start = process_start(pid) or 0
    return MountInfo(mountpoint=mountpoint, store=store, spool=spool, pid=pid, start=start)


def _file(mountpoint: str, spool: str) -> str:
    name = hashlib.sha256((mountpoint or spool).encode()).hexdigest()[:16]
    return os.path.join(runtime_directory(), f"{name}.json")


def register_mount(info: MountInfo) -> None:
    """Announce a mount.

    Raises:
        UnusableError: the runtime directory can't be written or belongs to somebody else.
    """
    directory = runtime_directory()
    try:
        # Others may see which mounts there are; what is in the spool stays the owner's.
        os.makedirs(directory, mode=0o755, exist_ok=True)
        if os.stat(directory).st_uid != os.geteuid():
            msg = f"{directory} belongs to another user"
            raise UnusableError(msg, subject=directory, hint="set XDG_RUNTIME_DIR")
        temporary = f"{_file(info.mountpoint, info.spool)}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(asdict(info), stream)
        os.replace(temporary, _file(info.mountpoint, info.spool))
    except UnusableError:
        raise
    except OSError as exc:
        msg = f"cannot announce the mount in {directory}: {exc}"
        raise UnusableError(msg, subject=directory) from exc


def forget_mount(mountpoint: str, spool: str) -> None:
    """Withdraw the announcement; none there is success."""
    with contextlib.suppress(OSError):
        os.unlink(_file(mountpoint, spool))


def list_mounts() -> list[MountInfo]:
    """The mounts that run, by mount point."""
    return sorted(_read_all(), key=lambda info: info.mountpoint)


def _read_all() -> Iterator[MountInfo]:
    for directory in dict.fromkeys((runtime_directory(), SYSTEM_DIRECTORY)):
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            info = _read(os.path.join(directory, name)) if name.endswith(".json") else None
            if info is not None and info.is_alive:
                yield info


def _read(path: str) -> MountInfo | None:
    """One announcement; None if it is half-written, or of somebody who isn't to be trusted."""
    try:
        with open(path, encoding="utf-8") as stream:
            if os.fstat(stream.fileno()).st_uid not in {0, os.geteuid()}:
                return None
            return MountInfo(**json.load(stream))
    except (OSError, ValueError, TypeError):
        return None


def find_mount(path: str) -> MountInfo | None:
    """The running mount that *path* (absolute, links resolved) lies in, if any."""
    found = [
        info
        for info in list_mounts()
        if info.mountpoint
        if path == info.mountpoint or path.startswith(info.mountpoint.rstrip("/") + "/")
    ]
    return max(found, key=lambda info: len(info.mountpoint), default=None)
