"""Who a caller is, read from /proc: protocol adapter only, the rules are in `model.jobkey`.

A process is kept by what changes when it starts another program: its environment is read once for
each. (A child that was forked with files of the mount open closes them before it gets its own.)
Programs that set their title overwrite their environment: such a process is who it was when it was
seen before, else who its parent is, in the same session.
Every request asks, so `/proc/TID/stat` of the latest callers is kept open: reading it again takes a
third of the time, and a descriptor of a process that is gone never shows its successor. Any thread.
"""

from __future__ import annotations

import collections
import os
import re
import threading
from dataclasses import dataclass
from typing import Final

from ckptgate.model.jobkey import OUTSIDE, JobKey, RankInfo, job_key_from, rank_from
from ckptgate.vfs.identify import ProcessInfo

__all__ = ["ProcIdentity"]

_PF_EXITING: Final = 0x4
_PF_FORKNOEXEC: Final = 0x40
_KNOWN_MAX: Final = 4096
_ENVIRON_BYTES_MAX: Final = 4 * 1024 * 1024
_STAT_BYTES: Final = 4096
_OPEN_MAX: Final = 128
"""Descriptors of `/proc/TID/stat` that are kept."""
# Fields of /proc/PID/stat after the command's closing parenthesis.
_STATE: Final = 0
_PARENT: Final = 1
_SESSION: Final = 3
_FLAGS: Final = 6
_START: Final = 19
_ARGUMENTS_START: Final = 45
_ENVIRONMENT_END: Final = 48
_GENERATIONS_MAX: Final = 16
"""So far up a process's ancestors are asked."""
_ENTRY: Final = re.compile(rb"[^\s:=\0]+=")
_NOBODY: Final = ProcessInfo(0, 0, OUTSIDE, RankInfo())


@dataclass(frozen=True, slots=True)
class _Environ:
    """What a process's environment shows, and whether the process has overwritten its beginning."""

    entries: dict[str, str]
    is_overwritten: bool


