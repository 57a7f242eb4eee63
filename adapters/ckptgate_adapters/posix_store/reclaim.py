"""What a run's attempts have in the directory, and its removal: own names only, without symlinks.

An attempt's directory is walked by descriptors of its own directories, so that a symlink in it
leads nowhere. A tree is renamed to a name that only says that it goes, then removed: half of one is
never taken for a published directory. Any thread and any number of processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ckptgate.errors import RefusedError
from ckptgate.model.ids import check_attempt_id
from ckptgate.model.layout import (
    DATA_NAME,
    GATEWAY_DIR,
    TEMP_PREFIX,
    attempt_prefix,
    attempts_prefix,
    join_key,
    log_prefix,
)
from ckptgate.model.reclaim import Part, PartKind
from ckptgate.ports.store import Won, reclaim_each
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.failures import translated
from ckptgate_adapters.posix_store.publication import remove_moved, shown_attempt
from ckptgate_adapters.posix_store.root import StoreRoot, fsync_directory, split_key

__all__ = ["PosixReclaim"]

_BLOCK_BYTES: Final = 512
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_IN_USE: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, *_ABSENT})

_TEMP: Final = re.compile(re.escape(TEMP_PREFIX) + "[0-9a-f]{16}")
_SHOWN: Final = re.compile("(replaced|retired)-[0-9a-f]{8}")
_BUILT: Final = re.compile("(publish|swept)-[0-9a-f]{8}")
_MANIFEST: Final = re.compile(r"manifest-[0-9a-f]{64}\.json")
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_NUMBERED: Final = re.compile(r"[0-9]+\.json")
_MEMBER: Final = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{8}")
_MEMBER_FILE: Final = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{8}\.json")

_FLAT: Final = (
    ("chunks", _DIGEST, PartKind.CHUNKS),
    ("members", _MEMBER_FILE, PartKind.MEMBER),
    ("movers", _MEMBER_FILE, PartKind.NAME_OP),
)
_BY_MEMBER: Final = (
    ("data", DATA_NAME, PartKind.DATA),
    ("names", _NUMBERED, PartKind.NAME_OP),
    ("votes", _NUMBERED, PartKind.VOTE),
)


class PosixReclaim:
    """`ports.store.Reclamation` on a directory."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root

    def attempt_parts(self, run: str, attempt: str) -> list[Part]:
        """All that the store has of an attempt, but its intent."""
        prefix = attempt_prefix(run, check_attempt_id(attempt))
        below = attempt_prefix("", attempt)
        with translated(prefix, "list"):
            try:
                with self._root.directory(prefix) as top:
                    return [*_files(top, below), *self._trees(top, run, below, attempt)]
            except OSError as exc:
                if exc.errno in _ABSENT:
                    return []
                raise

    def unfinished(self, directory: str) -> list[Part]:
        """Unfinished writes in a plain directory, and in the gateway's own if it is a run."""
        own = [join_key(GATEWAY_DIR), log_prefix(""), attempts_prefix("")]
        found: list[Part] = []
        for below in ("", *own):
            key = join_key(directory, below)
            with translated(key, "list"):
                try:
                    with self._root.directory(key) as top:
                        found += _matching(top, below, _TEMP, PartKind.UNFINISHED)
                except OSError as exc:
                    if exc.errno not in _ABSENT:
                        raise
        return found

    def reclaim(self, run: str, part: Part) -> int:
        """Remove it for good; the bytes that this won."""
        _check_own(part)
        parent, name = split_key(join_key(run, part.key))
        with translated(join_key(run, part.key), "remove"):
            try:
                with self._root.directory(parent) as top:
                    if part.kind is PartKind.TREE:
                        won = _tree_size(name, top)
                        remove_moved(name, top)
                    else:
                        won = _unlink(name, top)
                    fsync_directory(top)
                    return won
            except OSError as exc:
                if exc.errno in _ABSENT:
                    return 0
                raise

    def reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        """`reclaim` each."""
        return reclaim_each(self, run, parts)

    def tidy(self, run: str, attempt: str) -> None:
        """Remove directories of the attempt that are empty now."""
        prefix = attempt_prefix(run, check_attempt_id(attempt))
        with (
            translated(prefix, "tidy"),
            contextlib.suppress(FileNotFoundError),
            self._root.directory(prefix) as top,
        ):
            for name, _, _ in _BY_MEMBER:
                with _inside(name, top) as fd:
                    if fd is not None:
                        for member in _names(fd, _MEMBER, stat.S_ISDIR):
                            _rmdir(member, fd)
                _rmdir(name, top)
            for name, _, _ in _FLAT:
                _rmdir(name, top)

    def _trees(self, top: int, run: str, below: str, attempt: str) -> Iterator[Part]:
        for name in _names(top, None, stat.S_ISDIR):
            is_shown = _SHOWN.fullmatch(name) is not None
            if not is_shown and not _BUILT.fullmatch(name):
                continue
            # One that was shown tells whose it was; anybody's directory may be called so.
            if is_shown and shown_attempt(self._root, join_key(run, below, name)) != attempt:
                continue
            yield Part(key=join_key(below, name), kind=PartKind.TREE, size=_tree_size(name, top))


