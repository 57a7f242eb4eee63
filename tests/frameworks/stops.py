"""Stops a process before the system calls that change files: counts, delays, ends it there.

The process asks the kernel to ask somebody else first (seccomp's user notification), so it is all
the same which language or library makes the call, and nothing of a framework is patched. Linux on
x86-64; `install` in the process, before it has threads, `Listener` elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Fault", "Listener", "Op", "install", "set_environment"]

_OPENAT: Final = 257
_BY_FD: Final = {
    1: "write", 3: "close", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync",
    77: "ftruncate", 296: "pwritev", 328: "pwritev2",
}  # fmt: skip
_BY_PATH: Final = {
    76: "truncate", 83: "mkdir", 84: "rmdir", 85: "creat", 87: "unlink",
}  # fmt: skip
_BY_SECOND: Final = {82: "rename", 88: "symlink"}
_BY_TARGET: Final = {264: "renameat", 316: "renameat2"}
_BY_DIR: Final = {
    _OPENAT: "openat", 258: "mkdirat", 263: "unlinkat",
}  # fmt: skip
_TO_FD: Final = {40: ("sendfile", 0), 326: ("copy_file_range", 2)}
_SYMLINKAT: Final = 266
_CALLS: Final = (*_BY_FD, *_BY_PATH, *_BY_SECOND, *_BY_TARGET, *_BY_DIR, *_TO_FD, _SYMLINKAT)
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_RECV, _SEND = 0xC0502100, 0xC0182101
_CONTINUE: Final = 1
_PATH_MAX: Final = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _program() -> bytes:
    """A filter that has the kernel ask about those calls, opens for writing only."""
    load, jump_equal, jump_set, answer = 0x20, 0x15, 0x45, 0x06
    ask, allow = 0x7FC00000, 0x7FFF0000
    others = [nr for nr in _CALLS if nr != _OPENAT]
    count = len(others)
    code = [(load, 0, 0, 0), (jump_equal, count + 1, 0, _OPENAT)]
    # To the `ask` at the end, or on.
    code += [(jump_equal, count - at + 4, 0, nr) for at, nr in enumerate(others, start=1)]
    code += [(answer, 0, 0, allow), (load, 0, 0, 32), (jump_set, 1, 0, _WRITING)]
    code += [(answer, 0, 0, allow), (answer, 0, 0, ask)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def install() -> int:
    """From now on this process and its children are asked about; the descriptor of who answers."""
    no_new_privileges, set_filter, new_listener, seccomp = 38, 1, 8, 317
    code = _program()
    program = _Program(len(code) // 8, code)
    if _libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    fd = _libc.syscall(seccomp, set_filter, new_listener, ctypes.byref(program))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return fd


def set_environment(environment: dict[str, str]) -> None:
    """Have this environment as if the process had been started with it, for others to read too.

    It takes the place of the one that the process was started with, which must be as long.
    """
    os.environ.clear()
    os.environ.update(environment)
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    block = b"".join(f"{key}={value}\0".encode() for key, value in environment.items())
    rest = end - start - len(block) - len("PAD=\0")
    assert rest >= 0, "start it with a longer environment"
    ctypes.memmove(start, block + b"PAD=" + b"." * rest + b"\0", end - start)


@dataclass(frozen=True, slots=True)
class Op:
    """A call on a file below the watched directory."""

    call: str
    path: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a rank before its n-th call of a save.

    Attributes:
        save: which save.
        op: the call's number in it, from 0.
        kind: `late`, `kill` (of this rank) or `kill-all`.
        seconds: how late.
    """

    save: int
    op: int
    kind: str
    seconds: float = 0.0


class Listener(threading.Thread):
    """Answers for one rank; counts its calls below a directory by saves.

    Attributes:
        ops: save -> its calls, in order.
        has_struck: whether the fault happened.
    """

    def __init__(
        self,
        fd: int,
        root: str,
        marks: str,
        fault: Fault | None,
        kill: Callable[[bool], None],
    ) -> None:
        """A rank's mark `<marks>N-...` (it makes such a file) begins its save N."""
        super().__init__(daemon=True)
        self.ops: dict[int, list[Op]] = {}
        self.has_struck = False
        self._fd, self._root, self._marks = fd, root, marks
        self._fault, self._kill = fault, kill
        self._save = 0

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        try:
            while True:
                ((_, event),) = poll.poll()
                if not event & select.POLLIN:
                    return
                # Who asked may have been killed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    self._answer()
        finally:
            os.close(self._fd)

    def _answer(self) -> None:
        asked = bytearray(80)
        fcntl.ioctl(self._fd, _RECV, asked)
        ident, tid, _, nr, _, _, *args = struct.unpack("=QIIiIQ6Q", asked)
        with contextlib.suppress(OSError):
            self._look(_operation(tid, nr, args))
        fcntl.ioctl(self._fd, _SEND, struct.pack("=QqiI", ident, 0, 0, _CONTINUE))

    def _look(self, op: Op | None) -> None:
        if op is None:
            return
        if op.path.startswith(self._marks):
            self._save = int(op.path[len(self._marks) :].partition("-")[0])
        elif op.path.startswith(self._root + "/"):
            done = self.ops.setdefault(self._save, [])
            done.append(Op(op.call, op.path[len(self._root) + 1 :]))
            fault = self._fault
            if fault and (fault.save, fault.op) == (self._save, len(done) - 1):
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self.has_struck = True
        if fault.kind == "late":
            time.sleep(fault.seconds)
        else:
            self._kill(fault.kind == "kill-all")


def _operation(tid: int, nr: int, args: Sequence[int]) -> Op | None:
    """What the call is about, None for what changes no file."""
    if nr in _BY_FD or nr in _TO_FD:
        name, at = (_BY_FD[nr], 0) if nr in _BY_FD else _TO_FD[nr]
        path = os.readlink(f"/proc/{tid}/fd/{args[at]}")
        if name == "close" and not _is_written(tid, args[at]):
            return None
        return Op(name, path)
    if nr in _BY_PATH:
        return Op(_BY_PATH[nr], _path(tid, args[0]))
    if nr in _BY_SECOND:
        return Op(_BY_SECOND[nr], _path(tid, args[1]))
    if nr in _BY_TARGET:
        # What is renamed into the directory may come from elsewhere.
        return Op(_BY_TARGET[nr], _path(tid, args[3], args[2]))
    if nr == _SYMLINKAT:
        return Op("symlinkat", _path(tid, args[2], args[1]))
    return Op(_BY_DIR[nr], _path(tid, args[1], args[0]))


def _is_written(tid: int, fd: int) -> bool:
    with open(f"/proc/{tid}/fdinfo/{fd}") as file:
        flags = next(line for line in file if line.startswith("flags:"))
    return bool(int(flags.split()[1], 8) & os.O_ACCMODE)


def _path(tid: int, address: int, directory: int = -100) -> str:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        found = b""
        # A string may end shortly before a page that isn't there.
        while b"\0" not in found and len(found) < _PATH_MAX:
            memory.seek(address + len(found))
            found += memory.read(4096 - (address + len(found)) % 4096)
    text = os.fsdecode(found.partition(b"\0")[0])
    if text.startswith("/"):
        return os.path.normpath(text)
    number = ctypes.c_int32(directory & 0xFFFFFFFF).value
    base = os.readlink(f"/proc/{tid}/cwd" if number == -100 else f"/proc/{tid}/fd/{number}")
    return os.path.normpath(os.path.join(base, text))


def kill_group(pid: int) -> None:
    """kill -9 a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
