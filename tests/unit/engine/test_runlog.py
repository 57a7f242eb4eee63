"""The decision log in the store: dense, immutable, and never in contradiction to what was told."""

from __future__ import annotations

import threading

import pytest

from ckptgate.engine.runlog import RunLog, RunLogs
from ckptgate.errors import FullError, IntegrityError, RefusedError, TransientStoreError
from ckptgate.model.documents import digest_of, encode
from ckptgate.model.entries import Abort, Close, Fence, LogRecord, Seal, SealEvent
from ckptgate.model.layout import log_key
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate.testing.faults import FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore


def make_log(store, seed=0, run="run") -> RunLog:
    return RunLog(store, run, clock=ManualClock(), ids=SeededIds(seed), member=f"host-{seed:08x}")


def added(log, decide) -> LogRecord:
    record: LogRecord | None = log.append(decide)
    assert record is not None
    return record


def fence(job):
    def decide(state):
        text = f"run:{job}"
        if state.generation_of(text) is not None:
            return None
        return Fence(generation=state.generation + 1, job_key=text)

    return decide


def seal(attempt):
    name = attempt.rpartition(".")[0]
    return lambda state: Seal(
        attempt=attempt, name=name, generation=state.generation, event=SealEvent.EXPLICIT
    )


def test_what_one_appends_the_other_folds(store):
    a, b = make_log(store), make_log(store, 1)
    assert added(a, fence("j")).index == 0
    assert b.append(fence("j")) is None
    assert added(b, seal("x.0")).index == 1
    assert a.refresh().attempts["x.0"].state == "sealed"
    assert a.state.last_digest == b.state.last_digest


def test_an_entry_against_the_rules_takes_no_slot(store):
    """I4: no COMMIT without SEAL and CLOSE; CLOSE without SEAL is as bad."""
    log = make_log(store)
    with pytest.raises(RefusedError):
        log.append(lambda _: Close(attempt="x.0"))
    assert make_log(store).refresh().length == 0


def test_refresh_reads_new_slots_only(store):
    log = make_log(store)
    for i in range(10):
        log.append(fence(f"j{i}"))
    plan = FaultPlan(at=0)
    other = make_log(FaultyStore(store, plan), 1)
    other.refresh()
    assert plan.count == 11
    other.refresh()
    assert plan.count == 12


