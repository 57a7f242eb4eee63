"""Deliberately broken engines: each breaks one rule of DESIGN, and the checker must notice.

A flaw is a function that patches the engine through `monkeypatch`; beside it are a pattern of what
the checker is to say, and the first seed to look at: rare ones begin near one that shows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest
from tests.sim import faults

from ckptgate.engine import incarnations, judge, publish, runlog, seals
from ckptgate.engine.membership import Membership
from ckptgate.errors import ExistsError, TransientStoreError
from ckptgate.model import closure, rules
from ckptgate.model.entries import Seal, SealEvent
from ckptgate.model.fold import FoldedPointer, FoldedRun
from ckptgate.model.layout import log_key
from ckptgate.vfs import waits

__all__ = ["FLAWS"]

Patch = Callable[[pytest.MonkeyPatch], None]


def _votes_before_the_seal_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(closure, "_unfinished_votes", lambda _members, _votes, _who: iter(()))


def _an_absent_slot_is_a_lost_race(patch: pytest.MonkeyPatch) -> None:
    """404 on read-back is a failure: the next slot is taken for the same entry."""

    def take(self: Any, written: Any) -> bool:
        for index in (written.index, written.index + 1):
            try:
                self._store.create(log_key(self.run, index), written.data)
            except (TransientStoreError, ExistsError):
                continue
            if index == written.index:
                self._fold(written.data)
            return True
        msg = "no slot"
        raise TransientStoreError(msg)

    patch.setattr(runlog.RunLog, "_take_slot", take)


def _no_reply_of_put_is_success(patch: pytest.MonkeyPatch) -> None:
    def careless(store: Any, files: Any, _mode: object) -> dict[str, OSError]:
        for key, source in files.items():
            with contextlib.suppress(TransientStoreError):
                store.put(key, source)
        return {}

    patch.setattr(faults, "put_each", careless)


def _no_reply_of_registration_is_success(patch: pytest.MonkeyPatch) -> None:
    register = Membership._register

    def careless(self: Any, row: Any) -> None:
        try:
            register(self, row)
        except TransientStoreError:
            return

    patch.setattr(Membership, "_register", careless)


def _pointers_follow_the_last_commit(patch: pytest.MonkeyPatch) -> None:
    def move(self: Any, value: Any, source: int) -> None:
        self.pointers[value.pointer] = FoldedPointer(value, source)

    patch.setattr(FoldedRun, "_move", move)


def _older_incarnations_may_seal(patch: pytest.MonkeyPatch) -> None:
    def fenced(_self: Any, _row: Any) -> bool:
        return False

    def seal(self: Any, row: Any) -> bool:
        def decide(state: Any) -> Any:
            if row.attempt in state.attempts:
                return None
            return Seal(
                attempt=row.attempt,
                name=row.name,
                generation=state.generation,
                event=SealEvent(row.event),
            )

        return self._logs.get(row.run).append(decide) is not None

    patch.setattr(seals.Sealer, "_is_fenced", fenced)
    patch.setattr(seals.Sealer, "_seal", seal)


def _deleted_data_goes_before_the_log_says_so(patch: pytest.MonkeyPatch) -> None:
    retire = publish.Publication._retire_one

    def hasty(self: Any, log: Any, tomb: Any) -> bool:
        self._store.unpublish(log.run, tomb.name, tomb.attempt)
        return retire(self, log, tomb)

    patch.setattr(publish.Publication, "_retire_one", hasty)


def _an_older_seal_may_replace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules.RunState, "is_superseded", lambda _self, _attempt: False)


def _the_dead_may_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(incarnations.Incarnations, "_is_over", lambda _self, _row: False)


def _late_members_of_revisions_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waits, "_is_unproved", lambda _ctx, _row: False)


def _silence_seals_half_a_revision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(judge.Judge, "half_rewritten", lambda *_args: ())


FLAWS: Final[dict[str, tuple[Patch, str, int]]] = {
    "votes before the SEAL count": (_votes_before_the_seal_count, "I1|I6", 0),
    "404 on read-back is failure": (_an_absent_slot_is_a_lost_race, "I7|Integrity", 0),
    "no reply of put is success": (_no_reply_of_put_is_success, "I1", 0),
    "no reply of registration is success": (_no_reply_of_registration_is_success, "I1|I6|I12", 0),
    "pointers follow the last COMMIT": (_pointers_follow_the_last_commit, "I5", 376),
    "older incarnations may seal": (_older_incarnations_may_seal, "I4", 0),
    "deleted data goes before the log": (_deleted_data_goes_before_the_log_says_so, "I9", 0),
    "an older seal may replace": (_an_older_seal_may_replace, "I2", 0),
    "the dead may fence": (_the_dead_may_fence, "I12", 195),
    "late members of revisions": (_late_members_of_revisions_are_not_waited_for, "I1|I8", 0),
    "silence seals half a revision": (_silence_seals_half_a_revision, "I1|I8", 305),
}
"""What is wrong -> how it is built in, what the checker says, and the first seed."""
