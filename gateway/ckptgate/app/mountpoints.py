"""Mount points: found and cleared without ever looking into them.

A mount whose daemon died while a notification was on its way can hang: any stat of it waits for
ever. So what is mounted is read from /proc/self/mountinfo only, and a dead session is aborted
before anything else touches the path. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from ckptgate.app.registry import find_mount
from ckptgate.errors import BusyError, UnusableError
from ckptgate_adapters.fuse.channel import abort, unmount

__all__ = [
    "abort_session",
    "end_session",
    "is_dead_mount",
    "is_mounted",
    "prepare_mountpoint",
    "resolve",
]

_log = logging.getLogger(__name__)
_STACKED_MAX: Final = 16


def _absolute(path: str) -> str:
    head, tail = os.path.split(os.path.abspath(os.path.expanduser(path)))
    return os.path.join(os.path.realpath(head), tail)


def resolve(path: str) -> str:
    """The path without symlinks; a mount of ours at its end isn't looked into."""
    absolute = _absolute(path)
    return absolute if is_mounted(absolute) else os.path.realpath(absolute)


def is_mounted(path: str) -> bool:
    """Whether a ckptgate mount, alive or dead, is at this absolute path."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            left, _, right = line.partition(" - ")
            where = left.split(" ")[4].encode("utf-8", "surrogateescape")
            # Spaces and the like are octal escapes there.
            name = where.decode("unicode_escape").encode("latin-1")
            if name == os.fsencode(path) and right.startswith("fuse.ckptgate "):
                return True
    return False


def abort_session(path: str) -> None:
    """End the kernel session: all callers get an error. What is mounted stays, and answers so."""
    with contextlib.suppress(OSError):
        abort(path)


def end_session(path: str) -> None:
    """End the kernel session and detach it, and dead ones below it."""
    abort_session(path)
    for _ in range(_STACKED_MAX):
        if not is_mounted(path):
            return
        with contextlib.suppress(OSError):
            unmount(path, lazy=True)


def is_dead_mount(path: str) -> bool:
    """Whether a mount is at *path* whose daemon is dead; then its session is aborted on return.

    Raises:
        BusyError: its daemon lives.
    """
    if not is_mounted(path):
        return False
    mount = find_mount(path)
    if mount is not None and mount.mountpoint == path:
        msg = f"{path} is a mount point already (store {mount.store}, pid {mount.pid})"
        raise BusyError(msg, subject=path, hint=f"ckptgate umount {path}")
    _log.warning("dead-mount mountpoint=%s", path)
    abort_session(path)
    return True


def prepare_mountpoint(path: str) -> None:
    """Make the directory where it is missing; end a dead mount's session; refuse a used one.

    Raises:
        UnusableError, BusyError: it can't be mounted on.
    """
    if is_dead_mount(path):
        if os.geteuid() == 0:
            # It is mounted over: a trainer must not find the bare directory in between.
            return
        end_session(path)
    try:
        os.makedirs(path, exist_ok=True)
        in_it = os.listdir(path)
    except OSError as exc:
        msg = f"cannot use the mount point {path}: {exc.strerror}"
        raise UnusableError(msg, subject=path, hint="name an empty directory") from exc
    if os.path.ismount(path):
        msg = f"{path} is a mount point already"
        raise BusyError(msg, subject=path, hint="name another directory")
    if in_it:
        msg = f"the mount point {path} is not empty (it holds {min(in_it)!r})"
        hint = "name an empty directory; was something written there while nothing was mounted?"
        raise UnusableError(msg, subject=path, hint=hint)
