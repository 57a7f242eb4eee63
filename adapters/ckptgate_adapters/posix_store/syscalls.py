"""Every call that changes the store goes through here, so that a test can fail each one in turn.

A thin layer: one function a system call, no logic beyond looping over short writes. The rest of
the adapter calls these as `syscalls.rename(...)`, never the `os` functions. Any thread.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

__all__ = [
    "MUTATING",
    "chmod",
    "chown",
    "clone",
    "close_written",
    "copy_range",
    "create_file",
    "fsync",
    "link",
    "mkdir",
    "rename",
    "rmdir",
    "symlink",
    "touch",
    "truncate",
    "unlink",
    "write",
]

MUTATING: Final = (
    "create_file",
    "write",
    "clone",
    "copy_range",
    "truncate",
    "fsync",
    "close_written",
    "link",
    "rename",
    "symlink",
    "mkdir",
    "unlink",
    "rmdir",
    "chmod",
    "chown",
    "touch",
)
"""Names of all functions here that change something or say that it is durable."""

_FICLONE: Final = 0x40049409
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create_file(name: str, *, dir_fd: int, mode: int = 0o644) -> int:
    """Create a file that must not exist; returns its descriptor, open for reading and writing."""
    return os.open(name, _CREATE, mode, dir_fd=dir_fd)


def write(fd: int, data: bytes | memoryview) -> None:
    """Write all of *data*."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def clone(fd: int, source_fd: int) -> None:
    """Make *fd* share all bytes of *source_fd* (reflink)."""
    fcntl.ioctl(fd, _FICLONE, source_fd)


def copy_range(source_fd: int, fd: int, count: int, offset: int) -> int:
    """Copy up to *count* bytes at *offset* to the same offset, in the kernel or on the server."""
    return os.copy_file_range(source_fd, fd, count, offset, offset)


def truncate(fd: int, size: int) -> None:
    """Let a file end there; what it gets by that is a hole."""
    os.ftruncate(fd, size)


def fsync(fd: int) -> None:
    """Make what was written durable; an error is final for what was written so far."""
    os.fsync(fd)


def close_written(fd: int) -> None:
    """Close a file that was written; network file systems report late errors here."""
    os.close(fd)


def link(source: str, name: str, *, src_dir_fd: int | None, dst_dir_fd: int) -> None:
    """Give a file a second name, only if nothing has it."""
    os.link(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=False)


def rename(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Rename, replacing a file, a symlink or an empty directory."""
    os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def symlink(target: str, name: str, *, dir_fd: int) -> None:
    """Make a symlink, only if nothing has the name."""
    os.symlink(target, name, dir_fd=dir_fd)


def mkdir(name: str, mode: int = 0o755, *, dir_fd: int) -> None:
    """Make a directory, only if nothing has the name."""
    os.mkdir(name, mode, dir_fd=dir_fd)


def unlink(name: str, *, dir_fd: int) -> None:
    """Remove a name that isn't a directory's."""
    os.unlink(name, dir_fd=dir_fd)


def rmdir(name: str, *, dir_fd: int) -> None:
    """Remove an empty directory."""
    os.rmdir(name, dir_fd=dir_fd)


def chmod(fd: int, mode: int) -> None:
    """Set the permission bits of an open file or directory."""
    os.fchmod(fd, mode)


def chown(name: str, uid: int, gid: int, *, dir_fd: int) -> None:
    """Set the owner of a name; of a symlink itself, not of what it means."""
    os.chown(name, uid, gid, dir_fd=dir_fd, follow_symlinks=False)


def touch(name: str, mtime_ns: int, *, dir_fd: int) -> None:
    """Set access and modification time of a name; of a symlink itself."""
    os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)
