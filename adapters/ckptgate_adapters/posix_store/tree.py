"""A checkpoint's directory as its manifest says: hard links to the stored bytes, and attributes.

It is built under a private name; whoever builds it renames it into place. Entries are made with the
attributes of the manifest; a stored file that already got others by an earlier publication is
copied instead of linked, since links share them. Any thread, one for each tree.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from ckptgate.errors import IntegrityError, MissingError
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.ids import parents_of
from ckptgate.model.layout import GATEWAY_DIR, full_key
from ckptgate.model.published import b3sums
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.copying import copy_bytes
from ckptgate_adapters.posix_store.root import (
    StoreRoot,
    fsync_directory,
    split_key,
    write_file,
)

__all__ = ["MANIFEST_NAME", "SUMS_NAME", "build_tree", "remove_tree"]

MANIFEST_NAME: Final = "manifest.json"
SUMS_NAME: Final = "b3sums"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LINKS_OF_UNPUBLISHED: Final = 2
"""A stored file has its key and perhaps its name in a spool on the same file system."""
_UNSUPPORTED: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_log = logging.getLogger(__name__)


def build_tree(
    root: StoreRoot, run: str, manifest: Manifest, manifest_bytes: bytes, top: int
) -> None:
    """Fill the empty directory *top* with what *manifest* lists, durably.

    Raises:
        MissingError, IntegrityError: bytes that it names are not in the store, or of another size.
    """
    directories = _directories(manifest)
    for path in directories:
        syscalls.mkdir(path, 0o755, dir_fd=top)
    _add_files(root, run, manifest, top)
    for entry in manifest.entries:
        if entry.type is EntryType.SYMLINK:
            syscalls.symlink(entry.target, entry.path, dir_fd=top)
            _set_owner_and_time(entry, top)
    syscalls.mkdir(GATEWAY_DIR, 0o755, dir_fd=top)
    write_file(f"{GATEWAY_DIR}/{MANIFEST_NAME}", manifest_bytes, dir_fd=top)
    write_file(f"{GATEWAY_DIR}/{SUMS_NAME}", b3sums(manifest.entries), dir_fd=top)
    given = {entry.path: entry for entry in manifest.entries}
    # Children first: adding a name to a directory changes its time.
    for path in [GATEWAY_DIR, *reversed(directories)]:
        _finish_directory(path, given.get(path), top)
    fsync_directory(top)


def remove_tree(name: str, *, dir_fd: int) -> bool:
    """Remove a directory and all below it; False if something of it had to stay.

    Names that an NFS client keeps for an open file (`.nfs*`) can't be removed yet.
    """
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        return True
    try:
        if os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            syscalls.chmod(fd, stat.S_IRWXU)
        with os.scandir(fd) as found:
            children = [(child.name, child.is_dir(follow_symlinks=False)) for child in found]
        for child, is_dir in children:
            if is_dir:
                remove_tree(child, dir_fd=fd)
            else:
                with contextlib.suppress(FileNotFoundError):
                    syscalls.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    try:
        syscalls.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return True
    except OSError as exc:
        if exc.errno not in {errno.ENOTEMPTY, errno.EBUSY}:
            raise
        _log.warning("tree-left name=%s errno=%s", name, exc.errno)
        return False
    return True


def _directories(manifest: Manifest) -> Sequence[str]:
    """All directories of the checkpoint, those that only a path implies among them; parents first.

    The model has refused paths below a symlink, so no path leaves the tree.
    """
    found: set[str] = set()
    for entry in manifest.entries:
        if entry.type is EntryType.DIR:
            found.add(entry.path)
        found.update(parents_of(entry.path))
    return sorted(found)


def _add_files(root: StoreRoot, run: str, manifest: Manifest, top: int) -> None:
    """All files; each directory of stored bytes is walked to once."""
    by_parent: dict[str, list[tuple[str, FileEntry]]] = defaultdict(list)
    for entry in manifest.entries:
        if entry.type is EntryType.FILE:
            parent, name = split_key(full_key(run, entry.key))
            by_parent[parent].append((name, entry))
    for parent, files in by_parent.items():
        with root.directory(parent) as parent_fd:
            for name, entry in files:
                _add_file(parent_fd, name, entry, top)


def _add_file(parent_fd: int, name: str, entry: FileEntry, top: int) -> None:
    fd = _open_stored(entry.key, name, parent_fd)
    try:
        stored = os.fstat(fd)
        _check_stored(entry, stored)
        is_like = _is_like(entry, stored)
        if is_like or stored.st_nlink <= _LINKS_OF_UNPUBLISHED:
            # Before the link: a crash between leaves no link with other attributes.
            if not is_like:
                _set_attributes(entry, fd, name, parent_fd, stored)
            syscalls.link(name, entry.path, src_dir_fd=parent_fd, dst_dir_fd=top)
        else:
            _add_copy(entry, fd, top)
    finally:
        os.close(fd)


def _open_stored(key: str, name: str, parent_fd: int) -> int:
    try:
        return os.open(name, _FILE, dir_fd=parent_fd)
    except FileNotFoundError as exc:
        msg = f"bytes that the manifest names are not in the store: {key!r}"
        raise MissingError(msg, subject=key) from exc


def _check_stored(entry: FileEntry, stored: os.stat_result) -> None:
    if not stat.S_ISREG(stored.st_mode) or stored.st_size != entry.size:
        msg = f"{entry.key!r} has {stored.st_size} bytes in the store, wanted {entry.size}"
        raise IntegrityError(msg, subject=entry.key)


def _is_like(entry: FileEntry, stored: os.stat_result) -> bool:
    is_owner = os.geteuid() != 0 or (stored.st_uid, stored.st_gid) == (entry.uid, entry.gid)
    mode = stat.S_IMODE(stored.st_mode)
    return is_owner and mode == entry.mode and stored.st_mtime_ns == entry.mtime_ns


def _add_copy(entry: FileEntry, source_fd: int, top: int) -> None:
    fd = syscalls.create_file(entry.path, dir_fd=top)
    try:
        copy_bytes(source_fd, fd, entry.size, entry.key)
        _set_attributes(entry, fd, entry.path, top, os.fstat(fd))
        syscalls.fsync(fd)
    except BaseException:
        # A cancelled copy, too, must not keep its descriptor.
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    syscalls.close_written(fd)


def _set_attributes(
    entry: FileEntry, fd: int, name: str, dir_fd: int, stored: os.stat_result
) -> None:
    if os.geteuid() == 0 and (stored.st_uid, stored.st_gid) != (entry.uid, entry.gid):
        _set_owner(entry, name, dir_fd)
    # After the owner, whose change takes away the set-id bits.
    syscalls.chmod(fd, entry.mode)
    syscalls.touch(name, entry.mtime_ns, dir_fd=dir_fd)


def _set_owner(entry: FileEntry, name: str, dir_fd: int) -> None:
    try:
        syscalls.chown(name, entry.uid, entry.gid, dir_fd=dir_fd)
    except OSError as exc:
        # A server that maps root to nobody: the bytes matter, the owner is a wish.
        if exc.errno not in _UNSUPPORTED:
            raise
        _log.info("owner-not-set path=%s errno=%s", entry.path, exc.errno)


def _set_owner_and_time(entry: FileEntry, top: int) -> None:
    if os.geteuid() == 0:
        _set_owner(entry, entry.path, top)
    try:
        syscalls.touch(entry.path, entry.mtime_ns, dir_fd=top)
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise


def _finish_directory(path: str, entry: FileEntry | None, top: int) -> None:
    fd = os.open(path, _DIRECTORY, dir_fd=top)
    try:
        if entry is not None:
            _set_attributes(entry, fd, path, top, os.fstat(fd))
        fsync_directory(fd)
    finally:
        os.close(fd)