def test_writers_at_once_take_each_its_own_slot(store):
    """I7: the log is dense, whoever writes."""
    logs = [make_log(store, seed) for seed in range(4)]

    def write(log, seed):
        for i in range(8):
            log.append(fence(f"{seed}-{i}"))

    threads = [threading.Thread(target=write, args=(log, i)) for i, log in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = make_log(store, 9).refresh()
    assert state.length == 32
    assert sorted(state.fences.values()) == list(range(1, 33))


def test_one_log_is_shared_by_threads(store):
    log = make_log(store)
    threads = [threading.Thread(target=lambda i=i: log.append(fence(f"j{i}"))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make_log(store, 1).refresh().length == 8


@pytest.mark.parametrize("at", [1, 40, -2])
def test_a_changed_byte_in_a_record_is_refused_by_name(at):
    """I13, I7."""
    store = MemoryStore()
    log = make_log(store)
    for i in range(3):
        log.append(fence(f"j{i}"))
    copy = MemoryStore()
    for index in range(3):
        data = bytearray(store.get(log_key("run", index)))
        if index == 1:
            data[at] ^= 1
        copy.create(log_key("run", index), bytes(data))
    # A byte of a text field is found by the successor, which quotes the digest.
    with pytest.raises(IntegrityError, match=r"log/000000000[12]\.json"):
        make_log(copy).refresh()


def test_a_torn_record_is_refused_by_name_and_other_runs_go_on():
    """I13."""
    store = MemoryStore()
    logs = RunLogs(store, ManualClock(), SeededIds(), "host-00000000")
    logs.get("good").append(fence("j"))
    store.create(log_key("bad", 0), b'{"entry":{"type":"FENCE"')
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"bad/\.ckptgate/log/0000000000\.json"):
            logs.get("bad").append(fence("j"))
    assert added(logs.get("good"), fence("k")).index == 1
    assert {log.run for log in logs.known()} == {"good", "bad"}


def test_a_record_against_the_rules_is_refused_by_name():
    """I4: a log that somebody wrote into without checking is not believed."""
    store = MemoryStore()
    make_log(store).append(fence("j"))
    record = LogRecord(
        index=1,
        previous=digest_of(store.get(log_key("run", 0))),
        write_id="0" * 32,
        member="host-00000000",
        at="2026-01-01T00:00:00.000Z",
        entry=Close(attempt="x.0"),
    )
    store.create(log_key("run", 1), encode(record))
    log = make_log(store, 1)
    with pytest.raises(IntegrityError, match=r"log/0000000001\.json"):
        log.refresh()
    assert log.state.length == 1


def test_a_deleted_record_is_found_before_its_slot_is_taken_again():
    """I7."""
    store, holed = MemoryStore(), MemoryStore()
    log = make_log(store)
    for i in range(3):
        log.append(fence(f"j{i}"))
    for index in (0, 2):
        holed.create(log_key("run", index), store.get(log_key("run", index)))
    with pytest.raises(IntegrityError, match=r"0000000001\.json is missing"):
        make_log(holed, 1).append(fence("new"))


def test_a_huge_record_is_refused_by_name():
    """I13."""
    store = MemoryStore()
    store.create(log_key("run", 0), b"[" * (5 * 1024 * 1024))
    with pytest.raises(IntegrityError, match=r"0000000000\.json"):
        make_log(store).refresh()


def test_a_lost_reply_is_found_to_be_ours():
    """I6."""
    store = MemoryStore()
    plan = FaultPlan(at=1, when="after", calls=frozenset({"create"}))
    record = added(make_log(FaultyStore(store, plan)), fence("j"))
    assert plan.is_spent
    assert encode(record) == store.get(log_key("run", 0))


def test_an_unknown_outcome_is_told_as_such_and_resolved_first():
    """I6: the record in doubt is written before anything else is decided."""
    store = MemoryStore()
    plan = FaultPlan(at=1, is_lasting=True, calls=frozenset({"create"}))
    log = make_log(FaultyStore(store, plan))
    with pytest.raises(TransientStoreError):
        log.append(fence("first"))
    assert log.refresh().length == 0
    plan.end()
    assert added(log, fence("second")).index == 1
    assert list(log.state.fences) == ["run:first", "run:second"]


def test_a_record_in_doubt_that_lost_its_slot_is_forgotten():
    """I6, I7."""
    store = MemoryStore()
    plan = FaultPlan(at=1, when="delay", is_lasting=True, calls=frozenset({"create"}))
    log = make_log(FaultyStore(store, plan))
    with pytest.raises(TransientStoreError):
        log.append(fence("mine"))
    make_log(store, 1).append(fence("theirs"))
    plan.end()
    assert list(log.refresh().fences) == ["run:theirs"]
    plan.land()  # the slot is taken: nothing happens
    assert added(log, fence("next")).index == 1
    assert list(make_log(store, 2).refresh().fences) == ["run:theirs", "run:next"]


def test_a_full_store_leaves_no_doubt():
    store = MemoryStore()
    plan = FaultPlan(at=1, error=lambda: FullError("full"), calls=frozenset({"create"}))
    log = make_log(FaultyStore(store, plan))
    with pytest.raises(FullError):
        log.append(fence("first"))
    assert added(log, fence("second")).index == 0


def test_an_abort_is_seen_before_a_commit_is_decided(store):
    """I3: the decision is made again on the newest state."""
    a, b = make_log(store), make_log(store, 1)
    a.append(fence("j"))
    a.append(seal("x.0"))
    seen = []

    def close(state):
        seen.append(state.attempts["x.0"].state)
        if seen[-1] != "sealed":
            return None
        if len(seen) == 1:  # somebody else is faster
            b.append(lambda _: Abort(attempt="x.0", reason="test"))
        return Close(attempt="x.0")

    assert a.append(close) is None
    assert seen == ["sealed", "aborted"]


def test_the_age_of_a_log_counts_from_the_read(store):
    clock = ManualClock()
    log = RunLog(store, "run", clock=clock, ids=SeededIds(), member="host-00000000")
    assert log.age_s() is None
    log.refresh_if_older(1.0)
    clock.advance(5.0)
    assert log.age_s() == 5.0
    log.refresh_if_older(10.0)
    assert log.age_s() == 5.0
    log.refresh_if_older(1.0)
    assert log.age_s() == 0.0
