"""The publisher's loop: everything that is to be done, derived from the spool and the logs.

It owns the rule that one failing attempt, run or file never stops the others, and that no step
depends on a variable: a new publisher on the same spool goes on where the old one was.

Thread rule: `step` and `run` belong to one thread; `request_abort` and `sweep` may come from any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from ckptgate.engine.contact import StoreContact
from ckptgate.engine.decide import OWN_WORK_FACTOR, Decider
from ckptgate.engine.events import Events
from ckptgate.engine.evict import Evictor
from ckptgate.engine.jobs import Backoff
from ckptgate.engine.judge import Judge
from ckptgate.engine.membership import Membership
from ckptgate.engine.mirror import Mirror
from ckptgate.engine.node import Node
from ckptgate.engine.phases import PhaseClock
from ckptgate.engine.progress import Progress
from ckptgate.engine.publish import Publication
from ckptgate.engine.reclaimer import Reclaimer
from ckptgate.engine.runlog import RunLog, RunLogs
from ckptgate.engine.seals import Sealer
from ckptgate.engine.settings import PublisherSettings
from ckptgate.engine.sightings import Reclaimed
from ckptgate.engine.staging import Stager
from ckptgate.engine.turns import Turns
from ckptgate.engine.uploads import Uploader
from ckptgate.engine.votes import Voter
from ckptgate.errors import CkptError, TransientStoreError
from ckptgate.model.states import UNDECIDED
from ckptgate.ports.catalog import Invalidations
from ckptgate.ports.clock import Clock, Ids
from ckptgate.ports.meters import NO_METERS, Meters
from ckptgate.ports.spool import AttemptRow, Spool
from ckptgate.ports.store import Store

__all__ = ["Publisher"]

_log = logging.getLogger(__name__)

_MIN_PAUSE_S: Final = 0.005
_PAUSE_FACTOR: Final = 4
_STILL_SHARE: Final = 0.1
"""Of the time in which nothing moved, until the next look while something is undecided."""

_DURABLE_INTERVAL_S: Final = 1.0


class Publisher:
    """One node's publisher."""

    def __init__(  # noqa: PLR0913 -- the composition root names each part
        self,
        *,
        store: Store,
        spool: Spool,
        logs: RunLogs,
        membership: Membership,
        clock: Clock,
        ids: Ids,  # noqa: ARG002 -- part of every engine's set of ports
        member: str,
        events: Events,
        invalidations: Invalidations,
        settings: PublisherSettings,
        meters: Meters = NO_METERS,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.progress = Progress(clock)
        """How fast saves go; any thread."""
        phases = PhaseClock(spool=spool, clock=clock, membership=membership, meters=meters)
        node = Node(
            store=store,
            spool=spool,
            logs=logs,
            membership=membership,
            clock=clock,
            member=member,
            events=events,
            invalidations=invalidations,
            settings=settings,
            turns=Turns(
                member=member,
                member_ids=membership.member_ids,
                first_wait_s=settings.survivor_delay_s,
                doubled_until_s=(OWN_WORK_FACTOR + 1) * settings.commit_deadline_s,
            ),
            meters=meters,
            phases=phases,
            progress=self.progress,
            wake=wake,
        )
        self._spool = spool
        self._logs = logs
        self._membership = membership
        self._clock = clock
        self._events = events
        self._settings = settings
        self.contact = StoreContact(node)
        """With the store; to look at it, any thread."""
        self._phases = phases
        self._stager = Stager(node)
        self._uploader = Uploader(node)
        self._voter = Voter(node)
        judge = Judge(store=store, logs=logs)
        self._sealer = Sealer(node, voter=self._voter, judge=judge)
        self._decider = Decider(node, voter=self._voter, judge=judge, sealer=self._sealer)
        self._publication = Publication(node, voter=self._voter)
        self._mirror = Mirror(node)
        self._evictor = Evictor(node)
        self._reclaimer = Reclaimer(node, self._runs)
        self._backoff: Backoff[str] = Backoff(clock, settings.retry_first_s, settings.retry_max_s)
        self._said: dict[str, str] = {}
        self._followed_at: dict[str, float] = {}
        self._is_busy = False
        self._is_deciding = False
        self._durable_at = clock.monotonic()

    def step(self) -> bool:
        """One pass over everything; True if anything was done."""
        return self._guard_all("the spool", self._pass)

    def _pass(self) -> bool:
        # Until it is known better, also if the spool can't be read.
        self._is_busy = True
        self._guard_all("the store", self.contact.step)
        did = self._guard_all("plain names", self._mirror.step)
        for row in self._undecided():
            did = self._guard("give up", row, self._decider.give_up) or did
            did = self._guard("join", row, self._introduce) or did
            did = self._guard("seal", row, self._seal_first) or did
        did = self._guard_all("digests", self._stager.step) or did
        did = self._guard_all("uploads", self._uploader.step) or did
        self._is_busy = False
        self._is_deciding = False
        for run in self._runs():
            did = self._guard_all(f"run {run or '/'}", partial(self._step_run, run)) or did
        self._is_busy = self._is_busy or bool(self._undecided())
        did = self._guard_all("room", self._evictor.step) or did
        return self._guard_all("reclaiming", self._reclaimer.step) or did

    def run(self, stop: threading.Event, wait: Callable[[float], object]) -> None:
        """Step until *stop* is set; *wait* sleeps up to that many seconds, less when woken."""
        moved_at = self._clock.monotonic()
        while not stop.is_set():
            began = self._clock.monotonic()
            did = self.step()
            if did:
                moved_at = began
                # Also keeps the journal short, which so stays within the room it has.
                self._guard_all("the spool's journal", self._make_durable)
            took_s = self._clock.monotonic() - began
            if did:
                pause_s = _MIN_PAUSE_S
            elif self._is_busy:
                # A look at very many files takes its time: it is done less often then. And while
                # nothing moves, many members must not all ask the store five times a second.
                most_s = self._settings.idle_interval_s
                if self._is_deciding:
                    most_s = min(most_s, self._settings.decide_interval_s)
                still_s = min(_STILL_SHARE * (began - moved_at), most_s)
                pause_s = max(self._settings.busy_interval_s, still_s, _PAUSE_FACTOR * took_s)
            else:
                pause_s = self._settings.idle_interval_s
            if not stop.is_set():
                wait(pause_s)

    def _make_durable(self) -> bool:
        now = self._clock.monotonic()
        if now - self._durable_at < _DURABLE_INTERVAL_S:
            return False
        self._durable_at = now
        self._spool.make_durable()
        return True

    def close(self) -> None:
        """Stop the digests and uploads that run; they are begun again by the next publisher."""
        self._stager.close()
        self._uploader.close()

    def request_abort(self, attempt_id: int, reason: str) -> None:
        """Give an undecided attempt of this spool up for good; see `Decider.request_abort`."""
        self._decider.request_abort(attempt_id, reason)

    def sweep(
        self, run: str | None, *, grace_s: float | None = None, is_dry: bool = False
    ) -> list[Reclaimed]:
        """Remove now what nothing refers to any more; see `Reclaimer.sweep`. Any thread."""
        # What this process dropped a moment ago is no left-over, and who asked wants the room now.
        self._spool.finish_removals()
        found = self._reclaimer.sweep(run, grace_s=grace_s, is_dry=is_dry)
        self._spool.finish_removals()
        return found

    def _undecided(self) -> list[AttemptRow]:
        return self._spool.attempts(states=UNDECIDED)

    def _runs(self) -> list[str]:
        return sorted({*self._spool.watched_runs(), *(row.run for row in self._undecided())})

    def _introduce(self, row: AttemptRow) -> bool:
        """Tell the other members of this one, and of its directories."""
        if row.state not in UNDECIDED:
            return False
        did = False
        if not row.is_joined:
            row = self._membership.join(row)
            did = row.is_joined
        if self._spool.name_ops(row.id) and row.state in UNDECIDED:
            left = len(self._spool.name_ops(row.id))
            self._membership.send_name_ops(row)
            did = len(self._spool.name_ops(row.id)) < left or did
        return did

    def _seal_first(self, row: AttemptRow) -> bool:
        """Seal what has its commit event before another job is introduced, whose FENCE forbids it.

        While the store was away both may have come here.
        """
        if not (row.event or row.detail) or not row.is_joined or row.seal_index >= 0:
            return False
        others = self._spool.attempts(run=row.run, states=UNDECIDED)
        if not any(o.id > row.id and o.job_key != row.job_key and not o.is_joined for o in others):
            return False
        self._logs.get(row.run).refresh()
        return self._decider.step(row)

    def _step_run(self, run: str) -> bool:
        rows = self._spool.attempts(run=run, states=UNDECIDED)
        log = self._logs.get(run)
        if rows or self._has_undecided(log) or self._is_follow_due(run):
            self._followed_at[run] = self._clock.monotonic()
            log.refresh()
        did = False
        for row in rows:
            did = self._guard("recheck", row, self._stager.recheck) or did
            did = self._guard("vote", row, self._voter.step) or did
            self._guard("phases", row, self._note_phases)
            did = self._guard("decide", row, self._decider.step) or did
            self._is_deciding = self._is_deciding or self._sealer.is_mine(row)
        others = partial(self._decider.step_others, run)
        did = self._guard_all(f"others in {run or '/'}", others) or did
        self._is_busy = self._is_busy or self._has_undecided(log)
        return self._publication.step(run) or did

    def _note_phases(self, row: AttemptRow) -> bool:
        self._phases.step(row)
        return False

    @staticmethod
    def _has_undecided(log: RunLog) -> bool:
        return log.look(lambda state: bool(state.undecided()))

    def _is_follow_due(self, run: str) -> bool:
        last = self._followed_at.get(run)
        if last is None:
            return True
        return self._clock.monotonic() - last >= self._settings.idle_interval_s

    def _guard(self, what: str, row: AttemptRow, action: Callable[[AttemptRow], bool]) -> bool:
        """Run *action* on the attempt as it is now; what keeps failing becomes its reason."""
        fresh = self._spool.attempt(row.id)
        if fresh is None:
            return False

        def act() -> bool:
            try:
                return action(fresh)
            except TransientStoreError:
                raise
            except CkptError as exc:
                self._give_reason(fresh, str(exc))
                raise

        name = f"{row.run or '/'}/{row.attempt or row.name}"
        return self._guard_all(f"{what} {name}", act)

    def _give_reason(self, row: AttemptRow, reason: str) -> None:
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is not None and now.state in UNDECIDED and now.reason != reason:
                self._spool.update_attempt(row.id, reason=reason)

    def _guard_all(self, subject: str, action: Callable[[], bool]) -> bool:
        """Run *action*; its failure is recorded, waited for, and stays its own."""
        if not self._backoff.is_due(subject):
            return False
        try:
            did = action()
        except CkptError as exc:
            self._failed(subject, exc)
        except Exception as exc:  # noqa: BLE001 -- the loop's outermost edge
            _log.exception("publisher-bug subject=%s", subject)
            self._failed(subject, exc)
        else:
            self._backoff.succeeded(subject)
            self._said.pop(subject, None)
            return did
        return False

    def _failed(self, subject: str, error: Exception) -> None:
        self._backoff.failed(subject)
        _log.warning("step-failed subject=%s error=%s", subject, error)
        # The store being away is no incident of each attempt; what is wrong with one is, once.
        if isinstance(error, TransientStoreError):
            self.contact.failed(error)
        elif self._said.get(subject) != str(error):
            self._said[subject] = str(error)
            self._events.record("step-failed", subject, str(error))
