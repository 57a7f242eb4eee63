"""Calls that a stopped or stuck daemon must not keep for ever: looks into a mount, and questions.

A system call that looks into a mount ends when the mount process answers, and nothing but a
SIGKILL ends it before. So it is made by a thread of its own, which the end of the command takes
along. Owns the rules how long a command waits, and that it says at once what it can see: a process
that is stopped, by its number. Any thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from ckptgate.app.registry import MountInfo, list_mounts
from ckptgate.errors import UnusableError

__all__ = ["LOOK_TIMEOUT_S", "in_reach", "refuse_stopped", "stopped_child", "within_reach"]

LOOK_TIMEOUT_S: Final = 120.0
"""For a look into a mount: a new job's first one may wait a minute for older checkpoints."""
_CHECK_S: Final = 1.0
"""Until it is asked whether a process is stopped; debuggers stop one for less."""
_STOPPED: Final = frozenset({b"T", b"t"})
_P = ParamSpec("_P")
_T = TypeVar("_T")


def stopped_child(mount: MountInfo, name: str) -> int | None:
    """Pid of the mount's child process *name* if it is stopped, None if it runs or isn't there."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{mount.pid}/task/{mount.pid}/children", encoding="ascii") as stream:
            children = stream.read().split()
        for child in children:
            if _is_stopped(child, name):
                return int(child)
    return None


def _is_stopped(pid: str, name: str) -> bool:
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = stream.read().split(b"\0")
        with open(f"/proc/{pid}/stat", "rb") as stream:
            state = stream.read().rpartition(b")")[2].split()[0]
        is_ours = b"ckptgate.app.child" in words and name.encode() in words
        return is_ours and state in _STOPPED
    return False


def within_reach(
    call: Callable[[], _T], *, mounts: Callable[[], list[MountInfo]], child: str, limit_s: float
) -> _T:
    """What *call* gives, or why it doesn't end.

    Args:
        call: made on a thread of its own; what it raises is raised here.
        mounts: those whose processes it may wait for.
        child: which of their processes.
        limit_s: how long it may take.

    Raises:
        UnusableError: that process is stopped, or does not answer in time.
    """
    outcome: list[tuple[bool, _T | BaseException]] = []

    def work() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as exc:  # noqa: BLE001 - it is raised by who waits for it
            outcome.append((False, exc))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    seen: set[int] = set()
    while True:
        thread.join(min(_CHECK_S, max(deadline - time.monotonic(), 0)))
        if outcome:
            return _result(outcome[0])
        seen = _refuse_stopped(mounts(), child, seen)
        if time.monotonic() >= deadline:
            where = ", ".join(mount.place for mount in mounts()) or "the file system"
            msg = f"the {child} process of {where} does not answer within {limit_s:g} s"
            hint = "see <spool>/ckptgate.log; ckptgate status lists the mounts"
            raise UnusableError(msg, subject=where, hint=hint)


def _result(outcome: tuple[bool, _T | BaseException]) -> _T:
    _, value = outcome
    if isinstance(value, BaseException):
        raise value
    return value


def _refuse_stopped(mounts: list[MountInfo], child: str, seen: set[int]) -> set[int]:
    """The processes that are stopped now.

    Raises:
        UnusableError: one is that was so at the last look, too.
    """
    found = {pid: mount for mount in mounts if (pid := stopped_child(mount, child)) is not None}
    for pid in found.keys() & seen:
        raise _stopped(found[pid], child, pid)
    return set(found)


def _stopped(mount: MountInfo, child: str, pid: int) -> UnusableError:
    msg = f"the {child} process of {mount.place} (pid {pid}) is stopped and answers nobody"
    return UnusableError(msg, subject=mount.place, hint=f"kill -CONT {pid}")


def refuse_stopped(mount: MountInfo) -> None:
    """Refuse to go on with a mount of which a process is stopped.

    Raises:
        UnusableError: one is.
    """
    for child in ("mount", "publisher"):
        pid = stopped_child(mount, child)
        if pid is not None:
            raise _stopped(mount, child, pid)


def in_reach(look: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function that looks into the mount of its first argument, a path, wait no longer."""

    @functools.wraps(look)
    def patient(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        path = os.path.abspath(os.path.expanduser(str(args[0])))

        def mounts() -> list[MountInfo]:
            # By its words only: nothing may look into a mount here.
            every = list_mounts()
            every = [m for m in every if m.mountpoint] or every
            named = [
                m
                for m in every
                if m.mountpoint and os.path.commonpath((m.mountpoint, path)) == m.mountpoint
            ]
            return named or every

        return within_reach(
            lambda: look(*args, **kwargs), mounts=mounts, child="mount", limit_s=LOOK_TIMEOUT_S
        )

    return patient
