"""The supervisor's two children: how they are started and ended, and that each is there once.

Owns the rule that a spool has one mount process and one publisher, whoever started them: a child
has its kind's lock before it opens the spool, and whoever had it is told to end (`SUCCEED`), and
killed if it doesn't. What takes time and touches nothing is done before that, so that callers wait
for little. Thread rule: a `Child` belongs to the supervisor's one thread.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Final

from ckptgate.app.config import Config, saved_form
from ckptgate.errors import UnusableError
from ckptgate_adapters.sqlite_spool import SpoolLock

__all__ = ["ORPHANED", "ORPHAN_S", "SUCCEED", "Child", "only_one"]

SUCCEED: Final = signal.SIGUSR1
"""Tells a child to end at once, since another one takes its place."""
ORPHANED: Final = signal.SIGUSR2
"""Tells a child of its supervisor's death. (SIGTERM is what others send, who want it to end.)"""
ORPHAN_S: Final = 60.0
"""How long a child goes on without a supervisor where somebody keeps the session."""
_PATIENCE_S: Final = 1.0
_RESTARTS_MAX: Final = 20
_RESTART_WINDOW_S: Final = 60.0
_READY_TIMEOUT_S: Final = 60.0


def only_one(spool: str, name: str, *, patience_s: float = _PATIENCE_S) -> SpoolLock:
    """Be the only child *name* of the spool from now on; a predecessor is gone on return.

    Args:
        spool: the spool's directory.
        name: `mount` or `publisher`.
        patience_s: how long the predecessor may take for its end.

    Raises:
        CkptError: it doesn't go, or the lock can't be taken.
    """
    lock = SpoolLock(spool, name=f"{name}.lock")
    lock.acquire_from(SUCCEED, patience_s=patience_s)
    return lock


class Child:
    """One of the two processes, started again when it dies."""

    def __init__(self, name: str, config: Config, *, pass_fds: tuple[int, ...] = ()) -> None:
        """Start nothing yet.

        Args:
            name: `mount` or `publisher`.
            config: what it is given.
            pass_fds: descriptors that it needs.
        """
        self.name = name
        self._config = config
        self._pass_fds = pass_fds
        self._starts: list[float] = []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, extra_fds: tuple[int, ...] = ()) -> int:
        """Start it; returns a pidfd that becomes readable when it ends.

        Raises:
            UnusableError: it died too often.
        """
        now = time.monotonic()
        self._starts = [at for at in self._starts if now - at < _RESTART_WINDOW_S] + [now]
        if self.is_worn_out:
            msg = f"the {self.name} process died {_RESTARTS_MAX} times in {_RESTART_WINDOW_S:g} s"
            raise UnusableError(msg, subject=self.name, hint="see <spool>/ckptgate.log")
        command = [sys.executable, "-P", "-m", "ckptgate.app.child", self.name]
        command += [self._config.spool, str(os.getpid()), *arguments]
        given = os.memfd_create("ckptgate-config")
        try:
            os.write(given, saved_form(self._config))
            os.lseek(given, 0, os.SEEK_SET)
            self.process = subprocess.Popen(
                command, pass_fds=(*self._pass_fds, *extra_fds), stdin=given
            )
        finally:
            os.close(given)
        return os.pidfd_open(self.process.pid)

    def start_ready(self, *arguments: str) -> int:
        """Start it, and wait until it says that it works; returns a pidfd as `start`.

        The descriptor to say so on (`r`) is its first argument.

        Raises:
            UnusableError: it didn't; it is dead on return.
        """
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pidfd = self.start(str(writer), *arguments, extra_fds=(writer,))
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(reader, selectors.EVENT_READ)
                is_ready = selector.select(_READY_TIMEOUT_S) and os.read(reader, 1) == b"r"
        finally:
            os.close(reader)
        if not is_ready:
            os.close(pidfd)
            self.kill()
            msg = f"the {self.name} process did not get ready on {self._config.mountpoint}"
            hint = "see <spool>/ckptgate.log"
            raise UnusableError(msg, subject=self._config.mountpoint, hint=hint)
        return pidfd

    @property
    def is_worn_out(self) -> bool:
        """Whether it died too often to be started once more."""
        return len(self._starts) > _RESTARTS_MAX

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs or if it never did."""
        return None if self.process is None else self.process.poll()

    def stop(self, number: signal.Signals, timeout_s: float) -> bool:
        """Have a signal end it; whether that was so, and no SIGKILL was needed."""
        if self.process is None or self.process.poll() is not None:
            return True
        self.process.send_signal(number)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
