"""The machine: what disturbs a measurement, and what processes cost."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "anonymous_mb",
    "cpu_s",
    "describe",
    "fault_in",
    "file_system",
    "free_bytes",
    "settle",
    "wait_idle",
]

GIB = 1 << 30
HALT_POLL = Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns")


def fault_in(size: int) -> None:
    """Have *size* bytes of free memory at hand.

    A virtual machine gives free pages back to its host: whoever writes first pays for getting them
    again, which can take longer than the writing.
    """
    size = min(size, _available() // 2)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    with mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags):
        pass


def settle(size: int, pids: Iterable[int] = ()) -> None:
    """Before a measurement of *size* bytes: no dirty pages, nobody at work, memory at hand."""
    wait_idle(pids)
    os.sync()
    fault_in(size + (size >> 2))


def wait_idle(pids: Iterable[int], *, for_s: float = 0.04, timeout_s: float = 60.0) -> None:
    """Wait until these processes have used (next to) no CPU for *for_s* seconds."""
    known = list(pids)
    deadline = time.monotonic() + timeout_s
    while known and time.monotonic() < deadline:
        before = sum(map(cpu_s, known))
        time.sleep(for_s)
        if sum(map(cpu_s, known)) - before < for_s * 0.02:
            return


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads, exact to the nanosecond; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def anonymous_mb(pid: int) -> float:
    """Anonymous resident memory of a process, in MB (10**6)."""
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("RssAnon:"):
            return int(text.split()[1]) * 1024 / 1e6
    return 0.0


def free_bytes(path: Path) -> int:
    """Bytes that can be written to the file system of *path*."""
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def file_system(path: Path) -> str:
    """Type of the file system that *path* lies on."""
    best, kind = "", ""
    real = os.path.realpath(path)
    for text in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = text.partition(" - ")
        point = left.split()[4]
        if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def describe() -> str:
    """One line about where this runs."""
    model = "unknown processor"
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            model = text.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / GIB
    load = os.getloadavg()[0]
    kernel = os.uname().release
    line = f"{os.cpu_count()} x {model}, {memory:.0f} GiB, Linux {kernel}, load {load:.1f}"
    return line + _halt_poll()


def _halt_poll() -> str:
    """How long an idle virtual core looks for work before it halts: waking it costs most then."""
    try:
        text = HALT_POLL.read_text()
    except OSError:
        return ""
    return f", haltpoll {int(text) // 1000} us"


def _available() -> int:
    for text in Path("/proc/meminfo").read_text().splitlines():
        if text.startswith("MemAvailable:"):
            return int(text.split()[1]) * 1024
    return GIB
