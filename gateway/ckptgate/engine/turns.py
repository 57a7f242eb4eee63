"""Whose turn it is to do what every member may do: read all votes, decide, publish.

It owns the rule that many members don't all do it. Who the log names does it at once. Should that
one be dead, the others follow in an order that all derive alike, each after twice the wait of the
one before; those who are left after a long time, spread over as long again. So few members ever
read what all have written, and any survivor finishes in the end. It is only a matter of how much is
asked of the store: whoever acts out of turn does no harm.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptgate.model.documents import digest_of

__all__ = ["Turns"]

PLACES_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class _Place:
    """This member's place among *count* that may follow."""

    index: int
    count: int


class Turns:
    """One member's turns.

    Args:
        member: its id.
        member_ids: who is registered for an attempt (run and id): one listing of the store.
        first_wait_s: how long the first of the others waits.
        doubled_until_s: when the doubling ends, and all that are left follow one by one.
    """

    def __init__(
        self,
        *,
        member: str,
        member_ids: Callable[[str, str], list[str]],
        first_wait_s: float,
        doubled_until_s: float,
    ) -> None:
        self._member = member
        self._member_ids = member_ids
        self._first_wait_s = first_wait_s
        self._doubled_until_s = doubled_until_s
        self._places: OrderedDict[tuple[str, str, str], _Place] = OrderedDict()

    def is_mine(self, run: str, attempt: str, first: str, waited_s: float) -> bool:
        """Whether it is this member's turn, which has waited for so long.

        Args:
            run: the run.
            attempt: what is to be done something about.
            first: the member whose turn it is at once, "" for none.
            waited_s: seconds since it could have been done.

        Raises:
            TransientStoreError, IntegrityError: the members can't be listed.
        """
        if first == self._member:
            return True
        # So early nobody else's turn has come: nothing has to be listed.
        return waited_s >= self._first_wait_s and waited_s >= self._wait_s(run, attempt, first)

    def _wait_s(self, run: str, attempt: str, first: str) -> float:
        place = self._place(run, attempt, first)
        # Beyond any limit anyway, and 2.0**4096 is no number.
        doubled_s = self._first_wait_s * 2.0 ** min(place.index, 64)
        if doubled_s <= self._doubled_until_s:
            return doubled_s
        return self._doubled_until_s * (1 + place.index / place.count)

    def _place(self, run: str, attempt: str, first: str) -> _Place:
        key = (run, attempt, first)
        if key not in self._places:
            others = {*self._member_ids(run, attempt), self._member} - {first}
            order = sorted(others, key=lambda member: digest_of(f"{attempt}\0{member}".encode()))
            self._places[key] = _Place(order.index(self._member), len(order))
            while len(self._places) > PLACES_KEPT:
                self._places.popitem(last=False)
        return self._places[key]
