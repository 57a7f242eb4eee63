"""The committed state under its own name: one rename of a complete tree, and pointers.

Every step may be repeated, by anyone, after a crash at any point: what is done is read from the
directory itself (`.ckptgate/manifest.json` names the attempt that it shows). NFS has no exchange of
two names, so an older attempt is renamed away first; raw readers may see the gap. Any thread and
any number of processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import msgspec

from ckptgate.errors import CkptError, IntegrityError, TransientStoreError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES, Manifest, PointerKind, PointerValue
from ckptgate.model.ids import check_attempt_id, check_checkpoint_name, check_name
from ckptgate.model.layout import GATEWAY_DIR, attempt_prefix, join_key
from ckptgate.ports.store import always
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.audit import audit_tree
from ckptgate_adapters.posix_store.data import read_range
from ckptgate_adapters.posix_store.failures import translate, translated
from ckptgate_adapters.posix_store.root import (
    StoreRoot,
    discard,
    fsync_directory,
    new_temp,
    split_key,
)
from ckptgate_adapters.posix_store.tree import MANIFEST_NAME, build_tree, remove_tree

__all__ = ["PosixPublication", "remove_moved", "shown_attempt"]

_SWAP_TRIES: Final = 16
_LOCK_WAIT_S: Final = 30.0
_LOCK_POLL_S: Final = 0.05
_POINTER_BYTES: Final = 64 * 1024
_BUILD: Final = "publish-"
_SWEPT: Final = "swept-"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TEXT: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_TAKEN: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})

_log = logging.getLogger(__name__)


class _Shown(msgspec.Struct):
    """What of a published manifest tells whose directory it is."""

    attempt: str


class PosixPublication:
    """`ports.store.Publication` on a directory."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root

    def publish(
        self,
        run: str,
        manifest: Manifest,
        manifest_bytes: bytes,
        *,
        is_due: Callable[[], bool] = always,
    ) -> None:
        """Make `run/<name>` show exactly *manifest*, replacing any earlier attempt's."""
        subject = join_key(run, manifest.name)
        with translated(subject, "publish"):
            if self._shown(run, manifest.name) != manifest.attempt:
                if not is_due():
                    return
                try:
                    self._build_and_swap(run, manifest, manifest_bytes, is_due)
                except OSError as exc:
                    # Another publisher may have finished and swept our tree away meanwhile.
                    if self._shown(run, manifest.name) != manifest.attempt:
                        raise _unknown(exc, subject) from exc
            with self._root.directory(run) as run_fd:
                fsync_directory(run_fd)
            self._sweep(run, manifest.attempt)

    def published_attempt(self, run: str, name: str) -> str:
        """The attempt that `run/<name>` shows now, or ""."""
        check_checkpoint_name(name)
        with translated(join_key(run, name), "look at"):
            return self._shown(run, name)

    def published_problems(self, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
        """How `run/<name>` differs from what *manifest* says, one line each."""
        with translated(join_key(run, manifest.name), "check"):
            return audit_tree(self._root, run, manifest, manifest_bytes)

    def unpublish(self, run: str, name: str, attempt: str) -> None:
        """Hide `run/<name>` if it shows *attempt*; the bytes stay."""
        check_attempt_id(attempt)
        with translated(join_key(run, name), "unpublish"):
            if self._shown(run, check_checkpoint_name(name)) == attempt:
                self._move_away(run, name, attempt_prefix(run, attempt), "retired-")

    def set_pointer(self, run: str, value: PointerValue) -> None:
        """Make `run/<pointer>` be *value*, atomically for readers."""
        key = join_key(run, check_name(value.pointer))
        with translated(key, "set pointer"):
            if self._pointer(key) != (value.kind, value.content):
                try:
                    self._replace_pointer(run, value)
                except OSError:
                    # A lost reply of rename looks like a failure: what is there now decides.
                    if self._pointer(key) != (value.kind, value.content):
                        raise
            with self._root.directory(run) as run_fd:
                fsync_directory(run_fd)

    def remove_pointer(self, run: str, pointer: str) -> None:
        """Remove the pointer if it is there."""
        key = join_key(run, check_name(pointer))
        with (
            translated(key, "remove pointer"),
            contextlib.suppress(FileNotFoundError),
            self._root.directory(run) as run_fd,
        ):
            syscalls.unlink(pointer, dir_fd=run_fd)
            fsync_directory(run_fd)

    def pointer_content(self, run: str, pointer: str) -> str | None:
        """The symlink's target or the text now under that name, None if there is none."""
        key = join_key(run, check_name(pointer))
        with translated(key, "read pointer"):
            found = self._pointer(key)
        return found[1] if found else None

    @contextmanager
    def lock_run(self, run: str) -> Generator[None]:
        """One publisher of this run at a time, where the file system has locks.

        After half a minute it goes on without: a lock server may be gone, and the log decides.
        """
        with self._locked(run, "publish.lock"):
            yield

    @contextmanager
    def _locked(self, run: str, name: str) -> Generator[None]:
        key = join_key(run, GATEWAY_DIR)
        with translated(key, "lock"), self._root.directory(key, make=True) as fd:
            lock = os.open(name, _LOCK, 0o644, dir_fd=fd)
        try:
            if not _try_lock(lock):
                _log.warning("lock-not-taken run=%s name=%s", run, name)
            yield
        finally:
            os.close(lock)

    def _shown(self, run: str, name: str) -> str:
        self._root.forget(run)
        return shown_attempt(self._root, join_key(run, name))

    def _build_and_swap(
        self, run: str, manifest: Manifest, manifest_bytes: bytes, is_due: Callable[[], bool]
    ) -> None:
        prefix = attempt_prefix(run, manifest.attempt)
        build = _BUILD + secrets.token_hex(4)
        with self._root.directory(prefix, make=True) as attempt_fd:
            try:
                syscalls.mkdir(build, 0o755, dir_fd=attempt_fd)
                top = os.open(build, _DIRECTORY, dir_fd=attempt_fd)
                try:
                    build_tree(self._root, run, manifest, manifest_bytes, top)
                    fsync_directory(attempt_fd)
                    self._swap(run, manifest, attempt_fd, build, is_due)
                finally:
                    os.close(top)
            finally:
                with contextlib.suppress(OSError):
                    remove_moved(build, attempt_fd)

    def _swap(
        self,
        run: str,
        manifest: Manifest,
        attempt_fd: int,
        build: str,
        is_due: Callable[[], bool],
    ) -> None:
        """Rename the built tree to its name; whatever else has the name is renamed away first."""
        if self._rename_in(run, manifest.name, attempt_fd, build):
            return
        # Who looks and then moves could move what another has just put there.
        with self._locked(run, "swap.lock"):
            for _ in range(_SWAP_TRIES):
                shown = self._shown(run, manifest.name)
                if shown == manifest.attempt or not is_due():
                    return
                self._make_room(run, manifest, shown)
                if self._rename_in(run, manifest.name, attempt_fd, build):
                    return
        msg = f"{manifest.name!r} is replaced by others all the time"
        raise TransientStoreError(msg, subject=join_key(run, manifest.name))

    def _rename_in(self, run: str, name: str, attempt_fd: int, build: str) -> bool:
        with self._root.directory(run) as run_fd:
            try:
                syscalls.rename(build, name, src_dir_fd=attempt_fd, dst_dir_fd=run_fd)
            except OSError as exc:
                if exc.errno in _TAKEN:
                    return False
                raise
            fsync_directory(attempt_fd)
            return True

    def _make_room(self, run: str, manifest: Manifest, shown: str) -> None:
        to = attempt_prefix(run, shown) if shown else join_key(run, GATEWAY_DIR, "displaced")
        prefix = "replaced-" if shown else f"{manifest.name}-"
        away = self._move_away(run, manifest.name, to, prefix)
        if self._shown(to, away) == manifest.attempt:
            # Without locks another publisher can be faster: what it had finished goes back.
            with self._root.directory(to) as to_fd, self._root.directory(run) as run_fd:
                try:
                    syscalls.rename(away, manifest.name, src_dir_fd=to_fd, dst_dir_fd=run_fd)
                except OSError:
                    remove_tree(away, dir_fd=to_fd)

    def _move_away(self, run: str, name: str, to: str, prefix: str) -> str:
        """Rename `run/<name>` to a fresh name in the directory *to*; nothing there is success.

        Returns the fresh name.
        """
        away = prefix + secrets.token_hex(4)
        with (
            self._root.directory(to, make=True) as to_fd,
            self._root.directory(run) as run_fd,
            contextlib.suppress(FileNotFoundError),
        ):
            syscalls.rename(name, away, src_dir_fd=run_fd, dst_dir_fd=to_fd)
            fsync_directory(to_fd)
            fsync_directory(run_fd)
            _log.info("moved-away run=%s name=%s to=%s/%s", run, name, to, away)
        return away

    def _sweep(self, run: str, attempt: str) -> None:
        """Remove trees that crashed publishers of this attempt left; its own is in place now.

        Others may be at the same: what can't be removed is left to the next publication.
        """
        key = attempt_prefix(run, attempt)
        try:
            with self._root.directory(key) as fd:
                for name in os.listdir(fd):
                    if name.startswith(_SWEPT):
                        remove_tree(name, dir_fd=fd)
                    elif name.startswith(_BUILD):
                        remove_moved(name, fd)
        except FileNotFoundError:
            return
        except OSError as exc:
            _log.warning("sweep-unfinished key=%s errno=%s", key, exc.errno)

    def _replace_pointer(self, run: str, value: PointerValue) -> None:
        key = join_key(run, value.pointer)
        with self._root.directory(run, make=True) as run_fd:
            if value.kind is PointerKind.TEXT:
                self._root.atomic_write(key, value.content.encode())
                return
            temp = new_temp()
            try:
                syscalls.symlink(value.content, temp, dir_fd=run_fd)
                syscalls.rename(temp, value.pointer, src_dir_fd=run_fd, dst_dir_fd=run_fd)
            finally:
                discard(temp, dir_fd=run_fd)

    def _pointer(self, key: str) -> tuple[PointerKind, str] | None:
        """Kind and content of what is under the pointer's name; None for nothing or no pointer."""
        self._root.forget(split_key(key)[0])
        try:
            return self._root.with_parent(key, _read_pointer)
        except (FileNotFoundError, NotADirectoryError):
            return None


def shown_attempt(root: StoreRoot, key: str) -> str:
    """The attempt that the directory *key* was published as, "" if it is none of ours."""
    manifest = join_key(key, GATEWAY_DIR, MANIFEST_NAME)
    try:
        data = root.with_file(manifest, lambda fd: read_range(fd, 0, MAX_DOCUMENT_BYTES))
        return check_attempt_id(msgspec.json.decode(data, type=_Shown).attempt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    except OSError as exc:
        is_known = isinstance(exc, CkptError) and not isinstance(exc, TransientStoreError)
        if exc.errno in _ABSENT or is_known:
            return ""
        raise


def _read_pointer(parent_fd: int, name: str) -> tuple[PointerKind, str] | None:
    mode = os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        return PointerKind.SYMLINK, os.readlink(name, dir_fd=parent_fd)
    if not stat.S_ISREG(mode):
        return None
    fd = os.open(name, _TEXT, dir_fd=parent_fd)
    try:
        data = read_range(fd, 0, _POINTER_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _POINTER_BYTES:
        msg = f"{name!r} is larger than {_POINTER_BYTES} bytes, so it is no pointer"
        raise IntegrityError(msg, subject=name)
    return PointerKind.TEXT, data.decode("utf-8", "surrogateescape")


def remove_moved(name: str, attempt_fd: int) -> None:
    """Remove a tree that wasn't needed, under another name.

    A slow publisher, or a rename whose reply was lost, must not put one in place that is half gone.
    """
    swept = _SWEPT + secrets.token_hex(4)
    with contextlib.suppress(FileNotFoundError):
        syscalls.rename(name, swept, src_dir_fd=attempt_fd, dst_dir_fd=attempt_fd)
        remove_tree(swept, dir_fd=attempt_fd)


def _unknown(exc: OSError, subject: str) -> OSError:
    """The error for a publication that isn't there: a tree that vanished was swept by another."""
    if isinstance(exc, FileNotFoundError):
        msg = f"cannot publish {subject!r}: others publish there too"
        return TransientStoreError(msg, subject=subject)
    return translate(exc, subject, "publish")


def _try_lock(fd: int) -> bool:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError as exc:
            _log.info("no-locks errno=%s", exc.errno)
            return False
        else:
            return True
