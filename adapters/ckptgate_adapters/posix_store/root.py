"""The store's root directory: how keys become open directories, fresh and without symlinks.

Every key is checked, then walked component by component below the root with O_NOFOLLOW, so that
no key and no planted symlink leads outside. On NFS a client caches names for a minute; opening the
parent directory makes what is looked up in it fresh, therefore every access opens it again.
`StoreRoot.atomic_write` is the one way to replace a small file. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, TypeVar

from ckptgate.errors import MisplacedError, TransientStoreError
from ckptgate.model.ids import check_relative_path
from ckptgate.model.layout import GATEWAY_DIR, TEMP_PREFIX
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.mounts import Mount, mount_of

__all__ = ["TEMP_PREFIX", "StoreRoot", "fsync_directory", "is_temp", "new_temp", "split_key"]

_WALK: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STALE_TRIES: Final = 3

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def new_temp() -> str:
    """A name for an unfinished write that nobody else has."""
    return TEMP_PREFIX + secrets.token_hex(8)


def is_temp(name: str) -> bool:
    """Whether *name* is that of an unfinished write."""
    return name.startswith(TEMP_PREFIX)


def split_key(key: str) -> tuple[str, str]:
    """Parent ("" for the root) and name of a checked *key*."""
    parent, _, name = check_relative_path(key).rpartition("/")
    return parent, name


def fsync_directory(fd: int) -> None:
    """Make the names in a directory durable, where the file system can say so."""
    try:
        syscalls.fsync(fd)
    except OSError as exc:
        if exc.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise


class StoreRoot:
    """The directory below which a store lies. Any thread."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, Mount] | None = None

    @property
    def mount(self) -> Mount:
        """The file system it is on."""
        with self._lock:
            seen = self._seen
        return seen[1] if seen else mount_of(self.path)

    def absolute(self, key: str) -> str:
        """The local path of *key*, for messages and for other programs."""
        return os.path.join(self.path, key) if key else self.path

    @contextmanager
    def directory(self, key: str, *, make: bool = False) -> Generator[int]:
        """The directory *key* ("" is the root), open and fresh; made with its parents if asked.

        Raises:
            FileNotFoundError: it isn't there; NotADirectoryError: a component is a file or symlink.
            TransientStoreError: the root itself is not there, or another file system is.
        """
        fd = self._open(check_relative_path(key).split("/") if key else [], make=make)
        try:
            yield fd
        finally:
            os.close(fd)

    def with_parent(self, key: str, use: Callable[[int, str], _T]) -> _T:
        """What *use* returns for the open parent directory and the name of *key*, fresh.

        Another client may replace what has the name meanwhile: a stale handle is looked up again.
        """
        parent, name = split_key(key)
        for tries_left in reversed(range(_STALE_TRIES)):
            try:
                with self.directory(parent) as parent_fd:
                    try:
                        return use(parent_fd, name)
                    except FileNotFoundError:
                        if not self.mount.is_nfs3:
                            raise
                        _refresh(parent_fd, is_ours=GATEWAY_DIR in key.split("/"))
                        return use(parent_fd, name)
            except OSError as exc:
                if exc.errno != errno.ESTALE or not tries_left:
                    raise
        raise AssertionError("unreachable")

    def with_file(self, key: str, use: Callable[[int], _T]) -> _T:
        """What *use* returns for the file *key*, opened for reading and fresh."""

        def read(parent_fd: int, name: str) -> _T:
            fd = _open_regular(parent_fd, name)
            try:
                return use(fd)
            finally:
                os.close(fd)

        return self.with_parent(key, read)

    def names(self, key: str) -> list[str]:
        """All names in a directory, fresh."""
        with self.directory(key) as fd:
            if self.mount.is_nfs3:
                _refresh(fd, is_ours=GATEWAY_DIR in key.split("/"))
            return os.listdir(fd)

    def forget(self, key: str) -> None:
        """Have an NFSv3 client drop what it knows of a directory; others ask by themselves."""
        if self.mount.is_nfs3:
            with contextlib.suppress(OSError), self.directory(key) as fd:
                _refresh(fd, is_ours=True)

    def atomic_write(self, key: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace the file *key* by one with *data*, durably; its directory must be there."""
        parent, name = split_key(key)
        with self.directory(parent) as parent_fd:
            temp = new_temp()
            try:
                write_file(temp, data, dir_fd=parent_fd, mode=mode)
                syscalls.rename(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            finally:
                discard(temp, dir_fd=parent_fd)
            fsync_directory(parent_fd)

    def _open(self, parts: list[str], *, make: bool) -> int:
        # Directories below `.ckptgate/` are never renamed, so the client's cached names of them
        # will do if it has any; only the last is asked for.
        if GATEWAY_DIR in parts[:-1]:
            with contextlib.suppress(FileNotFoundError):
                return self._walk(parts, _WALK, make=False)
        for tries_left in reversed(range(_STALE_TRIES)):
            try:
                return self._walk(parts, _OPEN, make=make)
            except OSError as exc:
                if exc.errno != errno.ESTALE or not tries_left:
                    raise
        raise AssertionError("unreachable")

    def _walk(self, parts: list[str], flags: int, *, make: bool) -> int:
        """Open one component after the other: with `_OPEN` the server is asked for each."""
        fd = self._open_root(flags)
        for index, part in enumerate(parts):
            parent = fd
            try:
                if index == len(parts) - 1:
                    flags = _OPEN
                fd = self._step(parent, part, flags, make=make)
            finally:
                os.close(parent)
        return fd

    def _step(self, parent: int, part: str, flags: int, *, make: bool) -> int:
        try:
            return os.open(part, flags, dir_fd=parent)
        except FileNotFoundError:
            if make:
                with contextlib.suppress(FileExistsError):
                    syscalls.mkdir(part, dir_fd=parent)
                    fsync_directory(parent)
            elif not self.mount.is_nfs3:
                raise
            if self.mount.is_nfs3:
                _refresh(parent, is_ours=False)
            return os.open(part, flags, dir_fd=parent)

    def _open_root(self, flags: int) -> int:
        try:
            fd = os.open(self.path, flags & ~os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as exc:
            # Not `MissingError`: that would read as "nothing was ever stored".
            msg = f"the store's root is not there: {self.path!r}"
            raise TransientStoreError(msg, subject=self.path, hint="mount the store") from exc
        try:
            self._check_mount(os.fstat(fd).st_dev)
        except BaseException:
            # An interrupt, too, must not keep the descriptor.
            os.close(fd)
            raise
        return fd

    def _check_mount(self, device: int) -> None:
        """Refuse the empty directory that an unmounted store leaves behind."""
        with self._lock:
            if self._seen and self._seen[0] == device:
                return
            now = mount_of(self.path)
            if self._seen and self._seen[1].identity != now.identity:
                was = self._seen[1]
                msg = (
                    f"the store's root {self.path!r} is on {now.type} {now.source!r}, "
                    f"it was on {was.type} {was.source!r}"
                )
                raise TransientStoreError(msg, subject=self.path, hint="mount the store again")
            self._seen = (device, now)


def _open_regular(parent_fd: int, name: str) -> int:
    fd = os.open(name, _READ, dir_fd=parent_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        msg = f"not a regular file: {name!r}"
        raise MisplacedError(msg, subject=name, hint="ls -l; move it away")
    return fd


def write_file(name: str, data: bytes, *, dir_fd: int, mode: int = 0o644) -> None:
    """Write a new file and make its bytes durable (not yet its name)."""
    fd = syscalls.create_file(name, dir_fd=dir_fd, mode=mode)
    try:
        syscalls.write(fd, data)
        syscalls.fsync(fd)
    except BaseException:
        # An interrupt, too, must not keep the descriptor.
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    syscalls.close_written(fd)


def discard(name: str, *, dir_fd: int) -> None:
    """Remove what is left of an unfinished write; a failure only leaves a hidden name."""
    try:
        syscalls.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as exc:
        _log.warning("temp-left name=%s errno=%s", name, exc.errno)


def _refresh(directory: int, *, is_ours: bool) -> None:
    """Have an NFSv3 client ask the server again for a directory's names.

    Reading the directory does it, opening doesn't. But to such a client two changes within one tick
    of the server's clock look like one, possibly for ever: only a change of its own makes it drop
    what it knows. That is for our directories alone; users see theirs change.
    """
    with contextlib.suppress(OSError):
        if is_ours:
            name = new_temp()
            os.close(syscalls.create_file(name, dir_fd=directory))
            discard(name, dir_fd=directory)
        # A descriptor of O_PATH can't be read; the caller looks again with a real one.
        with os.scandir(directory) as names:
            next(names, None)
