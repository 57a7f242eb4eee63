"""The watch: a process that looks whether mount and spool answer, and tells its parent on stdout.

`python -m ckptgate.app.watch_process SPOOL MOUNTPOINT PARENT INTERVAL_S`. It looks through the
mount as anybody does (a call that the kernel never answers itself), and writes to and reads from
the spool's database. A look into a mount can wait for ever; so the supervisor, which has the
device, never makes one, and here each look has a thread that may be left behind.

Owns the rule what is alive: what answers, be it with an error. The store is told of, and counts for
nothing: it may be away for days. Each kind of look has one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ckptgate.app.mountpoints import is_mounted
from ckptgate.engine.backlog import Backlog, backlog
from ckptgate.errors import BusyError, CkptError
from ckptgate.ports.spool import CONTACT_META, Contact
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.sqlite_spool.failures import holder
from ckptgate_adapters.sqlite_spool.place import DATABASE_FILE

__all__ = ["Report", "main"]

_log = logging.getLogger(__name__)

WATCH_META: Final = "watch"
"""Setting that is written and read again, only to see whether that can be done."""
_PR_SET_PDEATHSIG: Final = 1
_FIRST_PAUSE_S: Final = 0.05
"""Until both answered once: somebody waits for the service to be ready."""
_PATIENCE_S: Final = 2.0
"""With another process that has the spool's write lock."""
_ANSWER_S: Final = 1.0
"""How long a report waits for looks that have just begun."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the watch saw; one JSON object a line.

    Attributes:
        mount_s, spool_s: for how long no look was answered, 0 after one that was.
        is_answered: whether both were answered since the watch began.
        problem: what they answered if it was an error, "" for none.
        holder: process that has had the spool's write lock for too long, 0 for none.
        store_s: since the store last answered; -1 where that is unknown.
        away_s: for how long the store has been known to be away; 0: it isn't.
        checkpoints, files, size_bytes, plain: what waits (`engine.backlog`).
    """

    mount_s: float = 0.0
    spool_s: float = 0.0
    is_answered: bool = False
    problem: str = ""
    holder: int = 0
    store_s: float = -1.0
    away_s: float = 0.0
    checkpoints: int = 0
    files: int = 0
    size_bytes: int = 0
    plain: int = 0


class _Look:
    """One kind of look, repeated; at most one is under way."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._answered_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._is_silent = False
        self.is_answered = False
        self.problem = ""

    def begin(self) -> None:
        """Look, unless the last one still waits."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Return when it is answered, or that time is over."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def unanswered_s(self) -> float:
        """For how long nothing was answered, 0 if the last look was."""
        is_waiting = self._thread is not None and self._thread.is_alive()
        if not is_waiting and self.is_answered and not self._is_silent:
            return 0.0
        return time.monotonic() - self._answered_s

    def _run(self) -> None:
        try:
            self._look()
        except BusyError as exc:
            # Somebody else stands in the way: that is no answer.
            self.problem, self._is_silent = str(exc), True
            return
        except OSError as exc:
            self.problem = str(exc)
            # Nobody serves the mount any more.
            self._is_silent = not isinstance(exc, CkptError)
            if self._is_silent:
                return
        else:
            self.problem = ""
        self._is_silent = False
        self.is_answered = True
        self._answered_s = time.monotonic()


class _Watch:
    """See the module."""

    def __init__(self, spool: str, mountpoint: str) -> None:
        self._path = spool
        self._mountpoint = mountpoint
        self._spool: SqliteSpool | None = None
        self._backlog = Backlog(checkpoints=0, files=0, size_bytes=0, plain=0)
        self._contact = Contact()
        self.mount = _Look(self._look_through)
        self.spool = _Look(self._write_and_read)

    def _look_through(self) -> None:
        if not is_mounted(self._mountpoint):
            raise OSError(errno.ENOTCONN, "nothing is mounted", self._mountpoint)
        # Answered by the process, not by the kernel's caches; never with the store's help.
        os.statvfs(self._mountpoint)
        os.stat(self._mountpoint)

    def _write_and_read(self) -> None:
        if self._spool is None:
            self._spool = SqliteSpool.attach(self._path)
        spool, value = self._spool, str(time.time_ns())
        with spool.patience(_PATIENCE_S):
            spool.set_meta(WATCH_META, value)
        self._backlog = backlog(spool)
        self._contact = Contact.parse(spool.get_meta(CONTACT_META))

    def report(self) -> Report:
        """Look at both, and say what was seen."""
        for look in (self.mount, self.spool):
            look.begin()
        for look in (self.mount, self.spool):
            look.wait(_ANSWER_S)
        now_ns, known, waiting = time.time_ns(), self._contact, self._backlog
        spool_s = self.spool.unanswered_s()
        return Report(
            mount_s=self.mount.unanswered_s(),
            spool_s=spool_s,
            is_answered=self.mount.is_answered and self.spool.is_answered,
            problem="; ".join(filter(None, (self.mount.problem, self.spool.problem))),
            holder=self._holder() if spool_s else 0,
            store_s=(now_ns - known.answered_ns) / 1e9 if known.answered_ns else -1.0,
            away_s=max(0.0, (now_ns - known.away_ns) / 1e9) if known.away_ns else 0.0,
            checkpoints=waiting.checkpoints,
            files=waiting.files,
            size_bytes=waiting.size_bytes,
            plain=waiting.plain,
        )

    def _holder(self) -> int:
        return holder(os.path.join(self._path, DATABASE_FILE)) or 0


def main(argv: list[str]) -> int:
    """Watch until the parent is gone."""
    spool, mountpoint, parent, interval_s = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = _Watch(spool, mountpoint)
    while True:
        report = watch.report()
        try:
            os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            return 0
        time.sleep(float(interval_s) if report.is_answered else _FIRST_PAUSE_S)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    # A look that waits for ever must not keep the process.
    os._exit(main(sys.argv[1:]))
