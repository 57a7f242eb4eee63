"""Which attempt of a checkpoint a member takes part in.

It owns the choice: the newest attempt of the same shared job key is joined if it is open, else the
next number is taken by put-if-absent; who loses that race looks again.

Thread rule: any thread of either process; no lock is held over a store call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Final

from ckptgate.engine.runlog import RunLogs
from ckptgate.errors import ExistsError, IntegrityError, MissingError, TransientStoreError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES, Intent, decode, encode
from ckptgate.model.ids import make_attempt_id, split_attempt_id
from ckptgate.model.jobkey import OUTSIDE, JobKey
from ckptgate.model.layout import intent_key
from ckptgate.model.rules import AttemptPhase, RunState
from ckptgate.ports.clock import Clock, Ids
from ckptgate.ports.spool import JOINING_META, AttemptRow, Spool
from ckptgate.ports.store import Records

__all__ = ["Intents", "parse_key"]

CLAIMS_MAX: Final = 256
"""How often the race for a new attempt's number may be lost before the caller comes again."""
CLAIM_DELAY_S: Final = 0.02
INTENTS_KEPT: Final = 1024
"""Intents that stay in memory."""


class Intents:
    """The intents of attempts in the store. Any thread."""

    def __init__(
        self,
        *,
        store: Records,
        spool: Spool,
        logs: RunLogs,
        clock: Clock,
        ids: Ids,
        member: str,
    ) -> None:
        self._store = store
        self._spool = spool
        self._logs = logs
        self._clock = clock
        self._ids = ids
        self._member = member
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Intent] = OrderedDict()

    def claim(
        self, row: AttemptRow, key: JobKey, generation: int, *, may_begin: bool
    ) -> AttemptRow:
        """Give the row its attempt: one that is joined, or a new one; the log must be fresh.

        Args:
            row: without an attempt.
            key: its job.
            generation: of that job.
            may_begin: False for a job that a newer one replaced: what it sealed is still joined,
                nothing is begun, and the row may come back as it is.

        Raises:
            TransientStoreError: the store did not answer, or too many others were faster.
            IntegrityError: an intent is torn or edited.
        """
        for lost in range(CLAIMS_MAX):
            proposed = self._proposed(row) if may_begin else None
            if proposed is None:
                # Read once: what another member of the job begins after this has the next number.
                newest, intent = self._newest_intent(row.run, row.name)
                own = self._newest_of_job(row, key, generation, intent)
                if own is not None and self._may_join(row, own):
                    proposed = own
                elif not may_begin:
                    return row
                else:
                    proposed = self._propose(row, key, generation, newest + 1)
            if proposed.member == self._member and not self._create_intent(row, proposed):
                self._pause(lost)
                continue
            claimed = self._record_claim(row, proposed.attempt)
            if claimed is not None:
                return claimed
        msg = f"{CLAIMS_MAX} numbers in a row of {row.run}/{row.name} went to other members"
        raise TransientStoreError(msg, subject=row.name)

    def _propose(self, row: AttemptRow, key: JobKey, generation: int, k: int) -> Intent:
        """Record the intent before it is written: after a crash the same bytes are tried again."""
        intent = Intent(
            attempt=make_attempt_id(row.name, k),
            job_key=str(key),
            is_shared=key.is_shared,
            generation=generation,
            member=self._member,
            created_at=self._clock.now(),
            world_size=row.world_size,
            base=self._base_of(row),
        )
        self._spool.set_meta(_meta_key(row), encode(intent).decode())
        return intent

    def _proposed(self, row: AttemptRow) -> Intent | None:
        text = self._spool.get_meta(_meta_key(row))
        if not text:
            return None
        return decode(text.encode(), Intent, subject=f"spool {_meta_key(row)}")

    def _create_intent(self, row: AttemptRow, intent: Intent) -> bool:
        """Whether the store has exactly this intent; False: its number went to another."""
        try:
            self._store.create(intent_key(row.run, intent.attempt), encode(intent))
        except ExistsError:
            self._spool.drop_meta(_meta_key(row))
            return False
        return True

    def _record_claim(self, row: AttemptRow, attempt: str) -> AttemptRow | None:
        """Write the attempt's id into the row; None: another row of this spool has it."""
        with self._spool.transaction():
            self._spool.drop_meta(_meta_key(row))
            holder = self._spool.attempt_by_id(row.run, attempt)
            if holder is not None and holder.id != row.id:
                return None
            return self._spool.update_attempt(row.id, attempt=attempt)

    def _newest_of_job(
        self, row: AttemptRow, key: JobKey, generation: int, newest: Intent | None
    ) -> Intent | None:
        """The newest attempt from *newest* down that the row's own job began, None without one."""
        if not key.is_shared:
            return None
        # A revision and a new save of the same name must not be mixed.
        base = self._base_of(row)
        of_job = self._of_job(row.run, newest, str(key), generation)
        return next((intent for intent in of_job if intent.base == base), None)

    def _of_job(
        self, run: str, newest: Intent | None, job_key: str, generation: int
    ) -> Iterator[Intent]:
        """What a shared job began under a name, from *newest* down.

        Attempts of other jobs above it count for nothing: an old incarnation that goes on writing
        must not split a new one's save into two attempts.
        """
        intent = newest
        while intent is not None:
            if intent.is_shared and intent.job_key == job_key:
                yield intent
            name, k = split_attempt_id(intent.attempt)
            # What was sealed by an older generation is older than all that this job began.
            if k == 0 or self._is_history(run, intent, generation):
                return
            intent = self._intent(run, make_attempt_id(name, k - 1))

    def _is_history(self, run: str, intent: Intent, generation: int) -> bool:
        def judge(state: RunState) -> bool:
            view = state.attempts.get(intent.attempt)
            return view is not None and view.seal_index >= 0 and view.generation < generation

        return self._logs.get(run).look(judge)

    def _may_join(self, row: AttemptRow, intent: Intent) -> bool:
        holder = self._spool.attempt_by_id(row.run, intent.attempt)
        return (holder is None or holder.id == row.id) and self._is_open(row.run, intent)

    def _is_open(self, run: str, intent: Intent) -> bool:
        """Whether members may still join: not closed, not decided, not fenced off."""

        def judge(state: RunState) -> bool:
            view = state.attempts.get(intent.attempt)
            if view is not None:
                return view.state is AttemptPhase.SEALED
            return intent.generation == state.generation

        return self._logs.get(run).look(judge)

    def _newest_intent(self, run: str, name: str) -> tuple[int, Intent | None]:
        """The highest number of an attempt at *name* and its intent; (-1, None) if none is there.

        The numbers are dense, so they are read upwards until one is absent. What the log knows
        saves reading the first ones, and is never taken again, should its intent be gone.
        """
        k = self._logs.get(run).look(lambda state: state.highest_number(name))
        intent = self._intent(run, make_attempt_id(name, k)) if k >= 0 else None
        while True:
            following = self._intent(run, make_attempt_id(name, k + 1))
            if following is None:
                return k, intent
            k, intent = k + 1, following

    def _intent(self, run: str, attempt: str) -> Intent | None:
        """The attempt's intent; it never changes, so it is read once."""
        key = intent_key(run, attempt)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        intent = self._read_intent(key, attempt)
        if intent is not None:
            with self._lock:
                self._known[key] = intent
                while len(self._known) > INTENTS_KEPT:
                    self._known.popitem(last=False)
        return intent

    def _read_intent(self, key: str, attempt: str) -> Intent | None:
        try:
            data = self._store.get(key, limit=MAX_DOCUMENT_BYTES)
        except MissingError:
            return None
        intent = decode(data, Intent, subject=key)
        if intent.attempt != attempt:
            msg = f"{key} says that it is attempt {intent.attempt!r}"
            raise IntegrityError(msg, subject=key)
        return intent

    def _base_of(self, row: AttemptRow) -> str:
        base = self._spool.attempt(row.base) if row.base is not None else None
        return base.attempt if base is not None else ""

    def open_intent(self, run: str, name: str, job_key: str) -> Intent | None:
        """The intent of the open attempt at *name* that this shared job began, None without one."""
        log = self._logs.get(run)
        generation = log.look(lambda state: state.generation_of(job_key))
        if generation is None:
            return None
        _, newest = self._newest_intent(run, name)
        sealed = log.look(lambda state: _sealed_as(state, name))
        renamed = (self._intent(run, attempt) for attempt in reversed(sealed))
        for intent in chain(self._of_job(run, newest, job_key, generation), renamed):
            if intent is None:
                continue
            is_ours = intent.is_shared and intent.job_key == job_key
            if is_ours and self._is_open(run, intent):
                return intent
        return None

    def _pause(self, lost: int) -> None:
        if lost:
            share = 0.5 + int(self._ids.suffix(), 16) / 2**33
            self._clock.sleep(CLAIM_DELAY_S * min(lost, 32) * share)


def parse_key(text: str) -> JobKey:
    """The job key that a row's text is; nobody's for ""; IntegrityError if it is none."""
    try:
        return JobKey.parse(text) if text else OUTSIDE
    except ValueError as exc:
        raise IntegrityError(str(exc), subject=text) from exc


def _meta_key(row: AttemptRow) -> str:
    return JOINING_META.format(attempt=row.id)


def _sealed_as(state: RunState, name: str) -> list[str]:
    """What is sealed under this name and not closed, oldest first."""
    views = (state.attempts[attempt] for attempt in state.undecided())
    return [v.attempt for v in views if v.state is AttemptPhase.SEALED and v.name == name]
