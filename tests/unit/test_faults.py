"""The fault wrappers and the manual clock do what a fault loop relies on."""

from __future__ import annotations

import pytest

from ckptgate.errors import FullError, MissingError, TransientStoreError
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate.testing.faults import MUTATIONS, CrashError, FaultPlan, FaultyStore, When
from ckptgate_adapters.memory_store import MemoryStore


@pytest.mark.parametrize(("when", "is_there"), [("before", False), ("after", True)])
def test_the_planned_call_fails_and_no_other(when: When, is_there: bool) -> None:
    store, plan = MemoryStore(), FaultPlan(at=2, when=when)
    faulty = FaultyStore(store, plan)
    faulty.create("a", b"1")
    with pytest.raises(TransientStoreError):
        faulty.create("b", b"2")
    assert ("b" in store.children("")) is is_there
    faulty.create("b", b"2")
    assert plan.is_spent
    assert plan.failed == ["create"]


def test_both_loses_the_request_and_then_the_reply() -> None:
    store, plan = MemoryStore(), FaultPlan(at=1, when="both")
    faulty = FaultyStore(store, plan)
    for is_there in (False, True):
        with pytest.raises(TransientStoreError):
            faulty.create("a", b"1")
        assert ("a" in store.children("")) is is_there
    faulty.create("a", b"1")


def test_a_delayed_request_lands_when_told_and_its_error_is_nobodys() -> None:
    store, plan = MemoryStore(), FaultPlan(at=1, when="delay")
    faulty = FaultyStore(store, plan)
    with pytest.raises(TransientStoreError):
        faulty.create("a", b"late")
    with pytest.raises(MissingError):
        faulty.get("a")
    faulty.create("a", b"early")
    plan.land()
    assert faulty.get("a") == b"early"


def test_only_named_calls_count_and_a_lasting_fault_ends_when_told() -> None:
    plan = FaultPlan(
        at=1, calls=MUTATIONS, is_lasting=True, error=lambda: FullError("injected: no space")
    )
    faulty = FaultyStore(MemoryStore(), plan)
    assert faulty.children("") == []
    for _ in range(2):
        with pytest.raises(FullError):
            faulty.create("a", b"1")
    plan.end()
    faulty.create("a", b"1")
    assert plan.failed == ["create", "create"]


def test_after_a_crash_every_call_crashes() -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, FaultPlan(at=1, when="after", error=CrashError))
    for call in (lambda: faulty.create("a", b"1"), lambda: faulty.get("a")):
        with pytest.raises(CrashError):
            call()
    assert store.get("a") == b"1"


def test_a_plan_without_a_fault_stays_unspent() -> None:
    plan = FaultPlan(at=5)
    FaultyStore(MemoryStore(), plan).create("a", b"1")
    assert not plan.is_spent
    assert plan.count == 1


def test_the_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock()
    assert clock.now() == "2026-01-01T00:00:00.000Z"
    clock.advance(1.5)
    clock.sleep(60)
    assert clock.monotonic() == 61.5
    assert clock.now() == "2026-01-01T00:01:01.500Z"
    assert clock.now_ns() == 1_767_225_661_500_000_000
    assert clock.slept_s == [60]


def test_ids_repeat_with_their_seed() -> None:
    one, two = SeededIds(7), SeededIds(7)
    assert [one.write_id(), one.suffix()] == [two.write_id(), two.suffix()]
    assert len(one.write_id()) == 32
    assert len(one.suffix()) == 8
