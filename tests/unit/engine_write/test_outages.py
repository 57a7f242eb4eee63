"""A store that is away for days, and a spool whose machine is gone for good."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine_harness import Cluster, StagedNode

from ckptgate.engine.events import Events
from ckptgate.engine.hosts import known_hosts, note_host
from ckptgate.errors import FullError, TransientStoreError
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import CONTACT_META, Contact
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore

DAY_S = 86400.0


def go_on(cluster: Cluster, seconds: int) -> None:
    """All publishers, for so long; a failed request is waited for half a minute."""
    for _ in range(seconds):
        cluster.clock.advance(1.0)
        for node in cluster.nodes.values():
            node.step()


def staged(node: StagedNode, name: str, data: bytes):
    """A save that is complete as far as its trainer is concerned."""
    row = node.begin(name)
    node.write(row, "w.bin", data, rank=0)
    node.commit(row)
    return row


def days(cluster: Cluster, count: int) -> None:
    """A publisher's passes while nothing else happens."""
    for _ in range(count * 24):
        cluster.clock.advance(3600.0)
        for node in cluster.nodes.values():
            node.step()


def test_saves_of_days_without_the_store_are_all_committed_when_it_is_back(cluster: Cluster):
    """I11, I12: nothing is given up because nobody could decide it."""
    node = cluster.node("a")
    staged(node, "step-1", b"1")
    cluster.settle()
    plan = FaultPlan(at=1, is_lasting=True)
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    sealed = node.begin("step-2")
    node.write(sealed, "w.bin", b"2", rank=0)
    node.event(sealed)
    rows = [sealed]
    for n in (3, 4, 5):
        days(cluster, 1)
        rows.append(staged(node, f"step-{n}", str(n).encode()))
    days(cluster, 1)
    assert {node.fresh(row).state for row in rows} <= {AttemptState.OPEN, AttemptState.SEALED}
    assert node.kinds() == ["store-away"]
    plan.end()
    go_on(cluster, 90)
    assert sorted(cluster.state().current) == [f"step-{n}" for n in range(1, 6)]
    assert cluster.state().pointers["latest"].value.target == "step-5"
    for n in range(1, 6):
        assert cluster.files(f"step-{n}") == {"w.bin": str(n).encode()}
    cluster.check_invariants()
    assert node.kinds() == ["store-away", "store-back"]
    assert "it was away for" in node.events.recent(1)[0].detail


@pytest.mark.parametrize("at", range(1, 30, 2))
def test_an_outage_of_days_at_any_call_of_a_save_loses_nothing(cluster: Cluster, at: int):
    """I10, I12: two nodes; the store goes for one of them in the middle, and is back days later."""
    plan = FaultPlan(at=at, is_lasting=True)
    a = cluster.node("a", store=FaultyStore(cluster.store, plan))
    b = cluster.node("b")
    rows = {}
    for rank, node in enumerate((a, b)):
        row = rows[node.host] = node.begin("step-1", world_size=2)
        node.write(row, f"w{rank}.bin", str(rank).encode(), rank=rank)
        node.commit(row, rank, 2)
    for _ in range(40):
        cluster.clock.advance(0.5)
        a.step()
        b.step()
    # The other node must not have given it up: its deadline counts, so the outage is within it.
    plan.end()
    go_on(cluster, 90)
    assert list(cluster.state().current) == ["step-1"], cluster.state().attempts
    assert cluster.files("step-1") == {"w0.bin": b"0", "w1.bin": b"1"}
    cluster.check_invariants()


