"""Deliberately broken engines: each breaks one rule of DESIGN, and the checker must notice.

A flaw is a function that patches the engine through `monkeypatch`; beside it are a pattern of what
the checker is to say, and where random plans hardly ever show it, plans that do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
from tests.sim import faults
from tests.sim.plans import Plan, plan_of
from tests.sim.trainers import Action, Script

from ckptgate.engine import incarnations, judge, publish, runlog, seals
from ckptgate.engine.membership import Membership
from ckptgate.errors import ExistsError, TransientStoreError
from ckptgate.model import closure, rules
from ckptgate.model.entries import Seal, SealEvent
from ckptgate.model.fold import FoldedPointer, FoldedRun
from ckptgate.model.layout import log_key
from ckptgate.vfs import waits

__all__ = ["FLAWS", "Flaw"]

Patch = Callable[[pytest.MonkeyPatch], None]
Jobs = tuple[Script, ...]


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


def _plan(seed: int, profile: str, jobs: Jobs, members: tuple[tuple[int, ...], ...]) -> Plan:
    """Jobs on two machines, one after the other."""
    return Plan(
        seed=seed,
        profile=profile,
        hosts=2,
        skews_s=(0.0, 0.0),
        jobs=jobs,
        members=members,
        is_careless=(False,) * len(jobs),
        starts_s=(0.0, None)[: len(jobs)],
        has_reader=False,
    )


def _older_and_newer(seed: int) -> Plan:
    """The older save waits for a machine that takes no part in the newer one."""
    older = (Action("save", "step-1", "dcp"), Action("point", "step-1", "text"))
    newer = (Action("save", "step-2", "dcp"), Action("point", "step-2", "text"))
    jobs = (older, (*newer, Action("wait", "20")))
    return _plan(seed, "absent", jobs, ((0, 1), (0,)))


def _old_and_anew(seed: int) -> Plan:
    """The same of one name."""
    save = Action("save", "step-1", "explicit")
    return _plan(seed, "absent", ((save,), (save, Action("wait", "20"))), ((0, 1), (0,)))


def _away_and_back(seed: int) -> Plan:
    """A machine whose job is over tells of it when others have begun."""
    jobs = ((Action("save", "step-1", "dcp"),), (Action("save", "step-2", "explicit"),))
    return _plan(seed, "absent", jobs, ((1,), (0,)))


def _half_anew(seed: int) -> Plan:
    """What is committed is saved again by a job that does not come to its end."""
    jobs = ((Action("save", "step-1", "dcp"),), (Action("save", "step-1", "dcp"),))
    return _plan(seed, ("killed", "crashing")[seed % 2], jobs, ((0, 1), (0, 1)))


def _hardly_registered(seed: int) -> Plan:
    """Nothing but that all are registered proves these saves whole."""
    jobs = (tuple(Action("save", f"step-{at}", "rename") for at in range(3)),)
    return _plan(seed, "stormy", jobs, ((0, 1),))


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """A broken rule.

    Attributes:
        build: builds it in.
        said: pattern of what the checker says.
        plan: histories that show it now and then; any do where it is not rare.
    """

    build: Patch
    said: str
    plan: Callable[[int], Plan] = plan_of


FLAWS: Final = {
    "votes before the SEAL count": Flaw(build=_votes_before_the_seal_count, said="I1|I6"),
    "404 on read-back is failure": Flaw(build=_an_absent_slot_is_a_lost_race, said="I7|Integrity"),
    "no reply of put is success": Flaw(build=_no_reply_of_put_is_success, said="I1"),
    "no reply of registration is success": Flaw(
        build=_no_reply_of_registration_is_success, said="I1|I6|I12", plan=_hardly_registered
    ),
    "pointers follow the last COMMIT": Flaw(
        build=_pointers_follow_the_last_commit, said="I5", plan=_older_and_newer
    ),
    "older incarnations may seal": Flaw(build=_older_incarnations_may_seal, said="I4"),
    "deleted data goes before the log": Flaw(
        build=_deleted_data_goes_before_the_log_says_so, said="I9"
    ),
    "an older seal may replace": Flaw(
        build=_an_older_seal_may_replace, said="I2", plan=_old_and_anew
    ),
    "the dead may fence": Flaw(build=_the_dead_may_fence, said="I12", plan=_away_and_back),
    "late members of revisions": Flaw(
        build=_late_members_of_revisions_are_not_waited_for, said="I1|I8"
    ),
    "silence seals half a revision": Flaw(
        build=_silence_seals_half_a_revision, said="I1|I8", plan=_half_anew
    ),
}
