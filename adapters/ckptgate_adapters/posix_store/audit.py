"""Whether a published directory still is what its manifest says.

People who don't use ckptgate read exactly that directory. It is only looked at, through descriptors
of its own directories, so that a symlink in it leads nowhere. Bytes that are the stored object's
own (a hard link) aren't read here: whoever checks the objects has read them. Any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import blake3

from ckptgate.model.documents import MAX_DOCUMENT_BYTES, EntryType, FileEntry, Manifest
from ckptgate.model.ids import parents_of
from ckptgate.model.layout import GATEWAY_DIR, full_key, join_key
from ckptgate.model.published import Shown, b3sums, tree_problems
from ckptgate_adapters.posix_store.data import read_range
from ckptgate_adapters.posix_store.root import StoreRoot, split_key
from ckptgate_adapters.posix_store.tree import MANIFEST_NAME, SUMS_NAME

__all__ = ["audit_tree"]

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_PIECE_BYTES: Final = 4 * 1024 * 1024
_NFS_KEPT: Final = ".nfs"
"""How an NFS client names what was removed while it has it open."""


def audit_tree(root: StoreRoot, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
    """What is wrong with `run/<name>`, one line each.

    Raises:
        OSError: the store failed.
    """
    try:
        with root.directory(join_key(run, manifest.name)) as top:
            own = _own_problems(manifest, manifest_bytes, top)
            return own + _Audit(root, run, manifest, top).problems()
    except OSError as exc:
        if exc.errno in _ABSENT:
            return [f"{manifest.name}: the published directory is not there"]
        raise


def _own_problems(manifest: Manifest, manifest_bytes: bytes, top: int) -> list[str]:
    """What is wrong with the gateway's own files in it."""
    wanted = {MANIFEST_NAME: manifest_bytes, SUMS_NAME: b3sums(manifest.entries)}
    place = f"{manifest.name}/{GATEWAY_DIR}"
    try:
        fd = os.open(GATEWAY_DIR, _DIRECTORY, dir_fd=top)
    except OSError as exc:
        if exc.errno in _ABSENT:
            return [f"{place}: missing in the published directory"]
        raise
    try:
        names = sorted({*wanted, *(name for name in os.listdir(fd) if _counts(name))})
        seen = {name: _content(name, fd) for name in wanted}
    finally:
        os.close(fd)
    return [
        f"{place}/{name}: " + ("not as published" if name in wanted else "published by others")
        for name in names
        if name not in wanted or seen[name] != wanted[name]
    ]


def _content(name: str, dir_fd: int) -> bytes | None:
    try:
        fd = os.open(name, _FILE, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno in _ABSENT:
            return None
        raise
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        return read_range(fd, 0, MAX_DOCUMENT_BYTES + 1) if is_file else None
    finally:
        os.close(fd)


def _counts(name: str) -> bool:
    return not name.startswith(_NFS_KEPT)


class _Audit:
    """One look at one tree."""

    def __init__(self, root: StoreRoot, run: str, manifest: Manifest, top: int) -> None:
        self._root = root
        self._run = run
        self._manifest = manifest
        self._top = top
        self._inodes: dict[str, tuple[int, int]] = {}
        self._directories = {e.path for e in manifest.entries if e.type is EntryType.DIR}
        for entry in manifest.entries:
            self._directories.update(parents_of(entry.path))

    def problems(self) -> list[str]:
        """What differs from the manifest."""
        stored = self._stored_inodes()
        shown = dict(self._walk(""))

        def digest(entry: FileEntry) -> str:
            inode = self._inodes[entry.path]
            return entry.digest if stored.get(entry.path) == inode else self._digest(entry.path)

        return tree_problems(self._manifest, shown, digest)

    def _walk(self, above: str) -> Iterator[tuple[str, Shown]]:
        """Path and kind of all below a directory; what a manifest can't have isn't entered."""
        fd = os.open(above or ".", _DIRECTORY, dir_fd=self._top)
        try:
            for name in sorted(os.listdir(fd)):
                if not _counts(name) or (not above and name == GATEWAY_DIR):
                    continue
                path = join_key(above, name)
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                self._inodes[path] = (found.st_dev, found.st_ino)
                if stat.S_ISLNK(found.st_mode):
                    yield path, Shown(EntryType.SYMLINK, target=os.readlink(name, dir_fd=fd))
                elif stat.S_ISREG(found.st_mode):
                    yield path, Shown(EntryType.FILE, size=found.st_size)
                elif stat.S_ISDIR(found.st_mode):
                    yield path, Shown(EntryType.DIR)
                    if path in self._directories:
                        yield from self._walk(path)
                else:
                    yield path, Shown(None)
        finally:
            os.close(fd)

    def _stored_inodes(self) -> Mapping[str, tuple[int, int]]:
        """Path -> inode of its stored object, of those that are there."""
        by_parent: dict[str, dict[str, str]] = defaultdict(dict)
        for entry in self._manifest.entries:
            if entry.type is EntryType.FILE:
                parent, name = split_key(full_key(self._run, entry.key))
                by_parent[parent][entry.path] = name
        inodes: dict[str, tuple[int, int]] = {}
        for parent, names in by_parent.items():
            try:
                with self._root.directory(parent) as fd:
                    for path, name in names.items():
                        found = _stat(name, fd)
                        if found is not None:
                            inodes[path] = (found.st_dev, found.st_ino)
            except (FileNotFoundError, NotADirectoryError):
                continue
        return inodes

    def _digest(self, path: str) -> str:
        fd = os.open(path, _FILE, dir_fd=self._top)
        try:
            hasher = blake3.blake3()
            offset = 0
            while piece := os.pread(fd, _PIECE_BYTES, offset):
                hasher.update(piece)
                offset += len(piece)
            return hasher.hexdigest()
        finally:
            os.close(fd)


def _stat(name: str, dir_fd: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
