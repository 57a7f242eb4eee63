"""Who runs a spool, and which process does what in it: exclusive flock(2)s, and who has them.

A lock belongs to the open file description: it ends when its holder dies, however it dies. With
*is_inheritable* it lives until also the last child that got the descriptor is gone. Whoever is
given the descriptor by its holder has the same lock (`adopt`), so it passes over and is never free.

Thread rule: one thread at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, cast

from ckptgate.errors import BusyError, UnusableError
from ckptgate_adapters.sqlite_spool.failures import from_os

__all__ = ["LOCK_FILE", "SpoolLock"]

_log = logging.getLogger(__name__)

LOCK_FILE: Final = "lock"
_HOLDER_BYTES_MAX: Final = 4096
_HOLDER_BYTES: Final = 1024
"""At least, with blanks: so a new text covers an old one."""
_LOOK_S: Final = 0.002
_LOOKERS_S: Final = 1.0
"""Who looks for the holder has the lock for a moment: so long somebody may always look."""
_KILLED_S: Final = 30.0
"""How long a killed holder may take to be gone: the kernel may hold it in a call on a dead disk."""


class SpoolLock:
    """The exclusive right to run the spool *path*; a context manager.

    Args:
        path: the spool's directory.
        mountpoint: where its holder mounts it, told to whoever comes second.
        name: of the lock's file: the spool's own, or that of one process's work in it.
        is_inheritable: children that are started with the descriptor `fd` hold the lock, too.
    """

    def __init__(
        self,
        path: str,
        *,
        mountpoint: str = "",
        name: str = LOCK_FILE,
        is_inheritable: bool = False,
    ) -> None:
        self._path: Final = os.path.join(path, name)
        self._spool: Final = path
        self._mountpoint: Final = mountpoint
        self._is_inheritable: Final = is_inheritable
        self._fd = -1

    @property
    def fd(self) -> int:
        """The descriptor that holds the lock, -1 while it isn't held."""
        return self._fd

    def acquire(self) -> None:
        """Take the lock, without waiting. Taking it twice is a success.

        Raises:
            BusyError: another one has it; the message says who.
            UnusableError: the spool is missing or can't be written.
            FullError: no space for the lock file.
        """
        if self._fd >= 0:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise from_os(exc, self._path, "lock the spool") from exc
        try:
            self._lock(fd)
            self._write_holder(fd)
            os.set_inheritable(fd, self._is_inheritable)
        except BlockingIOError as exc:
            os.close(fd)
            raise self._busy() from exc
        except OSError as exc:
            os.close(fd)
            raise from_os(exc, self._path, "lock the spool") from exc
        self._fd = fd

    def _lock(self, fd: int) -> None:
        """Lock it; BlockingIOError if another one has it, and does more than look (`holder`)."""
        until = time.monotonic() + _LOOKERS_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.holder() is not None or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)
            else:
                return

    def adopt(self, fd: int) -> None:
        """Have the lock that *fd* holds, which its present holder gave; it is closed in the end.

        Nothing says yet that this process has it (`declare`).

        Raises:
            UnusableError: *fd* is no descriptor of this lock.
            BusyError: it doesn't hold the lock, and another one does.
        """
        try:
            there, given = os.stat(self._path), os.fstat(fd)
            if (there.st_dev, there.st_ino) != (given.st_dev, given.st_ino):
                msg = f"what was handed over is not the lock of the spool {self._spool}"
                raise UnusableError(msg, subject=self._spool)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise self._busy() from exc
        except UnusableError:
            raise
        except OSError as exc:
            raise from_os(exc, self._path, "take the spool's lock over") from exc
        self._fd = fd

    def declare(self) -> None:
        """Say that this process has the lock."""
        self._write_holder(self._fd)

    def acquire_from(self, number: signal.Signals, *, patience_s: float) -> None:
        """Take the lock; whoever has it is told to end, and killed if it doesn't.

        Args:
            number: the signal that tells it.
            patience_s: how long it may take.

        Raises:
            BusyError: even killed it doesn't go.
            UnusableError, FullError: as `acquire`.
        """
        told, until = 0, 0.0
        while True:
            try:
                self.acquire()
            except BusyError:
                pid = int((self.holder() or {}).get("pid", 0))
                now = time.monotonic()
                if pid and pid != told:
                    told, until = pid, now + patience_s
                    self._signal(pid, number)
                elif told and now > until + _KILLED_S:
                    raise
                elif told and now > until:
                    self._signal(pid, signal.SIGKILL)
                time.sleep(_LOOK_S)
            else:
                return

    def _signal(self, pid: int, number: signal.Signals) -> None:
        """Signal the holder *pid*, and nobody who has its number after it."""
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                if (self.holder() or {}).get("pid") == pid:
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)

    def leave(self) -> None:
        """Close it without an end of the lock, which another one has adopted."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would let two hold 'the' lock."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        if not self._is_inheritable:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
        os.close(fd)

    def holder(self) -> dict[str, Any] | None:
        """Who has the lock (`pid`, `host`, `since`, `mountpoint`), None if nobody has it.

        Empty if it is held by one that has not said yet who it is.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise from_os(exc, self._path, "read the spool's lock") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _decoded(os.pread(fd, _HOLDER_BYTES_MAX, 0))
        else:
            # A child that was forked meanwhile has the descriptor, too: its close alone is no end.
            fcntl.flock(fd, fcntl.LOCK_UN)
            return None
        finally:
            os.close(fd)

    def __enter__(self) -> SpoolLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _write_holder(self, fd: int) -> None:
        text = json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now(UTC)
                .isoformat(timespec="milliseconds")
                .replace("+00:00", "Z"),
                "mountpoint": self._mountpoint,
            }
        )
        data = text.encode().ljust(_HOLDER_BYTES - 1) + b"\n"
        try:
            # Written over what is there: whoever reads meanwhile finds one holder or the other.
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
        except OSError as exc:
            # Holding the lock is what counts; on a full disk it must still be possible.
            _log.warning("lock-holder-not-written path=%s error=%s", self._path, exc)

    def _busy(self) -> BusyError:
        holder = self.holder() or {}
        pid, point = holder.get("pid"), holder.get("mountpoint")
        who = f"process {pid}" if pid else "another process"
        where = f", mounted on {point}" if point else ""
        since = f", since {holder['since']}" if "since" in holder else ""
        hint = f"ckptgate umount {point}" if point else "name another directory with --spool"
        msg = f"the spool {self._spool} is in use by {who}{where}{since}"
        return BusyError(msg, subject=self._spool, hint=hint)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
