"""Whether the store answers is told at once, whatever the store does."""

from __future__ import annotations

import threading
import time

import pytest

from ckptgate.engine.runlog import RunLogs
from ckptgate.engine.store_look import StoreLook
from ckptgate.errors import MissingError, TransientStoreError, UnusableError
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate_adapters.memory_store import MemoryStore


class Odd(MemoryStore):
    """A store that hangs, fails, or answers, as a test says; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        self.asked = 0

    def get(self, key: str, *, limit: int = 1 << 20) -> bytes:
        self.asked += 1
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        raise MissingError(key)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store() -> Odd:
    return Odd()


@pytest.fixture
def logs(store: Odd, clock: ManualClock) -> RunLogs:
    return RunLogs(store, clock=clock, ids=SeededIds(1), member="m")


def test_a_store_that_answers_is_asked_now_and_then(store, logs, clock):
    look = StoreLook(store, logs, clock)
    for _ in range(5):
        assert look.look().is_reached
    assert store.asked == 1
    clock.advance(20)
    found = look.look()
    assert (found.is_reached, found.age_s) == (True, 0)
    assert store.asked == 2


def test_what_the_publisher_reads_counts(store, logs, clock):
    look = StoreLook(store, logs, clock)
    logs.get("run").refresh()
    asked = store.asked
    clock.advance(5)
    found = look.look()
    assert (found.is_reached, found.age_s, store.asked) == (True, 5, asked)


@pytest.mark.parametrize(
    "error", [TransientStoreError("gone"), UnusableError("gone"), ZeroDivisionError("gone")]
)
def test_what_it_says_instead_is_told(store, logs, clock, error: Exception):
    store.error = error
    look = StoreLook(store, logs, clock)
    found = look.look(wait_s=60)
    assert (found.is_reached, found.age_s) == (False, None)
    assert "gone" in found.error
    store.error = None
    assert look.look(wait_s=60).is_reached


def test_one_that_hangs_is_waited_for_by_nobody_and_asked_once(store, logs, clock):
    store.go.clear()
    look = StoreLook(store, logs, clock)
    try:
        for _ in range(3):
            assert not look.look(wait_s=0.01).is_reached
        assert store.asked == 1
    finally:
        store.go.set()
    deadline = time.monotonic() + 60
    while not look.look(wait_s=1).is_reached:
        assert time.monotonic() < deadline
