"""Faults in the mount's processes: imported by their interpreter, as it is in PYTHONPATH.

What is to happen stands in the file that $FAULTS_OF_TEST names, one JSON object, which a test may
replace at any time; nothing happens while there is none:

    process   "mount" or "publisher"; "supervisor", the one that there is, or "successor", one that
              is started later: who counts
    call      what is counted: of /dev/fuse "ask" (a read before it has a request), "read" (a
              request that was read), "write" (a reply), "ioctl"; "statement" that changes the
              database; "store", a call that changes the store; of any supervisor "step", whatever
              it does with files, sockets and processes
    at        which of them, from 1
    kill      SIGKILL "before" or "after" it; with "both", of the other process too
    error     or this errno instead of it

Each takes place once: the file is removed by it. With $NO_RESEND_OF_TEST the mount is told nothing
of the kernel's ability to send requests again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

_PATH = os.environ.get("FAULTS_OF_TEST", "")


class _Faults:
    def __init__(self, process: str) -> None:
        self.process = process
        self._began_ns = time.time_ns()
        self._key = (0, 0)
        self._plan: dict[str, Any] = {}
        self._count = 0

    def _load(self) -> dict[str, Any]:
        try:
            found = os.stat(_PATH)
        except FileNotFoundError:
            self._key, self._plan = (0, 0), {}
            return {}
        key = (found.st_ino, found.st_mtime_ns)
        if key != self._key:
            with open(_PATH, encoding="ascii") as stream:
                self._key, self._plan, self._count = key, json.load(stream), 0
        return self._plan

    def hit(self, name: str) -> dict[str, Any] | None:
        """Count a call; the plan if this is the one."""
        plan = self._load()
        if plan.get("call") != name or plan.get("process") != self._is():
            return None
        self._count += 1
        if self._count != plan["at"]:
            return None
        os.unlink(_PATH)
        return plan

    def _is(self) -> str:
        if self.process != "supervisor":
            return self.process
        return "supervisor" if self._key[1] > self._began_ns else "successor"

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        plan = self.hit(name)
        if plan is None:
            return call()
        if "error" in plan:
            raise OSError(plan["error"], os.strerror(plan["error"]))
        result = call() if plan["kill"] == "after" else None
        die(is_alone=not plan.get("both"))
        return result


def die(*, is_alone: bool) -> None:
    """SIGKILL of this process, or of both that the supervisor has."""
    own, parent = os.getpid(), os.getppid()
    if not is_alone:
        with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as stream:
            for other in map(int, stream.read().split()):
                if other != own:
                    os.kill(other, signal.SIGKILL)
    os.kill(own, signal.SIGKILL)


def _device_calls(faults: _Faults, device: int) -> None:
    readv, writev, ioctl = os.readv, os.writev, fcntl.ioctl

    def counted_readv(fd: int, buffers: Any) -> int:
        if fd != device:
            return readv(fd, buffers)
        plan = faults.hit("ask")
        if plan is not None:
            raise OSError(plan["error"], os.strerror(plan["error"]))
        size = readv(fd, buffers)
        plan = faults.hit("read")
        if plan is not None:
            # The request was taken from the kernel: a kill loses it.
            die(is_alone=not plan.get("both"))
        return size

    def counted_writev(fd: int, buffers: Any) -> int:
        if fd != device:
            return writev(fd, buffers)
        plan = faults.hit("write")
        if plan is None:
            return writev(fd, buffers)
        if "kill" in plan:
            if plan["kill"] == "after":
                writev(fd, buffers)
            die(is_alone=not plan.get("both"))
        # The kernel has ended the request then: with EINTR where it was taken back, else with EIO.
        unique = struct.unpack_from("<IiQ", buffers[0])[2]
        told = errno.EINTR if plan["error"] == errno.ENOENT else errno.EIO
        writev(fd, [struct.pack("<IiQ", 16, -told, unique)])
        raise OSError(plan["error"], os.strerror(plan["error"]))

    def counted_ioctl(fd: int, *words: Any) -> Any:
        if fd != device:
            return ioctl(fd, *words)
        return faults.around("ioctl", lambda: ioctl(fd, *words))

    os.readv, os.writev, fcntl.ioctl = counted_readv, counted_writev, counted_ioctl  # type: ignore[assignment]


def _statements(faults: _Faults) -> None:
    connect = sqlite3.connect

    class Counted(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql.startswith(("BEGIN", "COMMIT", "INSERT", "UPDATE", "DELETE")):
                call = partial(super().execute, sql, *values)
                return faults.around("statement", call)
            return super().execute(sql, *values)

    def counted_connect(*words: Any, **more: Any) -> sqlite3.Connection:
        return connect(*words, **more, factory=Counted)

    sqlite3.connect = counted_connect  # type: ignore[assignment]


def _store_calls(faults: _Faults) -> None:
    from ckptgate_adapters.posix_store import syscalls

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *words, **more: faults.around("store", lambda: real(*words, **more))

    for name in syscalls.MUTATING:
        setattr(syscalls, name, wrap(getattr(syscalls, name)))


_STEPS = ("os.", "socket.", "subprocess.", "fcntl.", "signal.", "open")
_NO_STEPS = ("os.listdir", "os.scandir", "os.putenv", "os.unsetenv")


def _steps(faults: _Faults) -> None:
    is_within = False

    def hook(event: str, words: tuple[Any, ...]) -> None:
        nonlocal is_within
        if is_within or not event.startswith(_STEPS) or event in _NO_STEPS:
            return
        if event == "open" and not (isinstance(words[2], int) and words[2] & os.O_ACCMODE):
            # What is only read changes nothing, and Python's own modules are among it.
            return
        is_within = True
        try:
            if faults.hit("step") is not None:
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            is_within = False

    sys.addaudithook(hook)


def _is_supervisor(words: list[str]) -> bool:
    is_mounting = "ckptgate.app.cli" in words and "--foreground" in words
    return is_mounting or "ckptgate.app.resume" in words


def _without_resend() -> None:
    from ckptgate_adapters.fuse import session, wire

    session._WANTED &= ~wire.InitFlag.HAS_RESEND  # type: ignore[misc]


def _begin() -> None:
    words = sys.orig_argv
    if _PATH and _is_supervisor(words):
        _steps(_Faults("supervisor"))
    if not _PATH or "ckptgate.app.child" not in words:
        return
    if os.environ.get("NO_RESEND_OF_TEST"):
        _without_resend()
    kind, *rest = words[words.index("ckptgate.app.child") + 1 :]
    faults = _Faults(kind)
    _statements(faults)
    _store_calls(faults)
    if kind == "mount":
        _device_calls(faults, int(rest[3]))


_begin()
