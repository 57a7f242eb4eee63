"""Who a client is: what /proc tells of its process, and what it says of itself.

A program that sets RANK after its start (as those do that `torch.multiprocessing` spawns) shows
another environment than it has. So a client introduces itself, on each of its connections: it gets
a number that stands for its thread id in `Caller.pid`, below zero, which no process has.

Any thread.
"""

from __future__ import annotations

import dataclasses
import itertools

from ckptgate.model.jobkey import JobKey, RankInfo
from ckptgate.vfs.identify import Identify, ProcessInfo

__all__ = ["ClientIdentity"]


class ClientIdentity:
    """`vfs.identify.Identify`: introduced clients, beside the processes that another one knows."""

    def __init__(self, processes: Identify) -> None:
        self._processes = processes
        self._numbers = itertools.count(1)
        self._introduced: dict[int, ProcessInfo] = {}

    def introduce(self, pid: int, *, job: JobKey | None, rank: RankInfo | None) -> int:
        """A number for a connection of the process *pid* (0: unknown); None is what /proc tells."""
        known = self._processes.process(pid)
        tid = -next(self._numbers)
        self._introduced[tid] = dataclasses.replace(
            known, job_key=job or known.job_key, rank=rank or known.rank
        )
        return tid

    def forget(self, tid: int) -> None:
        """The connection is gone."""
        self._introduced.pop(tid, None)

    def process(self, tid: int) -> ProcessInfo:
        """The process of a thread or connection."""
        known = self._introduced.get(tid)
        return self._processes.process(tid) if known is None else known

    def closer(self, tid: int) -> tuple[ProcessInfo, bool]:
        """The same, and whether it is dying: a client that asks for a close means it."""
        known = self._introduced.get(tid)
        return self._processes.closer(tid) if known is None else (known, False)

    def holds(self, pid: int, ino: int) -> bool:
        """See the port."""
        return self._processes.holds(pid, ino)

    def is_alive(self, pid: int, start: int) -> bool:
        """See the port."""
        return self._processes.is_alive(pid, start)
