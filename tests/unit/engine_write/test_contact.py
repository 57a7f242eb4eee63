"""Whether the store answers is told at once, whatever the store does, and told once."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from tests.engine_harness import Cluster, StagedNode

from ckptgate.engine.contact import Reached
from ckptgate.errors import IntegrityError, MissingError, TransientStoreError, UnusableError
from ckptgate.ports.spool import CONTACT_META, Contact
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
def store() -> Odd:
    return Odd()


@pytest.fixture
def node(cluster: Cluster, store: Odd) -> StagedNode:
    cluster.settings = replace(cluster.settings, contact_interval_s=30.0)
    return cluster.node("a", store=store)


def look(node: StagedNode, wait_s: float = 60.0) -> Reached:
    return node.publisher.contact.look(wait_s=wait_s)


def known(node: StagedNode) -> Contact:
    return Contact.parse(node.raw.get_meta(CONTACT_META))


def test_a_store_that_answers_is_asked_now_and_then(store, node, cluster):
    for _ in range(5):
        assert look(node).is_reached
    assert store.asked == 1
    cluster.clock.advance(20)
    found = look(node)
    assert (found.is_reached, found.age_s) == (True, 0)
    assert store.asked == 2


def test_who_looks_and_the_publisher_ask_for_each_other(store, node, cluster):
    node.step()
    asked = store.asked
    assert look(node).is_reached
    assert store.asked == asked
    cluster.clock.advance(20)
    assert look(node).is_reached
    cluster.clock.advance(20)
    node.publisher.contact.step()
    assert store.asked == asked + 1
    assert cluster.clock.now_ns() - known(node).answered_ns == 20 * 10**9


def test_what_the_publisher_reads_counts(store, node, cluster):
    node.logs.get("run").refresh()
    asked = store.asked
    cluster.clock.advance(5)
    found = look(node)
    assert (found.is_reached, found.age_s, store.asked) == (True, 5, asked)


@pytest.mark.parametrize(
    "error", [TransientStoreError("gone"), UnusableError("gone"), ZeroDivisionError("gone")]
)
def test_what_it_says_instead_is_told(store, node, error: Exception):
    store.error = error
    found = look(node)
    assert (found.is_reached, found.age_s) == (False, None)
    assert "gone" in found.error
    store.error = None
    assert look(node).is_reached


def test_a_store_that_answers_with_a_refusal_is_there(store, node):
    store.error = IntegrityError("larger than it may be")
    assert look(node).is_reached


def test_an_outage_that_somebody_met_by_looking_is_one_incident(store, node, cluster):
    node.publisher.contact.step()
    store.error = TransientStoreError("gone")
    cluster.clock.advance(20)
    for _ in range(3):
        assert not look(node).is_reached
        node.publisher.contact.step()
    assert node.kinds() == ["store-away"]
    assert known(node).away_ns
    store.error = None
    assert look(node).is_reached
    for _ in range(3):
        node.publisher.contact.step()
    assert node.kinds() == ["store-away", "store-back"]
    assert not known(node).away_ns


def test_a_request_that_failed_since_counts_more_than_an_older_answer(store, node, cluster):
    assert look(node).is_reached
    cluster.clock.advance(1)
    store.go.clear()
    node.publisher.contact.failed(TransientStoreError("gone"))
    try:
        found = look(node, wait_s=0.01)
        assert (found.is_reached, found.age_s, found.error) == (False, 1, "gone")
    finally:
        store.go.set()


def test_one_that_hangs_is_waited_for_by_nobody_and_asked_once(store, node):
    store.go.clear()
    try:
        for _ in range(3):
            assert not look(node, wait_s=0.01).is_reached
        assert store.asked == 1
    finally:
        store.go.set()
    deadline = time.monotonic() + 60
    while not look(node, wait_s=1).is_reached:
        assert time.monotonic() < deadline
