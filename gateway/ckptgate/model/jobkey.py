"""Who writes: the job key (one incarnation of a job) and the rank, told from an environment.

The rule which variables count, and in which order, is here and only here. Pure: the caller reads
`/proc/PID/environ`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OUTSIDE", "JobKey", "JobKind", "RankInfo", "job_key_from", "rank_from"]


class JobKind(enum.StrEnum):
    """Where a job key comes from."""

    RUN_ID = "run"
    SLURM = "slurm"
    TORCHELASTIC = "torchelastic"
    SESSION = "session"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class JobKey:
    """One incarnation of a job.

    Attributes:
        kind: where it was read.
        value: the identity itself.
    """

    kind: JobKind
    value: str

    @property
    def is_shared(self) -> bool:
        """Whether all nodes of the job have the same key (a login session is one node's)."""
        return self.kind in {JobKind.RUN_ID, JobKind.SLURM, JobKind.TORCHELASTIC}

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    @staticmethod
    def parse(text: str) -> JobKey:
        """The inverse of `str`; raises ValueError."""
        kind, sep, value = text.partition(":")
        if not sep:
            msg = f"not a job key: {text!r}"
            raise ValueError(msg)
        return JobKey(JobKind(kind), value)


OUTSIDE = JobKey(JobKind.OUTSIDE, "")
"""A caller of whom nothing is known; it owns nothing."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Which rank of how many a process is; None where unknown."""

    rank: int | None = None
    world_size: int | None = None


def job_key_from(environ: Mapping[str, str], session: str) -> JobKey:
    """The job key of a process with *environ* in the login session *session*.

    Args:
        environ: its environment.
        session: `<host>/<sid>@<start time>`, or "" if unknown.
    """
    if run_id := environ.get("CKPTGATE_RUN_ID"):
        return JobKey(JobKind.RUN_ID, _as_text(run_id))
    if job := environ.get("SLURM_JOB_ID"):
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        return JobKey(JobKind.SLURM, _as_text(f"{job}+{restart}"))
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    if elastic not in {"", "none"} and "MASTER_ADDR" in environ:
        master = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT', '')}"
        return JobKey(JobKind.TORCHELASTIC, _as_text(f"{elastic}@{master}"))
    return JobKey(JobKind.SESSION, session) if session else OUTSIDE


def _as_text(value: str) -> str:
    r"""The value with bytes that aren't UTF-8 as `\xff`, the same on all nodes.

    An environment holds any bytes; a key stands in documents and databases, which are text.
    """
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


WORLD_SIZE_MAX = 1_000_000
"""No world is larger; a bigger number says nothing."""
_DIGITS_MAX = 20
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def rank_from(environ: Mapping[str, str]) -> RankInfo:
    """Rank and world size that *environ* tells, from the first launcher that set both."""
    for rank_name, world_name in zip(_RANKS, _WORLDS, strict=True):
        rank, world = environ.get(rank_name, ""), environ.get(world_name, "")
        is_number = rank.isdecimal() and world.isdecimal() and len(rank + world) < _DIGITS_MAX
        if is_number and int(rank) < int(world) <= WORLD_SIZE_MAX:
            return RankInfo(int(rank), int(world))
    return RankInfo()