def _files(top: int, below: str) -> Iterator[Part]:
    yield from _matching(top, below, _TEMP, PartKind.UNFINISHED)
    yield from _matching(top, below, _MANIFEST, PartKind.MANIFEST)
    for name, pattern, kind in _FLAT:
        with _inside(name, top) as fd:
            if fd is not None:
                yield from _both(fd, join_key(below, name), pattern, kind)
    for name, pattern, kind in _BY_MEMBER:
        with _inside(name, top) as fd:
            if fd is None:
                continue
            for member in _names(fd, _MEMBER, stat.S_ISDIR):
                with _inside(member, fd) as own:
                    if own is not None:
                        yield from _both(own, join_key(below, name, member), pattern, kind)


def _both(fd: int, below: str, pattern: re.Pattern[str], kind: PartKind) -> Iterator[Part]:
    yield from _matching(fd, below, pattern, kind)
    yield from _matching(fd, below, _TEMP, PartKind.UNFINISHED)


def _matching(fd: int, below: str, pattern: re.Pattern[str], kind: PartKind) -> Iterator[Part]:
    """The regular files in a directory whose names match."""
    with os.scandir(fd) as found:
        entries = [entry for entry in found if pattern.fullmatch(entry.name)]
    for entry in entries:
        try:
            seen = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(seen.st_mode):
            yield Part(
                key=join_key(below, entry.name),
                kind=kind,
                size=seen.st_blocks * _BLOCK_BYTES,
                stamp=f"{seen.st_size}-{seen.st_mtime_ns}",
            )


def _names(fd: int, pattern: re.Pattern[str] | None, is_kind: Callable[[int], bool]) -> list[str]:
    with os.scandir(fd) as found:
        return sorted(
            entry.name
            for entry in found
            if (pattern is None or pattern.fullmatch(entry.name))
            and is_kind(entry.stat(follow_symlinks=False).st_mode)
        )


@contextmanager
def _inside(name: str, dir_fd: int) -> Generator[int | None]:
    """The directory *name*, open; None if it is none, or a symlink."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno not in _ABSENT:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _tree_size(name: str, dir_fd: int) -> int:
    """Bytes of the files below that have no other name."""
    total = 0
    with _inside(name, dir_fd) as fd:
        if fd is None:
            return 0
        for child in os.listdir(fd):
            try:
                seen = os.stat(child, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(seen.st_mode):
                total += _tree_size(child, fd)
            elif stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1:
                total += seen.st_blocks * _BLOCK_BYTES
    return total


def _unlink(name: str, dir_fd: int) -> int:
    seen = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if not stat.S_ISREG(seen.st_mode):
        return 0
    syscalls.unlink(name, dir_fd=dir_fd)
    return seen.st_blocks * _BLOCK_BYTES if seen.st_nlink == 1 else 0


def _rmdir(name: str, dir_fd: int) -> None:
    """Remove an empty directory; anything else stays."""
    try:
        syscalls.rmdir(name, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno not in _IN_USE:
            raise


def _check_own(part: Part) -> None:
    """Refuse what `attempt_parts` and `unfinished` never list."""
    parts = part.key.split("/")
    is_attempts = parts[:2] == attempts_prefix("").split("/") and len(parts) > 3
    is_temp = _TEMP.fullmatch(parts[-1]) is not None
    if is_temp if part.kind is PartKind.UNFINISHED else is_attempts and not is_temp:
        return
    msg = f"{part.key!r} is not the gateway's to remove"
    raise RefusedError(msg, subject=part.key)
