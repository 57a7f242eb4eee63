"""Joining attempts: who takes part in which, and who is late."""

from __future__ import annotations

import threading

import pytest
from tests.unit.engine.kit import JOB, NEXT_JOB, SESSION, Node

from ckptgate.errors import FormatVersionError, IntegrityError
from ckptgate.model.documents import Intent, StoreFormat, decode, encode
from ckptgate.model.entries import Abort
from ckptgate.model.layout import format_key, intent_key, member_key, vote_key
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import AttemptRow


def test_nodes_of_one_job_join_one_attempt(make_node):
    a, b = make_node("a"), make_node("b")
    first = a.membership.join(a.begin("step-1"))
    second = b.membership.join(b.begin("step-1"))
    assert (first.attempt, second.attempt) == ("step-1.0", "step-1.0")
    assert first.generation == second.generation == 1
    assert set(a.membership.members("run", "step-1.0")) == {a.member, b.member}
    assert a.logs.get("run").refresh().length == 1  # one FENCE for one job


def test_joining_again_changes_nothing(make_node):
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    assert a.membership.join(row) == row
    assert a.with_store(a.store).membership.join(row) == row


def test_sessions_never_share_an_attempt(make_node):
    a, b = make_node("a"), make_node("b")
    first = a.membership.join(a.begin("step-1", SESSION))
    second = b.membership.join(b.begin("step-1", SESSION))
    assert (first.attempt, second.attempt) == ("step-1.0", "step-1.1")
    assert a.logs.get("run").refresh().length == 0  # no FENCE for a session


def test_a_new_incarnation_begins_a_new_attempt(make_node):
    a, b = make_node("a"), make_node("b")
    a.membership.join(a.begin("step-1", JOB))
    row = b.membership.join(b.begin("step-1", NEXT_JOB))
    assert (row.attempt, row.generation) == ("step-1.1", 2)


def test_a_closed_aborted_or_decided_attempt_is_not_joined(make_node):
    a, b = make_node("a"), make_node("b")
    row = a.membership.join(a.begin("step-1"))
    a.seal(row)
    joined = b.membership.join(b.begin("step-1"))
    assert joined.attempt == "step-1.0"  # sealed isn't closed
    a.close(row)
    c = make_node("c")
    assert c.membership.join(c.begin("step-1")).attempt == "step-1.1"
    c.logs.get("run").append(lambda _: Abort(attempt="step-1.1", reason="test"))
    d = make_node("d")
    assert d.membership.join(d.begin("step-1")).attempt == "step-1.2"


def test_saving_a_name_again_on_one_node_is_a_new_attempt(make_node):
    a = make_node("a")
    first = a.membership.join(a.begin("last"))
    a.seal(first)
    assert a.membership.join(a.begin("last")).attempt == "last.1"


def test_a_revision_is_not_mixed_with_a_new_save(make_node):
    a, b = make_node("a"), make_node("b")
    base = a.save("step-1", {"x": b"1"})
    a.membership.join(a.begin("step-1", base=base.id))
    assert b.membership.join(b.begin("step-1")).attempt == "step-1.2"


