"""What is still owed to an undecided attempt, in the order in which people should read it.

It owns the rule that this member's own work comes first, and that nothing is called missing which
its own next vote will bring: while the store is full, the files that wait for it are the news.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from ckptgate.engine.judge import Judge, Verdict
from ckptgate.engine.node import Node
from ckptgate.engine.votes import Voter
from ckptgate.model.documents import Member, Vote
from ckptgate.model.entries import SealEvent
from ckptgate.model.states import POWER_LOST, FileState
from ckptgate.ports.spool import AttemptRow

__all__ = ["Owed"]


class Owed:
    """Says what is owed."""

    def __init__(self, node: Node, *, voter: Voter, judge: Judge) -> None:
        self._spool = node.spool
        self._member = node.member
        self._voter = voter
        self._judge = judge

    def lines(
        self,
        row: AttemptRow | None,
        event: SealEvent,
        verdict: Verdict,
        members: dict[str, Member],
        votes: dict[str, Vote],
    ) -> list[str]:
        """One line for each thing.

        Args:
            row: the attempt in this spool, None where it has no part in it.
            event: what sealed it.
            verdict: on what is in the store.
            members: all that are registered.
            votes: their newest ones.

        Raises:
            TransientStoreError: the store did not answer.
            IntegrityError: the run's log or a manifest in it is damaged.
        """
        own = self._voter.owes(row) if row is not None and not row.is_voted else []
        if row is None or not own:
            return [str(item) for item in verdict.missing]
        waiting = {
            path: file.evidence.rank
            for path, _, file in self._spool.files_of_attempt(row.id)
            if file.state is not FileState.STORED
        }
        vote, _ = self._voter.build(row)
        later = self._judge.assess(
            row.run, row.attempt, event, members, {**votes, self._member: vote}, waiting=waiting
        )
        return [*own, *(str(item) for item in later.missing)]

    def is_lost(self, row: AttemptRow) -> bool:
        """Whether bytes that this member owes are lost for good: nobody writes them again."""
        if row.is_voted:
            return False
        waiting = self._spool.files_of_attempt(row.id, states=(FileState.QUIET,))
        return any(file.evidence.problem.startswith(POWER_LOST) for _, _, file in waiting)

    def is_own_work_left(self, row: AttemptRow) -> bool:
        """Whether what this member owes is only for the gateway itself to do."""
        if row.is_voted:
            return False
        files = [file for _, _, file in self._spool.files_of_attempt(row.id)]
        waiting = [file for file in files if file.state is not FileState.STORED]
        handles = self._spool.handles_of_attempt(row.id)
        return (
            bool(waiting)
            and all(handle.is_closed for handle in handles)
            and all(f.state is not FileState.OPEN and not f.evidence.problem for f in waiting)
        )
