"""Who takes part in an attempt and what each said: member, vote and name-operation objects.

They are immutable, so each is read once; a member's votes and name operations are dense lists, read
by number until absent, from the last one known.

Thread rule: any thread; store calls are made outside the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ckptgate.engine.manifests import check_entry_keys
from ckptgate.errors import IntegrityError, InvalidNameError, MissingError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES, Member, NameOp, Vote, decode
from ckptgate.model.ids import check_member_id
from ckptgate.model.layout import (
    member_key,
    members_prefix,
    movers_prefix,
    names_key,
    vote_key,
)
from ckptgate.ports.store import Records

__all__ = ["Rolls"]

ATTEMPTS_KEPT: Final = 8
"""Attempts whose members and newest votes stay in memory."""
MEMBERS_MAX: Final = 65536
_SUFFIX: Final = ".json"

_D = TypeVar("_D", Vote, NameOp)


@dataclass(slots=True)
class _Roll:
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    votes: dict[str, Vote] = field(default_factory=dict[str, Vote])


class Rolls:
    """The members of attempts and their newest votes, as the store has them. Any thread."""

    def __init__(self, store: Records) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._rolls: OrderedDict[tuple[str, str], _Roll] = OrderedDict()

    def members(self, run: str, attempt: str) -> dict[str, Member]:
        """All registered members, by id: one listing, and one read for each new one.

        Raises:
            IntegrityError: a member object is torn, edited, or under another's name.
            TransientStoreError: the store did not answer.
        """
        known = self._roll(run, attempt).members
        result: dict[str, Member] = {}
        for member in self.member_ids(run, attempt):
            document = known.get(member) or self._read_member(run, attempt, member)
            known[member] = document
            result[member] = document
        return result

    def member_ids(self, run: str, attempt: str) -> list[str]:
        """Ids of all registered members, sorted: one listing. Raises as `members`."""
        return self._listed(members_prefix(run, attempt))

    def movers(self, run: str, attempt: str) -> list[str]:
        """Ids of the members that renamed or removed a directory. Raises as `members`."""
        return self._listed(movers_prefix(run, attempt))

    def _listed(self, prefix: str) -> list[str]:
        names = self._store.children(prefix)
        if len(names) > MEMBERS_MAX:
            msg = f"{prefix} lists {len(names)} members, at most {MEMBERS_MAX} are possible"
            raise IntegrityError(msg, subject=prefix)
        return [_member_of(name, prefix) for name in names]

    def forget(self, run: str, attempt: str) -> None:
        """The attempt is decided: what its members said isn't asked for again."""
        with self._lock:
            self._rolls.pop((run, attempt), None)

    def newest_votes(
        self,
        run: str,
        attempt: str,
        members: Iterable[str],
        known_counts: Callable[[str], int] = lambda _member: 0,
        *,
        is_waiting: bool = False,
    ) -> dict[str, Vote]:
        """The newest vote of each of *members* that has one.

        Args:
            run: the run's path.
            attempt: which attempt.
            members: whose votes.
            known_counts: how many votes of a member are known to exist, to begin there.
            is_waiting: a final vote that is known is taken for the newest, as long as others are
                waited for; what is decided in the end is read without it.

        Raises:
            IntegrityError: a vote is torn, edited, hostile, or another's; names its key.
            TransientStoreError: the store did not answer.
        """
        votes = self._roll(run, attempt).votes
        result: dict[str, Vote] = {}
        asked = list(members)
        final = {member for member in asked if member in votes and votes[member].is_final}
        skipped = final if is_waiting and len(final) < len(asked) else frozenset[str]()
        for member in asked:
            if member in skipped:
                result[member] = votes[member]
                continue
            newest = self._newest_vote(run, attempt, member, votes.get(member), known_counts)
            if newest is not None:
                votes[member] = newest
                result[member] = newest
        return result

    def name_ops(self, run: str, attempt: str, member: str, start: int) -> list[NameOp]:
        """The member's name operations from number *start* on, in order.

        Raises:
            IntegrityError: one is torn, edited, hostile, or another's; names its key.
            TransientStoreError: the store did not answer.
        """
        found: list[NameOp] = []
        while True:
            n = start + len(found)
            key = names_key(run, attempt, member, n)
            document = self._numbered(key, NameOp, attempt, member, n)
            if document is None:
                return found
            found.append(document)

    def _newest_vote(
        self,
        run: str,
        attempt: str,
        member: str,
        newest: Vote | None,
        known_counts: Callable[[str], int],
    ) -> Vote | None:
        n = max(0, known_counts(member) - 1) if newest is None else newest.n + 1
        while True:
            key = vote_key(run, attempt, member, n)
            vote = self._numbered(key, Vote, attempt, member, n)
            if vote is None and newest is None and n > 0:
                msg = f"{key} is missing, but it was there before"
                raise IntegrityError(msg, subject=key)
            if vote is None:
                return newest
            check_entry_keys(vote.entries, subject=key)
            newest = vote
            n += 1

    def _numbered(self, key: str, kind: type[_D], attempt: str, member: str, n: int) -> _D | None:
        try:
            data = self._store.get(key, limit=MAX_DOCUMENT_BYTES)
        except MissingError:
            return None
        document = decode(data, kind, subject=key)
        if (document.attempt, document.member, document.n) != (attempt, member, n):
            msg = (
                f"{key} says that it is number {document.n} of {document.member!r} "
                f"in {document.attempt!r}"
            )
            raise IntegrityError(msg, subject=key)
        return document

    def _read_member(self, run: str, attempt: str, member: str) -> Member:
        key = member_key(run, attempt, member)
        document = decode(self._store.get(key, limit=MAX_DOCUMENT_BYTES), Member, subject=key)
        if (document.attempt, document.member) != (attempt, member):
            msg = f"{key} says that it is {document.member!r} in {document.attempt!r}"
            raise IntegrityError(msg, subject=key)
        return document

    def _roll(self, run: str, attempt: str) -> _Roll:
        with self._lock:
            roll = self._rolls.setdefault((run, attempt), _Roll())
            self._rolls.move_to_end((run, attempt))
            while len(self._rolls) > ATTEMPTS_KEPT:
                self._rolls.popitem(last=False)
            return roll


def _member_of(name: str, prefix: str) -> str:
    member = name.removesuffix(_SUFFIX)
    try:
        if member != name:
            return check_member_id(member)
    except InvalidNameError:
        pass
    msg = f"{prefix} holds {name!r}, which is no member's object"
    raise IntegrityError(msg, subject=prefix)
