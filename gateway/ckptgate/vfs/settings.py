"""What can be set about the name space. Values only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VfsSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VfsSettings:
    """Settings of the vfs; times in seconds.

    Attributes:
        default_job_key: job key (as text) of callers of whom nothing can be read, "" for none.
        decision_wait_s: at most, a write into an attempt that is being decided waits.
        resume_wait_s: at most, a new job waits for sealed attempts that can still commit.
        settle_wait_s: at most, a mutation waits until other nodes can know of it.
        settle_pause_s: after such a wait was in vain, no call waits for that attempt this long.
        view_age_s: how old a run's state may be when a name is looked up.
        refresh_interval_s: between questions to the store about what other members did.
        entry_timeout_s: how long the kernel may keep names that mean the same for everybody.
        attr_timeout_s: how long the kernel may keep attributes.
        poll_interval_s: between looks at the spool while waiting.
        room_wait_s: at most, a checkpoint's first file waits for the room it is likely to need.
        spool_max_bytes: what the spool may take, 0 for no limit.
        close_delay_s: after a close is answered, until it is in the spool's database; 0: before.
    """

    default_job_key: str = ""
    decision_wait_s: float = 30.0
    resume_wait_s: float = 60.0
    settle_wait_s: float = 2.0
    settle_pause_s: float = 30.0
    view_age_s: float = 0.1
    refresh_interval_s: float = 0.1
    entry_timeout_s: float = 1.0
    attr_timeout_s: float = 1.0
    poll_interval_s: float = 0.02
    room_wait_s: float = 60.0
    spool_max_bytes: int = 0
    close_delay_s: float = 0.0
