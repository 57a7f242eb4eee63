"""A run's decision log in the store: read it, fold it, append to it.

It owns the rule that everything that decides is put-if-absent into the next slot, and that a lost
reply is neither success nor failure: the slot is read back until it is known whose record it holds.

Thread rule: any thread. One lock for each run is held over a whole refresh or append.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptgate.errors import (
    ExistsError,
    FullError,
    IntegrityError,
    MissingError,
    RefusedError,
    TransientStoreError,
    UnusableError,
)
from ckptgate.model.documents import digest_of, encode
from ckptgate.model.entries import Entry, LogRecord, decode_record
from ckptgate.model.layout import log_key
from ckptgate.model.rules import RunState
from ckptgate.ports.clock import Clock, Ids
from ckptgate.ports.store import Records

__all__ = ["RunLog", "RunLogs"]

_log = logging.getLogger(__name__)

RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
"""No log record is larger (an ABORT that names 10,000 missing shards takes about 1 MiB)."""
TRIES_MAX: Final = 6
"""How often one record is tried in its slot before the caller is told that nothing is known."""
CONFLICTS_MAX: Final = 512
"""How many slots in a row may be lost to others before the caller is told to come again."""
RETRY_DELAY_S: Final = 0.05
RETRY_DELAY_S_MAX: Final = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Written:
    """A record whose outcome is not known yet: exactly these bytes, in exactly this slot."""

    index: int
    data: bytes
    record: LogRecord


class RunLog:
    """The log of one run. Any thread.

    Attributes:
        state: what was folded so far. It changes under other threads: read it inside `look` or
            `append` wherever several of its parts must agree.
    """

    def __init__(self, store: Records, run: str, *, clock: Clock, ids: Ids, member: str) -> None:
        self.run = run
        self.state = RunState()
        self._store = store
        self._clock = clock
        self._ids = ids
        self._member = member
        self._lock = threading.RLock()
        self._doubt: _Written | None = None
        self._is_dense = False
        self._read_at: float | None = None

    def age_s(self) -> float | None:
        """Seconds since the log was last read to its end, None if it never was."""
        read_at = self._read_at
        return None if read_at is None else self._clock.monotonic() - read_at

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is unknown if the record that was sent last is in the log."""
        return self._doubt is not None

    def look(self, read: Callable[[RunState], _T]) -> _T:
        """What *read* makes of the folded state, while nobody changes it. No store call."""
        with self._lock:
            return read(self.state)

    def look_now(self, read: Callable[[RunState], _T]) -> _T | None:
        """As `look`, but None where that would have to wait for somebody's store call."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return read(self.state)
        finally:
            self._lock.release()

    def refresh(self) -> RunState:
        """Fold what is new in the store; reads new slots only, and writes nothing.

        A record in doubt is known afterwards if its slot is taken by now.

        Raises:
            IntegrityError: a stored record is torn, edited or against the rules; names its key.
            TransientStoreError: the store did not answer; what was folded stays.
        """
        with self._lock:
            started = self._clock.monotonic()
            self._fold_new()
            self._read_at = started
            return self.state

    def refresh_if_older(self, max_age_s: float) -> None:
        """As `refresh`, unless the log was read to its end less than *max_age_s* seconds ago.

        Threads that wait for a refresh that began after their call are served by it.
        """
        asked = self._clock.monotonic()
        read_at = self._read_at
        if read_at is not None and read_at > asked - max_age_s:
            # Without the lock: who holds it may be waiting for the store.
            return
        with self._lock:
            read_at = self._read_at
            if read_at is None or read_at <= asked - max_age_s:
                self.refresh()

    def read(self, max_age_s: float, look: Callable[[RunState], _T]) -> _T:
        """What *look* makes of the state as it was less than *max_age_s* seconds before this call.

        Threads that wait for a refresh that began after their call are served by it. What others
        do with the log right afterwards can't keep the caller from what was read for it.
        """
        asked = self._clock.monotonic()
        with self._lock:
            read_at = self._read_at
            if read_at is None or read_at <= asked - max_age_s:
                self.refresh()
            return look(self.state)

    def append(self, decide: Callable[[RunState], Entry | None]) -> LogRecord | None:
        """Append the entry that *decide* makes of the newest state.

        Args:
            decide: called with the state after everything that is new was folded, again whenever
                another writer took the slot. None means that nothing is to be done. It may not
                change the state.

        Returns:
            The record as it stands in the log, None if there was nothing to do.

        Raises:
            RefusedError: the rules forbid the entry; nothing was written.
            TransientStoreError: unknown whether the entry is in the log; the next call finds out
                first.
            IntegrityError: as `refresh`.
            FullError, UnusableError: the entry isn't in the log.
        """
        with self._lock:
            self._settle()
            for lost in range(CONFLICTS_MAX):
                self._fold_new()
                self._check_dense()
                entry = decide(self.state)
                if entry is None:
                    return None
                self.state.check(entry)
                written = self._prepare(entry)
                if self._take_slot(written):
                    return written.record
                self._pause(lost)
        msg = f"log of {self.run!r}: {CONFLICTS_MAX} slots in a row went to other writers"
        raise TransientStoreError(msg, subject=self.run)

    def _prepare(self, entry: Entry) -> _Written:
        record = LogRecord(
            index=self.state.length,
            previous=self.state.last_digest,
            write_id=self._ids.write_id(),
            member=self._member,
            at=self._clock.now(),
            entry=entry,
        )
        return _Written(record.index, encode(record), record)

    def _settle(self) -> None:
        """Find out what became of the record in doubt, trying it again where it isn't there."""
        if self._doubt is not None:
            _log.info("log-settle run=%s index=%d", self.run, self._doubt.index)
            self._take_slot(self._doubt)

    def _take_slot(self, written: _Written) -> bool:
        """Whether the slot holds *written* in the end; False: it holds another's record.

        In either case what the slot holds is folded on return.
        """
        was_in_doubt = self._doubt is written
        failure: TransientStoreError | ExistsError | None = None
        for tried in range(TRIES_MAX):
            # Set before the call: whatever ends this thread in it, the outcome is unknown.
            self._doubt = written
            try:
                self._store.create(log_key(self.run, written.index), written.data)
            except (TransientStoreError, ExistsError) as exc:
                failure, was_in_doubt = exc, True
            except (FullError, UnusableError):
                if not was_in_doubt:
                    self._doubt = None
                raise
            else:
                # Equal bytes are ours, also where an earlier try had landed.
                self._fold(written.data)
                return True
            held = self._read_back(written.index)
            if held is not None:
                self._fold(held)
                return held == written.data
            self._pause(tried)
        msg = f"unknown whether record {written.index} of the log of {self.run!r} was stored"
        raise TransientStoreError(msg, subject=self.run) from failure

    def _read_back(self, index: int) -> bytes | None:
        """What the slot holds; None: nothing is known (neither there nor provably absent)."""
        try:
            return self._store.get(log_key(self.run, index), limit=RECORD_BYTES_MAX)
        except (MissingError, TransientStoreError):
            return None

    def _fold_new(self) -> None:
        while True:
            key = log_key(self.run, self.state.length)
            try:
                data = self._store.get(key, limit=RECORD_BYTES_MAX)
            except MissingError:
                return
            self._fold(data)

    def _fold(self, data: bytes) -> None:
        """Fold the bytes of slot `state.length`; a record in doubt for that slot is known then."""
        index = self.state.length
        key = log_key(self.run, index)
        record = decode_record(data, index=index, previous=self.state.last_digest, subject=key)
        try:
            self.state.apply(record, digest_of(data))
        except (IntegrityError, RefusedError) as exc:
            msg = f"log record {key} breaks a rule: {exc}"
            hint = "compare the log with another node's or a backup's"
            raise IntegrityError(msg, subject=key, hint=hint) from exc
        if self._doubt is not None and self._doubt.index <= index:
            self._doubt = None

    def _check_dense(self) -> None:
        """Refuse, once, to write into a slot whose successor exists (a record was deleted)."""
        if self._is_dense:
            return
        index = self.state.length
        try:
            self._store.get(log_key(self.run, index + 1), limit=RECORD_BYTES_MAX)
        except MissingError:
            self._is_dense = True
            return
        # Others may have written both slots between the two reads.
        self._fold_new()
        if self.state.length == index:
            key = log_key(self.run, index)
            msg = f"log record {key} is missing, but its successor is there"
            raise IntegrityError(msg, subject=key, hint="restore it from a backup of the store")
        self._is_dense = True

    def _pause(self, tried: int) -> None:
        """Wait a little, longer after more tries, not in step with other writers."""
        if tried == 0:
            return
        delay = min(RETRY_DELAY_S_MAX, RETRY_DELAY_S * 2 ** min(tried, 10))
        self._clock.sleep(delay * (0.5 + int(self._ids.suffix(), 16) / 2**33))


class RunLogs:
    """The logs of all runs that this process looked at. Any thread."""

    def __init__(self, store: Records, clock: Clock, ids: Ids, member: str) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._member = member
        self._lock = threading.Lock()
        self._logs: dict[str, RunLog] = {}

    def get(self, run: str) -> RunLog:
        """The log of *run*; makes no store call."""
        with self._lock:
            log = self._logs.get(run)
            if log is None:
                log = RunLog(
                    self._store, run, clock=self._clock, ids=self._ids, member=self._member
                )
                self._logs[run] = log
            return log

    def known(self) -> list[RunLog]:
        """The logs that were asked for so far."""
        with self._lock:
            return list(self._logs.values())
