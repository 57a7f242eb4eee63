"""Who a caller is, as a port: the operating system knows it, an adapter asks. Any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptgate.model.jobkey import JobKey, RankInfo

__all__ = ["Identify", "ProcessInfo"]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process.

    Attributes:
        pid: thread group; 0 if it isn't known.
        start: start time in clock ticks since boot; 0 if it isn't known.
        job_key: the incarnation that it belongs to.
        rank: which rank it is, where its environment tells.
    """

    pid: int
    start: int
    job_key: JobKey
    rank: RankInfo


class Identify(Protocol):
    """What is known of processes. Never blocks on the store, never fails."""

    def process(self, tid: int) -> ProcessInfo:
        """The process of a thread; OUTSIDE with pid 0 where nothing can be read."""
        ...

    def closer(self, tid: int) -> tuple[ProcessInfo, bool]:
        """Who closes a file: its process, and whether the thread is dying (one that is gone was).

        The kernel closes the files of a dying process.
        """
        ...

    def holds(self, pid: int, ino: int) -> bool:
        """Whether the process has a descriptor of that inode number that it may write to.

        Another file system's inode may have the number: a yes may be wrong, a no may not, but
        where nothing can be read.
        """
        ...

    def is_alive(self, pid: int, start: int) -> bool:
        """Whether the process *pid* that started at *start* still runs (zombies don't)."""
        ...
