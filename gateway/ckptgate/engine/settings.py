"""The publisher's settings: one frozen value, units in the names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptgate.model.kinds import DEFAULT_PATTERNS, NamePatterns
from ckptgate.ports.store import VerifyMode

__all__ = ["PublisherSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """How long things may take, and how much is done at once.

    Attributes:
        quiescence_s: without a writer and without a write, before an attempt that saw no commit
            event may be sealed.
        commit_deadline_s: from the SEAL to the ABORT of what isn't whole.
        survivor_delay_s: until a member finishes what another one sealed.
        abandon_after_s: without a writer, a write and a SEAL, until an attempt is given up.
        live_interval_s: between copies of a live file that grows.
        idle_interval_s: between looks at the logs when nothing is under way.
        busy_interval_s: between passes while something is undecided here.
        decide_interval_s: between passes at most, while others' files are all that this member
            waits for with a decision that is its own.
        vote_interval_s: between votes that aren't final, while more is to come.
        retry_first_s, retry_max_s: wait after a failure of the store, doubled up to the maximum.
        digest_threads, upload_threads: how many files are digested or uploaded at once.
        job_wait_s: how long one pass waits for digests and uploads before it goes on without them.
        racy_write_s: a file written this recently is digested a little later, so that its time
            stamp proves that nothing came after.
        upload_tries_max: how often bytes that arrive wrong are sent before the attempt says so.
        spool_free_min_share: below this share of free room on the spool's file system local copies
            of what is published are given up.
        spool_free_target_share: until so much is free again.
        spool_max_bytes: what the spool may take, 0 for no limit; the shares count for it, too.
        reclaim_grace_s: how long what is dead (replaced, retired, aborted, unfinished) is kept.
        keep_aborted_s: how long the spool keeps bytes of aborted and abandoned attempts, at least
            the grace.
        contact_interval_s: between small requests that only tell whether the store is there; 0:
            none.
        lost_after_s: an attempt that nobody sealed and that nothing comes to any more is aborted.
        verify: how the store's bytes are proved; None takes the store's default.
        patterns: kinds of names.
    """

    quiescence_s: float = 30.0
    commit_deadline_s: float = 600.0
    survivor_delay_s: float = 5.0
    abandon_after_s: float = 900.0
    live_interval_s: float = 2.0
    idle_interval_s: float = 2.0
    busy_interval_s: float = 0.2
    decide_interval_s: float = 0.4
    vote_interval_s: float = 1.0
    retry_first_s: float = 0.2
    retry_max_s: float = 30.0
    digest_threads: int = 2
    upload_threads: int = 2
    job_wait_s: float = 0.05
    racy_write_s: float = 0.02
    upload_tries_max: int = 3
    spool_free_min_share: float = 0.25
    spool_free_target_share: float = 0.4
    spool_max_bytes: int = 0
    reclaim_grace_s: float = 24 * 3600.0
    keep_aborted_s: float = 7 * 24 * 3600.0
    lost_after_s: float = 7 * 24 * 3600.0
    contact_interval_s: float = 0.0
    verify: VerifyMode | None = None
    patterns: NamePatterns = DEFAULT_PATTERNS
