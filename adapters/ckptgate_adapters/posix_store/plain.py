"""Plain names: directories, live and whole files outside of checkpoints, under their own paths.

The gateway's own directory and unfinished writes never appear and can't be named. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

from ckptgate.errors import ExistsError, RefusedError
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.ports.store import PlainEntry, PlainKind
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.copying import copy_bytes
from ckptgate_adapters.posix_store.data import read_range
from ckptgate_adapters.posix_store.failures import translated
from ckptgate_adapters.posix_store.root import (
    StoreRoot,
    discard,
    fsync_directory,
    is_temp,
    new_temp,
    split_key,
)
from ckptgate_adapters.posix_store.tree import MANIFEST_NAME

__all__ = ["PosixPlain"]

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SOURCE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class PosixPlain:
    """`ports.store.PlainTree` on a directory."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root

    def plain_stat(self, path: str) -> PlainEntry:
        """What is there now, fresh."""
        _check_plain(path)
        with translated(path, "look at"):
            try:
                if not path:
                    with self._root.directory("") as fd:
                        return _entry(".", "", fd)
                return self._root.with_parent(path, lambda fd, name: _entry(name, name, fd))
            except NotADirectoryError as exc:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from exc

    def plain_list(self, path: str) -> list[PlainEntry]:
        """The directory's entries, sorted by name."""
        _check_plain(path)
        entries: list[PlainEntry] = []
        with translated(path, "list"):
            try:
                with self._root.directory(path) as fd:
                    for name in sorted(self._root.names(path)):
                        if not _is_hidden(name):
                            # It may be gone by now.
                            with contextlib.suppress(FileNotFoundError):
                                entries.append(_entry(name, name, fd))
            except NotADirectoryError as exc:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from exc
        return entries

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a plain file."""
        _check_plain(path)
        with translated(path, "read"):
            return self._root.with_file(path, lambda fd: read_range(fd, offset, length))

    def plain_put(self, path: str, source: str, *, mode: int, mtime_ns: int) -> None:
        """Replace the file *path* by a copy of the local file *source*, atomically, durably."""
        _check_plain(path)
        parent, name = split_key(path)
        with translated(source, "read"):
            source_fd = os.open(source, _SOURCE)
        try:
            with translated(path, "store"), self._root.directory(parent, make=True) as parent_fd:
                temp = new_temp()
                try:
                    _copy_in(temp, source_fd, parent_fd, mode, mtime_ns)
                    syscalls.rename(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
                finally:
                    discard(temp, dir_fd=parent_fd)
                fsync_directory(parent_fd)
        finally:
            os.close(source_fd)

    def plain_mkdir(self, path: str, mode: int) -> None:
        """Make a directory; an existing one is success."""
        _check_plain(path)
        parent, name = split_key(path)
        with translated(path, "make"), self._root.directory(parent, make=True) as parent_fd:
            try:
                syscalls.mkdir(name, 0o755, dir_fd=parent_fd)
            except FileExistsError as exc:
                if not stat.S_ISDIR(_stat(name, parent_fd).st_mode):
                    msg = f"{path!r} is there and no directory"
                    raise ExistsError(msg, subject=path) from exc
                return
            fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
            try:
                syscalls.chmod(fd, mode)
            finally:
                os.close(fd)
            fsync_directory(parent_fd)

    def plain_symlink(self, path: str, target: str) -> None:
        """Make or replace a symlink."""
        _check_plain(path)
        parent, name = split_key(path)
        with translated(path, "link"), self._root.directory(parent, make=True) as parent_fd:
            temp = new_temp()
            try:
                syscalls.symlink(target, temp, dir_fd=parent_fd)
                syscalls.rename(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            finally:
                discard(temp, dir_fd=parent_fd)
            fsync_directory(parent_fd)

    def plain_remove(self, path: str, *, is_dir: bool) -> None:
        """Remove a file, symlink or empty directory; nothing there is success."""
        _check_plain(path)
        parent, name = split_key(path)
        with (
            translated(path, "remove"),
            contextlib.suppress(FileNotFoundError),
            self._root.directory(parent) as parent_fd,
        ):
            if is_dir:
                self._remove_directory(path, name, parent_fd)
            else:
                syscalls.unlink(name, dir_fd=parent_fd)
            fsync_directory(parent_fd)

    def _remove_directory(self, path: str, name: str, parent_fd: int) -> None:
        """Remove one in which nothing is but what killed writers left: nobody can see that."""
        try:
            syscalls.rmdir(name, dir_fd=parent_fd)
        except OSError as exc:
            if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            left = list(self._root.names(path))
            if not all(map(is_temp, left)):
                raise
            with self._root.directory(path) as fd:
                for temp in left:
                    discard(temp, dir_fd=fd)
            syscalls.rmdir(name, dir_fd=parent_fd)

    def plain_rename(self, old: str, new: str) -> None:
        """Rename; *old* missing and *new* there is success (an earlier call landed)."""
        _check_plain(old)
        _check_plain(new)
        old_parent, old_name = split_key(old)
        new_parent, new_name = split_key(new)
        with (
            translated(old, "rename"),
            self._root.directory(old_parent) as old_fd,
            self._root.directory(new_parent, make=True) as new_fd,
        ):
            try:
                syscalls.rename(old_name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd)
            except FileNotFoundError:
                _stat(new_name, new_fd)
            fsync_directory(new_fd)
            fsync_directory(old_fd)


def _is_hidden(name: str) -> bool:
    return name == GATEWAY_DIR or is_temp(name)


def _check_plain(path: str) -> None:
    if path:
        split_key(path)
    if any(_is_hidden(part) for part in path.split("/")):
        msg = f"{path!r} is the gateway's own, not a plain name"
        raise RefusedError(msg, subject=path)


def _stat(name: str, parent_fd: int) -> os.stat_result:
    return os.stat(name, dir_fd=parent_fd, follow_symlinks=False)


def _entry(name: str, shown: str, parent_fd: int) -> PlainEntry:
    """The entry of a name in an open directory; *shown* is the name that it tells."""
    found = _stat(name, parent_fd)
    kind = _kind(found.st_mode)
    target = os.readlink(name, dir_fd=parent_fd) if kind is PlainKind.SYMLINK else ""
    is_managed = has_gateway_dir = False
    if kind is PlainKind.DIR:
        has_gateway_dir = _has(f"{name}/{GATEWAY_DIR}", parent_fd)
        is_managed = has_gateway_dir and _has(f"{name}/{GATEWAY_DIR}/{MANIFEST_NAME}", parent_fd)
    return PlainEntry(
        name=shown,
        kind=kind,
        size=found.st_size if kind is PlainKind.FILE else len(target),
        mode=stat.S_IMODE(found.st_mode),
        mtime_ns=found.st_mtime_ns,
        uid=found.st_uid,
        gid=found.st_gid,
        target=target,
        is_managed=is_managed,
        has_runs=has_gateway_dir and not is_managed,
    )


def _kind(mode: int) -> PlainKind:
    if stat.S_ISDIR(mode):
        return PlainKind.DIR
    if stat.S_ISLNK(mode):
        return PlainKind.SYMLINK
    return PlainKind.FILE


def _has(path: str, parent_fd: int) -> bool:
    try:
        _stat(path, parent_fd)
    except OSError:
        return False
    return True


def _copy_in(temp: str, source_fd: int, parent_fd: int, mode: int, mtime_ns: int) -> None:
    fd = syscalls.create_file(temp, dir_fd=parent_fd)
    try:
        copy_bytes(source_fd, fd, os.fstat(source_fd).st_size, temp)
        syscalls.chmod(fd, mode)
        syscalls.touch(temp, mtime_ns, dir_fd=parent_fd)
        syscalls.fsync(fd)
    except BaseException:
        # A cancelled copy, too, must not keep its descriptor.
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    syscalls.close_written(fd)
