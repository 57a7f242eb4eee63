"""A committed checkpoint as a plain directory: its files under their own names, each verified.

It owns the rules that a destination is there whole or not at all, and that nothing which lies there
is replaced unless that was asked for. The tree is built beside the destination, under a name that
the next try finds again: what of it is right already isn't read anew. Any thread; one export to a
destination at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Generator, Iterable
from typing import Final

import blake3

from ckptgate.engine.disk import write_at
from ckptgate.engine.each_file import for_each_file
from ckptgate.engine.manifests import DIGEST_BYTES, entry_chunks
from ckptgate.engine.ranges import Ranges
from ckptgate.errors import (
    BusyError,
    CkptError,
    FullError,
    IntegrityError,
    RefusedError,
    UnusableError,
)
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.layout import GATEWAY_DIR, full_key
from ckptgate.ports.export import Exported
from ckptgate.ports.store import Store

__all__ = ["check_destination", "export_directory", "fetch_file", "unfinished_name"]

_READ_BYTES: Final = 4 * 1024 * 1024
_DIR_MODE_MIN: Final = 0o700
"""While the tree is built it must be writable."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def unfinished_name(destination: str) -> str:
    """Where the tree is built: beside the destination, hidden, the same at each try."""
    head, name = os.path.split(destination)
    return os.path.join(head, f".{name}.ckptgate-export")


def check_destination(destination: str, *, may_replace: bool) -> None:
    """Refuse a place that holds something.

    Raises:
        RefusedError: it does, and nobody said that it may be replaced; or it is ckptgate's.
        UnusableError: it can't be looked at.
    """
    try:
        is_free = not os.path.lexists(destination) or (
            os.path.isdir(destination)
            and not os.path.islink(destination)
            and not os.listdir(destination)
        )
    except OSError as exc:
        msg = f"cannot look at {destination}: {exc.strerror}"
        raise UnusableError(msg, subject=destination) from exc
    if not is_free and not may_replace:
        msg = f"{destination} is there and not empty"
        hint = "name another one, or --overwrite to replace all of it"
        raise RefusedError(msg, subject=destination, hint=hint)
    _refuse_managed(destination)


def _refuse_managed(destination: str) -> None:
    """Refuse a place that is in a published checkpoint, or that holds anything of ckptgate's.

    Nobody who says that all of it may be replaced means a store.
    """
    inside = [
        above
        for above in (destination, *_above(destination))
        if os.path.lexists(os.path.join(above, GATEWAY_DIR, "manifest.json"))
    ]
    holding = [root for root, dirs, files in os.walk(destination) if GATEWAY_DIR in [*dirs, *files]]
    for found in (*inside, *holding):
        msg = f"{destination} is no place for an export: {found} is ckptgate's"
        raise RefusedError(msg, subject=destination, hint="name a directory outside of stores")


def _above(path: str) -> list[str]:
    """The directories above *path*, which is absolute, the nearest first."""
    found: list[str] = []
    while (parent := os.path.dirname(path)) != path:
        found.append(parent)
        path = parent
    return found


def export_directory(
    store: Store, run: str, manifest: Manifest, destination: str, *, may_replace: bool
) -> Exported:
    """Make *destination* (absolute) a directory with exactly the checkpoint's entries.

    On an error nothing is at the destination but what was there before; what was brought so far
    stays beside it for the next try.

    Args:
        store: where the bytes are.
        run: the run's path.
        manifest: of the checkpoint.
        destination: is made; its parent must be there.
        may_replace: what is there may go.

    Raises:
        RefusedError: something is there.
        BusyError: another export to it is under way.
        IntegrityError, MissingError: stored bytes are not what the manifest says.
        FullError, UnusableError, TransientStoreError: of the disk; of the store.
    """
    check_destination(destination, may_replace=may_replace)
    building = unfinished_name(destination)
    with _translated(destination), _locked(building):
        report = _build(store, run, manifest, building)
        check_destination(destination, may_replace=may_replace)
        _put_in_place(building, destination)
    return report


def _build(store: Store, run: str, manifest: Manifest, building: str) -> Exported:
    entries = manifest.entries
    _remove_others(building, {entry.path: entry for entry in entries})
    for entry in entries:
        parent = os.path.dirname(os.path.join(building, entry.path))
        os.makedirs(parent, exist_ok=True)
        if entry.type is EntryType.DIR:
            os.makedirs(os.path.join(building, entry.path), exist_ok=True)
        elif entry.type is EntryType.SYMLINK:
            _link(os.path.join(building, entry.path), entry.target)
    files = [entry for entry in entries if entry.type is EntryType.FILE]
    ranges = Ranges(store)

    def bring(entry: FileEntry) -> bool:
        return _bring(ranges, store, run, entry, os.path.join(building, entry.path))

    kept = sum(for_each_file(files, bring))
    _finish_directories(building, entries)
    return Exported(files=len(files), size_bytes=sum(entry.size for entry in files), kept=kept)


