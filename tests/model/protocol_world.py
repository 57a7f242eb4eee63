"""The state of the protocol model, and the scenarios and mistakes that it is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from tests.model.log_rules import Entry, Log

NETWORK, TRAINER = 3, 2
"""Who makes a step; 0 and 1 are the members."""
Step: TypeAlias = "tuple[int, str, World]"
"""Actor, label, the state after it."""
Plan: TypeAlias = tuple[Any, ...]
Request: TypeAlias = tuple[int, Entry]

FLAWS = (
    "votes_before_seal_count",
    "no_close",
    "commit_without_relisting_members",
    "fence_in_separate_object",
    "lost_reply_is_failure",
    "readback_404_is_failure",
    "older_seal_may_replace",
    "success_marker",
    "pointer_follows_last_commit",
    "seal_before_registering",
    "join_only_the_highest",
    "wait_for_late_members",
    "writes_after_final_vote",
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the trainers do and what may go wrong.

    Attributes:
        names: for each save the number of the name that it writes; a save is one `job` below.
        generations: for each save which start of the job does it; a second save by the same one
            begins where its member knows the first one's decision.
        event: `format` (one rank's marker, at any time; the format knows the expected set),
            `extra` (the same, and only rank 0's file is expected), `rename` (after all ranks'
            closes; no expected set), `explicit` (every rank commits).
        rewrites: rank 1 may write its file a second time, before and after its votes.
        early_votes: members also vote before the SEAL.
        uploads: bytes reach the store in a step of their own.
        away: members whose closes may return before they are registered (the store is away).
        net: how many requests may be on their way at once.
        coarse: joining, registering and closing are one step, deciding and storing a vote another.
        restarts: a member may forget what it was about to do or waits for (kill -9).
        flaw: the mistake that is built in, or "".
    """

    names: tuple[int, ...] = (0,)
    generations: tuple[int, ...] = (0, 1)
    event: str = "format"
    rewrites: bool = False
    early_votes: bool = False
    uploads: bool = False
    away: tuple[int, ...] = ()
    net: int = 1
    coarse: bool = False
    restarts: bool = True
    flaw: str = ""


class Part(NamedTuple):
    """One member's part in one generation's save: its spool row and its objects in the store.

    Attributes:
        attempt: that it joined, -1 before.
        registered: its member object is in the store.
        file: 0 none, 1 open, 2 closed (version 1), 3 open again, 4 closed (version 2).
        stored: version that the store has.
        vote: 0 none, 1 final and decided, 2 in the store before CLOSE, 3 after it.
        voted: version in the final vote.
        event: the member saw the commit event, or its rank committed explicitly.
        early: version in its vote from before the SEAL.
    """

    attempt: int = -1
    registered: int = 0
    file: int = 0
    stored: int = 0
    vote: int = 0
    voted: int = 0
    event: int = 0
    early: int = 0


NO_PART = Part()


class World(NamedTuple):
    """A state. `plans` and `pending` are what members only have in memory."""

    log: Log
    parts: tuple[Part, ...]
    intents: tuple[int, ...]
    plans: tuple[Plan | None, ...]
    pending: tuple[Request | None, ...]
    net: tuple[Request, ...]
    told_failed: tuple[int, ...]
