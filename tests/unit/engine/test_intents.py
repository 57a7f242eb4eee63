"""Which attempt is joined where several jobs begin attempts of one name at the same time."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.unit.engine.kit import JOB, NEXT_JOB, SESSION

from ckptgate.errors import MissingError
from ckptgate.model.entries import Abort
from ckptgate.model.layout import attempts_prefix, intent_key
from ckptgate.ports.spool import ROOT_INO


class WatchedStore:
    """A store that counts reads of intents and calls back when one is found absent."""

    def __init__(self, store):
        self._store = store
        self.reads: Counter[str] = Counter()
        self.when_absent = lambda: None

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key, **options):
        if not key.endswith("/intent.json"):
            return self._store.get(key, **options)
        self.reads[key] += 1
        try:
            return self._store.get(key, **options)
        except MissingError:
            call, self.when_absent = self.when_absent, lambda: None
            call()
            raise


def test_a_save_is_not_split_by_what_another_job_begins_above_it(make_node):
    """I1: the second rank finds its own job's attempt below the one of somebody else."""
    a, b, other = make_node("a"), make_node("b"), make_node("other")
    first = a.membership.join(a.begin("step-1", NEXT_JOB))
    assert other.membership.join(other.begin("step-1", SESSION)).attempt == "step-1.1"
    second = b.membership.join(b.begin("step-1", NEXT_JOB))
    assert (first.attempt, second.attempt) == ("step-1.0", "step-1.0")
    assert set(a.membership.members("run", "step-1.0")) == {a.member, b.member}


def test_a_look_up_finds_the_own_jobs_attempt_below_others(make_node):
    a, b, other = make_node("a"), make_node("b"), make_node("other")
    a.membership.join(a.begin("step-1"))
    other.membership.join(other.begin("step-1", SESSION))
    run_ino = b.directory(ROOT_INO, "run")
    found = b.membership.find_open("run", run_ino, "step-1", JOB)
    assert found is not None
    assert found.attempt == "step-1.0"


def test_members_of_a_job_that_begin_in_each_others_reads_join_one_attempt(store, make_node):
    """I1: whoever looked first must not take the number after the one that it did not see."""
    watched = WatchedStore(store)
    a, b = make_node("a", on=watched), make_node("b")
    row = a.begin("step-1")
    watched.when_absent = lambda: b.membership.join(b.begin("step-1"))
    assert a.membership.join(row).attempt == "step-1.0"
    assert store.children(attempts_prefix("run")) == ["step-1.0"]
    assert set(a.membership.members("run", "step-1.0")) == {a.member, b.member}


def test_an_incarnation_that_a_newer_one_replaced_begins_no_attempt(make_node):
    """I4: it could never be sealed, and would only stand in the way of the new one's."""
    old, new = make_node("old"), make_node("new")
    old.membership.join(old.begin("step-1", JOB))
    new.membership.join(new.begin("step-2", NEXT_JOB))
    row = old.membership.join(old.begin("step-2", JOB))
    assert (row.attempt, row.is_joined) == ("", False)
    assert old.store.children(attempts_prefix("run")) == ["step-1.0", "step-2.0"]
    # What it had begun before is not joined by its other nodes any more.
    late, reader = make_node("late"), make_node("reader")
    assert late.membership.join(late.begin("step-1", JOB)).attempt == ""
    run_ino = reader.directory(ROOT_INO, "run")
    assert reader.membership.find_open("run", run_ino, "step-1", JOB) is None


def test_what_an_old_incarnation_sealed_is_still_joined_by_its_nodes(make_node):
    """I12: a node that the store was away for brings its part, whoever began anew meanwhile."""
    a, b, new = make_node("a"), make_node("b"), make_node("new")
    row = a.membership.join(a.begin("step-1", JOB))
    a.seal(row)
    assert new.membership.join(new.begin("step-1", NEXT_JOB)).attempt == "step-1.1"
    joined = b.membership.join(b.begin("step-1", JOB))
    assert (joined.attempt, joined.is_joined, joined.generation) == ("step-1.0", True, 1)
    a.close(row)
    c = make_node("c")
    assert c.membership.join(c.begin("step-1", JOB)).attempt == ""


def test_joining_reads_back_no_further_than_the_own_jobs_beginning(store, make_node):
    """The store calls for a save don't grow with how often its name was saved before."""
    old = make_node("old")
    for k in range(12):
        row = old.membership.join(old.begin("last", JOB))
        assert row.attempt == f"last.{k}"
        old.seal(row)
    watched = WatchedStore(store)
    new = make_node("new", on=watched)
    assert new.membership.join(new.begin("last", NEXT_JOB)).attempt == "last.12"
    assert len(watched.reads) <= 3, watched.reads
    again = new.begin("last", NEXT_JOB)
    watched.reads.clear()
    new.seal(new.spool.attempts(name="last")[0])
    assert new.membership.join(again).attempt == "last.13"
    # An intent never changes: what was read once is known.
    assert watched.reads[intent_key("run", "last.11")] == 0


@pytest.mark.parametrize("job", [JOB, SESSION])
def test_a_number_that_the_log_knows_is_never_taken_again(store, make_node, job):
    """I2, I3: not even where the intent of the decided attempt was reclaimed."""
    a, b = make_node("a"), make_node("b")
    a.logs.get("run").append(lambda _: Abort(attempt="step-1.4", reason="test"))
    assert b.membership.join(b.begin("step-1", job)).attempt == "step-1.5"