def _remove_others(building: str, wanted: dict[str, FileEntry]) -> None:
    """What an earlier try of another attempt left."""
    above = {os.path.dirname(path) for path in wanted}
    for root, dirs, files in os.walk(building):
        inside = os.path.relpath(root, building)
        for name in [*dirs, *files]:
            path = os.path.normpath(os.path.join(inside, name))
            full = os.path.join(building, path)
            entry = wanted.get(path)
            is_dir = os.path.isdir(full) and not os.path.islink(full)
            may_stay = entry is not None and (entry.type is EntryType.DIR) == is_dir
            if may_stay or (is_dir and _is_above(path, above)):
                continue
            if is_dir:
                shutil.rmtree(full)
                dirs.remove(name)
            else:
                os.unlink(full)


def _is_above(path: str, parents: Iterable[str]) -> bool:
    return any((parent + "/").startswith(path + "/") for parent in parents)


def _link(path: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.symlink(target, path)


def _bring(ranges: Ranges, store: Store, run: str, entry: FileEntry, path: str) -> bool:
    """Have one file at the local *path*, verified; whether it was there already.

    Raises:
        IntegrityError, MissingError, TransientStoreError: of the store.
        OSError: of the disk.
    """
    if os.path.islink(path):
        os.unlink(path)
    is_there = os.path.exists(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        is_kept = is_there and _is_file(fd, entry)
        if not is_kept:
            os.ftruncate(fd, 0)
            fetch_file(ranges, store, run, entry, fd)
        os.fchmod(fd, entry.mode & 0o7777)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        os.fsync(fd)
        return is_kept
    finally:
        os.close(fd)


def fetch_file(ranges: Ranges, store: Store, run: str, entry: FileEntry, fd: int) -> None:
    """Write the bytes of *entry* to what is open, and empty, as *fd*, and compare their digests.

    Raises:
        IntegrityError, MissingError, TransientStoreError: of the store.
        OSError: of the disk.
    """
    key = full_key(run, entry.key)
    # Of nothing there is no chunk, but a digest.
    chunks = entry_chunks(store, run, entry) or bytes.fromhex(entry.digest)
    starts = range(0, max(entry.size, 1), CHUNK_BYTES)
    spans = [(at, min(CHUNK_BYTES, entry.size - at)) for at in starts]

    def keep(offset: int, view: memoryview) -> None:
        write_at(fd, view, offset)

    with contextlib.closing(ranges.digests(key, spans, keep)) as digests:
        for index, found in enumerate(digests):
            wanted = chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if found != wanted:
                what = f"chunk {index} of {key}" if entry.chunks else key
                msg = f"{entry.path}: {what} has digest {found.hex()}, not {wanted.hex()}"
                raise IntegrityError(msg, subject=key, hint="ckptgate verify")


def _is_file(fd: int, entry: FileEntry) -> bool:
    """Whether an earlier try has brought it."""
    if os.fstat(fd).st_size != entry.size:
        return False
    hasher = blake3.blake3()
    offset = 0
    while data := os.pread(fd, _READ_BYTES, offset):
        hasher.update(data)
        offset += len(data)
    return hasher.hexdigest() == entry.digest


def _finish_directories(building: str, entries: Iterable[FileEntry]) -> None:
    """Modes and times of directories, the deepest first; all of them durable."""
    known = {entry.path: entry for entry in entries if entry.type is EntryType.DIR}
    for root, _, _ in os.walk(building, topdown=False):
        entry = known.get(os.path.relpath(root, building))
        if entry is not None:
            os.chmod(root, (entry.mode & 0o7777) | _DIR_MODE_MIN)
            os.utime(root, ns=(entry.mtime_ns, entry.mtime_ns))
        _fsync_directory(root)


def _put_in_place(building: str, destination: str) -> None:
    """Rename it to its name; what is there goes, which was asked for."""
    aside = f"{building}.replaced"
    if os.path.lexists(destination):
        if os.path.isdir(destination) and not os.path.islink(destination):
            _remove(aside)
            os.rename(destination, aside)
        else:
            os.unlink(destination)
    os.rename(building, destination)
    _fsync_directory(os.path.dirname(destination))
    _remove(aside)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _fsync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(building: str) -> Generator[None]:
    """Hold the directory that is built, made if it is missing."""
    os.makedirs(building, mode=0o755, exist_ok=True)
    fd = os.open(building, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(fd)
        msg = f"another export is building {building}"
        raise BusyError(msg, subject=building, hint="wait for it") from exc
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translated(destination: str) -> Generator[None]:
    """Errors of the local disk as ours; those of the store are already."""
    try:
        yield
    except CkptError:
        raise
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            msg = f"no space for {destination}"
            raise FullError(msg, subject=destination, hint="call again with room") from exc
        msg = f"cannot write {destination}: {exc.strerror or exc}"
        raise UnusableError(msg, subject=destination) from exc
