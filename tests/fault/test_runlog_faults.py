"""Every store call of a script of appends by two members fails once, in every way.

I3, I6, I7, I10: what was told to a caller never contradicts the log, the log stays dense, and after
repeating what was told to be unknown it holds what it would hold without the fault.
"""

from __future__ import annotations

from itertools import count

import pytest

from ckptgate.engine.runlog import RunLog
from ckptgate.errors import RefusedError, TransientStoreError
from ckptgate.model.documents import digest_of, encode
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Fence,
    LogRecord,
    Published,
    Seal,
    SealEvent,
    decode_record,
)
from ckptgate.model.layout import log_key
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore

MANIFEST = digest_of(b"manifest")
REPEATS_MAX = 5


def fence(state):
    if state.generation_of("run:j") is not None:
        return None
    return Fence(generation=state.generation + 1, job_key="run:j")


def seal(state):
    if "x.0" in state.attempts:
        return None
    return Seal(attempt="x.0", name="x", generation=state.generation, event=SealEvent.RENAME)


def close(state):
    return Close(attempt="x.0") if state.attempts["x.0"].state == "sealed" else None


def commit(state):
    if state.attempts["x.0"].state != "closed":
        return None
    return Commit(attempt="x.0", name="x", manifest=MANIFEST)


def abort(state):
    if state.attempts["x.0"].state == "aborted":
        return None
    return Abort(attempt="x.0", reason="deadline")  # refused if it is committed


def published(state):
    view = state.attempts["x.0"]
    return None if view.is_published or view.state != "committed" else Published(attempt="x.0")


SCRIPT = [
    ("a", fence),
    ("b", fence),
    ("b", seal),
    ("a", seal),
    ("a", close),
    ("b", commit),
    ("a", abort),
    ("b", published),
    ("a", published),
]
KINDS = ["Fence", "Seal", "Close", "Commit", "Published"]


def make_logs(store, seed=0):
    return {
        name: RunLog(
            store, "run", clock=ManualClock(), ids=SeededIds(seed + i), member=f"{name}-0000000{i}"
        )
        for i, name in enumerate("ab")
    }


def stored_records(store) -> list[LogRecord]:
    """The log as it is, read without the code under test; fails if it isn't a chain."""
    records, previous = [], ""
    names = store.children("run/.ckptgate/log")
    assert names == [f"{index:010d}.json" for index in range(len(names))]
    for index in range(len(names)):
        data = store.get(log_key("run", index))
        records.append(decode_record(data, index=index, previous=previous, subject=str(index)))
        previous = digest_of(data)
    return records


def run_script(logs, plan, *, land_after: int) -> list[tuple[str, LogRecord | None]]:
    """Do all steps, each again while its outcome is unknown; what was told."""
    told, calls = [], 0
    for who, decide in SCRIPT:
        for _ in range(REPEATS_MAX):
            try:
                told.append((decide.__name__, logs[who].append(decide)))
                break
            except RefusedError:
                told.append((f"{decide.__name__} refused", None))
                break
            except TransientStoreError:
                continue
            finally:
                calls += 1
                if calls >= land_after:
                    plan.land()
        else:
            pytest.fail("never resolved")
    return told


def check(store, told) -> None:
    records = stored_records(store)
    for what, record in told:
        if record is not None:
            assert encode(records[record.index]) == encode(record), what
    assert len({record.write_id for record in records}) == len(records)
    assert [type(record.entry).__name__ for record in records] == KINDS
    assert ("abort refused", None) in told


@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_any_failed_call_leaves_a_true_log(when, is_lasting):
    for at in count(1):
        store, plan = MemoryStore(), FaultPlan(at=at, when=when, is_lasting=is_lasting)
        logs = make_logs(FaultyStore(store, plan))
        told = run_until_back(logs, plan) if is_lasting else run_script(logs, plan, land_after=0)
        if not plan.is_spent:
            assert at > 20
            return
        check(store, told)


def run_until_back(logs, plan):
    told = []
    for who, decide in SCRIPT:
        for _ in range(REPEATS_MAX):
            try:
                told.append((decide.__name__, logs[who].append(decide)))
                break
            except RefusedError:
                told.append((f"{decide.__name__} refused", None))
                break
            except TransientStoreError:
                plan.end()
    return told


@pytest.mark.parametrize("land_after", [1, 2, 3, 6, 100])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_request_that_lands_late_leaves_a_true_log(land_after, is_lasting):
    creates = frozenset({"create"})
    for at in count(1):
        store = MemoryStore()
        plan = FaultPlan(at=at, when="delay", calls=creates, is_lasting=is_lasting)
        logs = make_logs(FaultyStore(store, plan))
        told = (
            run_until_back(logs, plan)
            if is_lasting
            else run_script(logs, plan, land_after=land_after)
        )
        plan.land()
        if not plan.is_spent:
            assert at > 5
            return
        check(store, told)


@pytest.mark.parametrize("when", ["before", "after", "delay"])
def test_a_crash_at_any_call_and_a_restart_reach_the_same_log(when):
    """I10."""
    for at in count(1):
        store = MemoryStore()
        plan = FaultPlan(at=at, when=when, error=CrashError)
        logs = make_logs(FaultyStore(store, plan))
        try:
            told = run_script(logs, plan, land_after=10**6)
        except CrashError:
            told = run_script(make_logs(store, seed=10), plan, land_after=at % 4)
        plan.land()
        check(store, told)
        if plan.count < at:
            assert at > 20
            return
