"""Who a caller is, read from /proc: protocol adapter only, the rules are in `model.jobkey`.

A process is kept by what changes when it starts another program: its environment is read once for
each. (A child that was forked with files of the mount open closes them before it gets its own.) Any
thread.
"""

from __future__ import annotations

import collections
import os
import threading
from typing import Final

from ckptgate.model.jobkey import OUTSIDE, JobKey, RankInfo, job_key_from, rank_from
from ckptgate.vfs.identify import ProcessInfo

__all__ = ["ProcIdentity"]

_PF_EXITING: Final = 0x4
_PF_FORKNOEXEC: Final = 0x40
_KNOWN_MAX: Final = 4096
_ENVIRON_BYTES_MAX: Final = 4 * 1024 * 1024
_STAT_BYTES: Final = 4096
# Fields of /proc/PID/stat after the command's closing parenthesis.
_STATE: Final = 0
_SESSION: Final = 3
_FLAGS: Final = 6
_START: Final = 19
_ARGUMENTS_START: Final = 45
_ENVIRONMENT_END: Final = 48


class ProcIdentity:
    """`vfs.identify.Identify` on Linux."""

    def __init__(self, *, proc: str = "/proc", host: str = "") -> None:
        self._proc = proc
        self._host = host or os.uname().nodename
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[tuple[int | str, ...], ProcessInfo] = (
            collections.OrderedDict()
        )

    def process(self, tid: int) -> ProcessInfo:
        """The process of a thread."""
        stat = self._stat(tid) if tid > 0 else None
        if stat is None:
            return ProcessInfo(0, 0, OUTSIDE, RankInfo())
        key = (tid, stat[_START], *_program_of(stat))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        found = self._read(tid, stat)
        # A dying process has no environment any more, and must not be remembered as such.
        if found.pid and found.job_key != OUTSIDE:
            with self._lock:
                self._known[key] = found
                while len(self._known) > _KNOWN_MAX:
                    self._known.popitem(last=False)
        return found

    def is_exiting(self, tid: int) -> bool:
        """Whether the thread is dying; one that is gone was."""
        stat = self._stat(tid)
        return stat is None or bool(int(stat[_FLAGS]) & _PF_EXITING)

    def is_alive(self, pid: int, start: int) -> bool:
        """Whether that very process still runs."""
        stat = self._stat(pid) if pid > 0 else None
        if stat is None or int(stat[_START]) != start or stat[_STATE] in {"Z", "X"}:
            return False
        return not int(stat[_FLAGS]) & _PF_EXITING

    def _read(self, tid: int, stat: list[str]) -> ProcessInfo:
        pid = self._thread_group(tid)
        if not pid:
            return ProcessInfo(0, 0, OUTSIDE, RankInfo())
        own = stat if pid == tid else self._stat(pid)
        if own is None:
            return ProcessInfo(0, 0, OUTSIDE, RankInfo())
        environ = self._environ(pid)
        if environ is None:
            key: JobKey = OUTSIDE
            environ = {}
        else:
            key = job_key_from(environ, self._session(own))
        return ProcessInfo(pid, int(own[_START]), key, rank_from(environ))

    def _session(self, stat: list[str]) -> str:
        """`<host>/<sid>@<start>`; a session outlives its leader, then only its number is known."""
        sid = int(stat[_SESSION])
        if sid <= 0:
            return ""
        leader = self._stat(sid)
        start = leader[_START] if leader is not None else "0"
        return f"{self._host}/{sid}@{start}"

    def _thread_group(self, tid: int) -> int:
        text = self._file(tid, "status", _STAT_BYTES)
        for line in (text or b"").splitlines():
            if line.startswith(b"Tgid:"):
                return int(line.split()[1])
        return 0

    def _environ(self, pid: int) -> dict[str, str] | None:
        data = self._file(pid, "environ", _ENVIRON_BYTES_MAX)
        if data is None:
            return None
        found: dict[str, str] = {}
        for item in data.decode("utf-8", "surrogateescape").split("\0"):
            name, sep, value = item.partition("=")
            if sep:
                found[name] = value
        return found

    def _stat(self, pid: int) -> list[str] | None:
        data = self._file(pid, "stat", _STAT_BYTES)
        if not data:
            return None
        # The command may hold spaces and parentheses.
        fields = data[data.rindex(b")") + 2 :].decode("ascii").split()
        return fields if len(fields) > _START else None

    def _file(self, pid: int, name: str, limit: int) -> bytes | None:
        try:
            fd = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            parts: list[bytes] = []
            left = limit
            while left > 0 and (part := os.read(fd, min(left, 65536))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        except OSError:
            return None
        finally:
            os.close(fd)


def _program_of(stat: list[str]) -> tuple[int | str, ...]:
    """What differs after an exec: whether there was one, and where the new program's strings lie.

    The addresses are 0 where we may not know them.
    """
    addresses = stat[_ARGUMENTS_START : _ENVIRONMENT_END + 1]
    return (int(stat[_FLAGS]) & _PF_FORKNOEXEC, *addresses)