def test_a_node_that_is_gone_is_named_with_its_rank_and_the_save_given_up_in_time(
    cluster: Cluster,
):
    a, b = cluster.node("a"), cluster.node("b")
    row = a.begin("step-1", world_size=2)
    lost = b.begin("step-1", world_size=2)
    a.write(row, "w0.bin", b"0", rank=0)
    b.write(lost, "w1.bin", b"1", rank=1, is_open=True)
    a.step()
    b.step()
    a.commit(row, 0, 2)
    # It registered, staged a part, and never comes back.
    del cluster.nodes["b"]
    a.event(row, "format")
    go_on(cluster, 700)
    fresh = a.fresh(row)
    assert fresh.state is AttemptState.ABORTED
    assert f"not whole {cluster.settings.commit_deadline_s:g} s after its seal" in fresh.reason
    said = " ".join(fresh.missing)
    assert b.member in said, said
    assert "rank 1" in said or "ranks 1" in said, said
    assert cluster.state().current == {}
    b.close()


def test_a_spool_remembers_its_machines_and_says_when_it_moved(cluster: Cluster):
    node, events = cluster.node("a"), Events()
    assert known_hosts(node.raw) == ["a"]
    assert not note_host(node.raw, "a", events)
    assert note_host(node.raw, "b", events)
    assert not note_host(node.raw, "b", events)
    assert note_host(node.raw, "a", events)
    assert known_hosts(node.raw) == ["a", "b", "a"]
    assert [event.kind for event in events.recent(9)] == ["spool-moved", "spool-moved"]
    assert "last used on a; b goes on" in events.recent(9)[0].detail
    assert socket.gethostname() not in known_hosts(node.raw)


@pytest.mark.parametrize("at", range(1, 26))
def test_a_replacement_machine_finishes_what_the_spool_of_a_dead_one_holds(tmp_path: Path, at: int):
    """I10: the machine dies at the n-th request of its save, its disk goes to another one."""
    cluster = Cluster(tmp_path)
    plan = FaultPlan(at=at, when="after", error=lambda: CrashError("dead"))
    node = cluster.node("old", store=FaultyStore(cluster.store, plan))
    member = node.member
    row = node.begin("step-1")
    node.write(row, "w.bin", b"1", rank=0)
    node.commit(row)
    try:
        for _ in range(60):
            node.step()
            cluster.clock.advance(0.5)
    except CrashError:
        pass
    spool = node.raw
    assert note_host(spool, "new", node.events)
    again = cluster.node("old")
    again.membership._host = "new"
    assert again.member == member
    cluster.settle()
    assert list(cluster.state().current) == ["step-1"]
    assert cluster.files("step-1") == {"w.bin": b"1"}
    assert set(cluster.state().attempts) == {"step-1.0"}
    cluster.check_invariants()
    cluster.close()


def test_an_idle_daemon_notices_that_the_store_went_and_came_back(cluster: Cluster):
    cluster.settings = replace(cluster.settings, contact_interval_s=30.0)
    plan = FaultPlan(at=0)
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    node.step()
    first = Contact.parse(node.raw.get_meta(CONTACT_META))
    assert first.answered_ns
    assert not first.away_ns
    asked = plan.count
    for _ in range(29):
        cluster.clock.advance(1.0)
        node.step()
    assert plan.count == asked
    plan.at, plan._is_lasting = 1, True
    plan.count = 0
    cluster.clock.advance(1.0)
    node.step()
    away = Contact.parse(node.raw.get_meta(CONTACT_META))
    assert away.away_ns
    assert away.answered_ns == first.answered_ns
    for _ in range(100):
        cluster.clock.advance(1.0)
        node.step()
    assert node.kinds() == ["store-away"]
    # A restart in the middle of it says nothing new.
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    node.step()
    assert node.kinds() == []
    plan.end()
    cluster.clock.advance(6.0)
    node.step()
    assert node.kinds() == ["store-back"]
    assert not Contact.parse(node.raw.get_meta(CONTACT_META)).away_ns


def test_contact_is_kept_even_where_the_spool_cannot_be_written(cluster: Cluster, monkeypatch):
    node = cluster.node("a")

    def full(key: str, value: str) -> None:
        raise FullError("no space")

    monkeypatch.setattr(node.raw, "set_meta", full)
    node.publisher.contact.failed(TransientStoreError("no route"))
    assert node.kinds() == ["store-away"]