@pytest.mark.parametrize("job", [JOB, SESSION])
def test_nodes_that_join_at_once_agree(make_node, job):
    nodes = [make_node(f"n{i}") for i in range(6)]
    rows = [node.begin("step-1", job) for node in nodes]
    joined: dict[int, AttemptRow] = {}
    barrier = threading.Barrier(len(nodes))

    def join(i):
        barrier.wait()
        joined[i] = nodes[i].membership.join(rows[i])

    threads = [threading.Thread(target=join, args=(i,)) for i in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    attempts = {row.attempt for row in joined.values()}
    expected = 1 if job == JOB else len(nodes)
    assert attempts == {f"step-1.{k}" for k in range(expected)}


def test_the_proposed_intent_is_tried_again_after_a_crash(make_node):
    """I10: what landed without a reply is found, not made twice."""
    a = make_node("a")

    class LosesReply:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            return getattr(self._store, name)

        def create(self, key, data):
            self._store.create(key, data)
            if key.endswith("intent.json"):
                raise KeyboardInterrupt

    row = a.begin("step-1", SESSION)
    with pytest.raises(KeyboardInterrupt):
        a.with_store(LosesReply(a.store)).membership.join(row)
    assert a.spool.attempt(row.id).attempt == ""
    a.clock.sleep(5)
    assert a.with_store(a.store).membership.join(row).attempt == "step-1.0"


def test_a_late_member_is_told_and_keeps_its_files(make_node):
    a, b = make_node("a"), make_node("b")
    row = a.membership.join(a.begin("step-1"))
    a.stage(row, "x", b"1")
    late = b.membership.join(b.begin("step-1"))
    b.stage(late, "y", b"2")
    a.decide(row)  # b is registered, but its vote isn't there
    b.logs.get("run").refresh()
    late = b.membership.check_late(late)
    assert late.state is AttemptState.ABORTED
    assert b.member in late.reason
    assert [event.kind for event in b.events.recent(5)] == ["late-member"]
    assert b.read(late, "y") == b"2"
    assert b.membership.check_late(late) == late
    # The committed checkpoint is read beside it.
    adopted = b.look_into("run", late.run_ino, "step-1")
    assert adopted.id != late.id
    assert b.read(adopted, "x") == b"1"


def test_a_late_members_files_are_kept_when_the_checkpoint_is_read_first(make_node):
    a, b = make_node("a"), make_node("b")
    row = a.membership.join(a.begin("step-1"))
    a.stage(row, "x", b"1")
    late = b.membership.join(b.begin("step-1"))
    b.stage(late, "y", b"2")
    a.decide(row)
    adopted = b.look_into("run", late.run_ino, "step-1")
    assert adopted.id != late.id
    assert b.spool.attempt(late.id).state is AttemptState.ABORTED
    assert b.read(late, "y") == b"2"


def test_a_member_in_the_manifest_is_not_late(make_node):
    a = make_node("a")
    row = a.save("step-1", {"x": b"1"})
    assert a.membership.check_late(row) == row
    assert a.events.recent(5) == []


def test_an_attempt_that_others_began_is_found_and_joined(make_node):
    a, b = make_node("a"), make_node("b")
    a.membership.join(a.begin("step-1"))
    run_ino = b.directory(1, "run")
    row = b.catalog.find_open("run", run_ino, "step-1", JOB)
    assert row is not None
    assert row.is_joined
    assert b.member in b.membership.members("run", "step-1.0")
    assert b.catalog.find_open("run", run_ino, "step-1", JOB) == row
    assert b.catalog.find_open("run", run_ino, "step-1", NEXT_JOB) is None
    assert b.catalog.find_open("run", run_ino, "step-1", SESSION) is None
    assert b.catalog.find_open("run", run_ino, "step-2", JOB) is None


def test_a_run_of_another_format_is_refused(make_node):
    a = make_node("a")
    a.store.create(format_key("run"), encode(StoreFormat(format=99)))
    with pytest.raises(FormatVersionError):
        a.membership.join(a.begin("step-1"))


def test_a_torn_intent_is_refused_by_name(make_node):
    """I13."""
    a = make_node("a")
    a.store.create(intent_key("run", "step-1.0"), b'{"attempt":')
    with pytest.raises(IntegrityError, match=r"step-1\.0/intent\.json"):
        a.membership.join(a.begin("step-1"))


def test_an_intent_of_another_attempt_is_refused_by_name(make_node):
    """I13."""
    a, b = make_node("a"), make_node("b")
    a.membership.join(a.begin("step-1"))
    data = a.store.get(intent_key("run", "step-1.0"))
    a.store.create(intent_key("run", "step-2.0"), data)
    assert decode(data, Intent, subject="x").attempt == "step-1.0"
    with pytest.raises(IntegrityError, match=r"step-2\.0/intent\.json"):
        b.membership.join(b.begin("step-2"))


def test_two_spools_with_one_member_id_are_refused(make_node, tmp_path):
    a, b = make_node("a"), make_node("b")
    a.membership.join(a.begin("step-1"))
    clone = Node(b.store, tmp_path, "b", spool=b.spool, member=a.member)
    with pytest.raises(IntegrityError, match="two spools have one member id"):
        clone.membership.join(clone.begin("step-1"))


def test_a_strange_name_among_the_members_is_refused_by_name(make_node):
    """I13."""
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    a.store.create(member_key("run", row.attempt, "..evil"), b"{}\n")
    with pytest.raises(IntegrityError, match=r"\.\.evil"):
        a.membership.members("run", row.attempt)


def test_a_vote_in_anothers_place_is_refused_by_name(make_node):
    """I13."""
    a, b = make_node("a"), make_node("b")
    row = a.membership.join(a.begin("step-1"))
    b.membership.join(b.begin("step-1"))
    a.vote(row)
    data = a.store.get(vote_key("run", row.attempt, a.member, 0))
    a.store.create(vote_key("run", row.attempt, b.member, 0), data)
    with pytest.raises(IntegrityError, match=b.member):
        a.membership.newest_votes("run", row.attempt, [b.member])


def test_votes_are_probed_from_the_last_one_seen(make_node):
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    for _ in range(20):
        a.vote(row, is_final=False)
    assert a.membership.newest_votes("run", row.attempt, [a.member])[a.member].n == 19
    seen = []

    class Counts:
        def __getattr__(self, name):
            return getattr(a.store, name)

        def get(self, key, **kwargs):
            seen.append(key)
            return a.store.get(key, **kwargs)

    restarted = a.with_store(Counts())
    assert restarted.membership.newest_votes("run", row.attempt, [a.member])[a.member].n == 19
    assert len(seen) == 2


def test_a_vote_that_vanished_is_refused_by_name(make_node):
    """I13: a store that lost a vote is not a member without one."""
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    a.vote(row)
    a.spool.set_seen_count(row.id, a.member, "votes", 3)
    with pytest.raises(IntegrityError, match=r"/2\.json is missing"):
        a.membership.newest_votes("run", row.attempt, [a.member])