class ProcIdentity:
    """`vfs.identify.Identify` on Linux."""

    def __init__(self, *, proc: str = "/proc", host: str = "") -> None:
        self._proc = proc
        self._host = host or os.uname().nodename
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[tuple[int | bytes, ...], ProcessInfo] = (
            collections.OrderedDict()
        )
        self._jobs: collections.OrderedDict[tuple[int, int], JobKey] = collections.OrderedDict()
        self._open: collections.OrderedDict[int, int] = collections.OrderedDict()

    def process(self, tid: int) -> ProcessInfo:
        """The process of a thread."""
        return self._process(tid, self._stat_of_caller(tid))

    def closer(self, tid: int) -> tuple[ProcessInfo, bool]:
        """The process of a thread, and whether the thread is dying."""
        stat = self._stat_of_caller(tid)
        return self._process(tid, stat), _is_exiting(stat)

    def _process(self, tid: int, stat: list[bytes] | None) -> ProcessInfo:
        if stat is None:
            return _NOBODY
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

    def holds(self, pid: int, ino: int) -> bool:
        """Whether the process has a descriptor of that inode number that it may write to."""
        directory = f"{self._proc}/{pid}/fdinfo"
        wanted = b"\nino:\t%d\n" % ino
        try:
            names = os.listdir(directory)
        except OSError:
            return False
        return any(
            _is_writable(self._file(pid, f"fdinfo/{name}", _STAT_BYTES), wanted) for name in names
        )

    def is_alive(self, pid: int, start: int) -> bool:
        """Whether that very process still runs."""
        stat = self._stat(pid) if pid > 0 else None
        if stat is None or int(stat[_START]) != start or stat[_STATE] in {b"Z", b"X"}:
            return False
        return not int(stat[_FLAGS]) & _PF_EXITING

    def _read(self, tid: int, stat: list[bytes]) -> ProcessInfo:
        pid = self._thread_group(tid)
        own = stat if pid == tid else self._stat(pid)
        if not pid or own is None:
            return _NOBODY
        key, environ = self._job(pid, own)
        return ProcessInfo(pid, int(own[_START]), key, rank_from(environ))

    def _job(self, pid: int, stat: list[bytes]) -> tuple[JobKey, dict[str, str]]:
        """The job of a process, and the environment that it shows itself."""
        environ = self._environ(pid)
        if environ is None:
            return OUTSIDE, {}
        key = self._told_job(environ, stat)
        if key is None:
            key = self._earlier_job(pid, stat) or job_key_from({}, self._session(stat))
        with self._lock:
            self._jobs[pid, int(stat[_START])] = key
            while len(self._jobs) > _KNOWN_MAX:
                self._jobs.popitem(last=False)
        return key, environ.entries

    def _told_job(self, environ: _Environ, stat: list[bytes]) -> JobKey | None:
        """The job that an environment tells; None if it was overwritten and tells nothing."""
        session = self._session(stat)
        key = job_key_from(environ.entries, session)
        # The rest of one that was overwritten may still be there.
        is_told = not environ.is_overwritten or key != job_key_from({}, session)
        return key if is_told else None

    def _earlier_job(self, pid: int, stat: list[bytes]) -> JobKey | None:
        """The job that a process with an overwritten environment had or came from, if known."""
        for _ in range(_GENERATIONS_MAX):
            with self._lock:
                known = self._jobs.get((pid, int(stat[_START])))
            if known is not None:
                return known
            parent = int(stat[_PARENT])
            above = self._stat(parent) if parent > 1 and pid != int(stat[_SESSION]) else None
            if above is None or above[_SESSION] != stat[_SESSION]:
                return None
            pid, stat = parent, above
            environ = self._environ(pid)
            told = None if environ is None else self._told_job(environ, stat)
            if told is not None:
                return told
        return None

    def _environ(self, pid: int) -> _Environ | None:
        data = self._file(pid, "environ", _ENVIRON_BYTES_MAX)
        if data is None:
            return None
        # Nothing at all is an environment without entries.
        return _Environ(_parsed(data), bool(data) and not _ENTRY.match(data))

    def _session(self, stat: list[bytes]) -> str:
        """`<host>/<sid>@<start>`; a session outlives its leader, then only its number is known."""
        sid = int(stat[_SESSION])
        if sid <= 0:
            return ""
        leader = self._stat(sid)
        start = "0" if leader is None else leader[_START].decode("ascii")
        return f"{self._host}/{sid}@{start}"

    def _thread_group(self, tid: int) -> int:
        text = self._file(tid, "status", _STAT_BYTES)
        for line in (text or b"").splitlines():
            if line.startswith(b"Tgid:"):
                return int(line.split()[1])
        return 0

    def _stat_of_caller(self, tid: int) -> list[bytes] | None:
        """The fields of a thread that asks, read by the descriptor that is kept of it."""
        if tid <= 0:
            return None
        with self._lock:
            fd = self._open.get(tid)
            if fd is not None:
                try:
                    data = os.pread(fd, _STAT_BYTES, 0)
                except ProcessLookupError:
                    data = b""
                if data:
                    self._open.move_to_end(tid)
                    return _fields(data)
                # That thread is gone; another one may have its number.
                os.close(self._open.pop(tid))
            try:
                fd = os.open(f"{self._proc}/{tid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            self._open[tid] = fd
            if len(self._open) > _OPEN_MAX:
                os.close(self._open.popitem(last=False)[1])
            try:
                return _fields(os.pread(fd, _STAT_BYTES, 0))
            except OSError:
                return None

    def _stat(self, pid: int) -> list[bytes] | None:
        return _fields(self._file(pid, "stat", _STAT_BYTES) or b"")

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


def _parsed(data: bytes) -> dict[str, str]:
    """The entries of an environment."""
    found: dict[str, str] = {}
    for item in data.decode("utf-8", "surrogateescape").split("\0"):
        name, sep, value = item.partition("=")
        if sep:
            found[name] = value
    return found


def _fields(data: bytes) -> list[bytes] | None:
    """What follows the command, which may hold spaces and parentheses; None if it isn't whole."""
    if not data:
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    return fields if len(fields) > _START else None


def _is_exiting(stat: list[bytes] | None) -> bool:
    """One that is gone was."""
    return stat is None or bool(int(stat[_FLAGS]) & _PF_EXITING)


def _is_writable(info: bytes | None, wanted: bytes) -> bool:
    """Whether this is what `/proc/PID/fdinfo/N` says of a descriptor that may write *wanted*."""
    if info is None or wanted not in info:
        return False
    flags = info.partition(b"flags:")[2].split(maxsplit=1)
    return bool(flags) and int(flags[0], 8) & os.O_ACCMODE != os.O_RDONLY


def _program_of(stat: list[bytes]) -> tuple[int | bytes, ...]:
    """What differs after an exec: whether there was one, and where the new program's strings lie.

    The addresses are 0 where we may not know them.
    """
    addresses = stat[_ARGUMENTS_START : _ENVIRONMENT_END + 1]
    return (int(stat[_FLAGS]) & _PF_FORKNOEXEC, *addresses)
