"""Who sees what: attempts, committed checkpoints, deletions."""

from __future__ import annotations

import errno

import pytest

from ckptgate.errors import CkptError, ExistsError, MissingError, WouldBlockError
from ckptgate.model.states import AttemptState
from ckptgate.vfs.interface import Caller

ROOT = 1


def test_only_its_incarnation_sees_an_open_attempt(world):
    """I8."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    assert world.exists(world.a2, "step-1/w")
    for other in (world.b, world.outside, world.s):
        assert not world.exists(other, "step-1")
        assert world.names(other) == []
    assert world.names(world.a) == ["step-1"]


def test_names_of_attempts_are_asked_each_time(world):
    world.mkdir(world.a, "step-1")
    assert world.walk(world.a, "step-1").timeout_s == 0
    world.mkdir(world.a, "step-1/d")
    assert world.walk(world.a, "step-1/d").timeout_s > 0


def test_two_incarnations_write_the_same_name_apart(world):
    """I2."""
    world.mkdir(world.a, "step-1")
    world.mkdir(world.b, "step-1")
    world.write(world.a, "step-1/w", b"a")
    world.write(world.b, "step-1/w", b"b")
    assert world.read(world.a, "step-1/w") == b"a"
    assert world.read(world.b, "step-1/w") == b"b"
    with pytest.raises(ExistsError):
        world.mkdir(world.a, "step-1")


def test_a_committed_checkpoint_is_seen_by_everybody(world):
    world.commit("", "step-1", {"w": b"1", "d/x": b"2"})
    for caller in (world.a, world.b, world.outside):
        assert world.read(caller, "step-1/d/x") == b"2"
        assert world.names(caller) == ["step-1"]
    assert world.walk(world.a, "step-1").timeout_s > 0
    with pytest.raises(ExistsError):
        world.mkdir(world.a, "step-1")


def test_an_own_commit_does_not_vanish_while_the_view_is_old(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    row = world.attempt("step-1")
    world.spool.update_attempt(
        row.id, attempt="step-1.0", state=AttemptState.COMMITTED, seal_index=0
    )
    assert world.exists(world.a, "step-1/w")
    assert world.names(world.b) == ["step-1"]
    # The view knows later entries, and nothing committed: it was retired.
    world.catalog.set_view("", length=9)
    assert not world.exists(world.a, "step-1")


def test_what_the_log_knows_is_not_shown_raw(world):
    world.catalog.add_plain("step-1", kind="dir")
    world.catalog.set_view("", names=frozenset({"step-1"}), length=4)
    assert not world.exists(world.b, "step-1")
    assert world.names(world.b) == []


def test_nothing_below_a_hidden_directory_is_a_checkpoint(world):
    world.mkdir(world.a, ".cache")
    world.mkdir(world.a, ".cache/step-1")
    assert world.exists(world.b, ".cache/step-1")
    assert world.spool.attempts() == []


def test_outside_callers_are_one_incarnation(world):
    world.mkdir(world.outside, "step-1")
    assert world.exists(Caller(0, 0, 999, may_block=True), "step-1")
    assert not world.exists(world.a, "step-1")


def test_a_removed_open_attempt_is_given_up(world):
    world.mkdir(world.a, "step-1")
    world.rmdir(world.a, "step-1")
    assert world.attempt("step-1").state is AttemptState.ABANDONED
    assert not world.exists(world.a, "step-1")
    world.mkdir(world.a, "step-1")
    assert len(world.spool.attempts(name="step-1")) == 2


def test_a_tombstone_does_not_hide_a_newer_checkpoint_of_that_name(world):
    world.commit("", "step-1", {})
    world.rmdir(world.a, "step-1")
    assert not world.exists(world.a, "step-1")
    assert world.exists(world.b, "step-1")
    world.commit("", "step-1", {"w": b"2"}, k=1)
    assert world.exists(world.a, "step-1/w")


def test_a_committed_checkpoint_is_not_renamed(world):
    world.commit("", "step-1", {"w": b"1"})
    for target in ("backup", "step-2", "step-1.old"):
        with pytest.raises(CkptError) as caught:
            world.rename(world.a, "step-1", target)
        assert caught.value.errno == errno.EPERM
        assert not world.exists(world.a, target)
    assert world.read(world.a, "step-1/w") == b"1"


def test_a_revision_of_a_committed_checkpoint_is_not_renamed(world, caplog):
    """I8: else two names would share one tree, and neither would be what was committed."""
    world.commit("", "step-1", {"w": b"1", "x": b"2"})
    world.write(world.a, "step-1/w", b"edited")
    with pytest.raises(CkptError) as caught:
        world.rename(world.a, "step-1", "step-11")
    assert caught.value.errno == errno.EPERM
    assert "rename-refused" in caplog.text
    assert "is a revision of a committed checkpoint" in caplog.text
    assert world.names(world.a) == world.names(world.b) == ["step-1"]
    assert world.names(world.a, "step-1") == ["w", "x"]
    assert world.read(world.a, "step-1/w") == b"edited"
    assert world.read(world.b, "step-1/w") == b"1"
    assert [row.name for row in world.spool.attempts()] == ["step-1", "step-1"]


def test_an_attempt_of_other_members_is_joined_at_its_look_up(world):
    root = world.mkdir(world.s, "step-9")
    row = world.attempt("step-9")
    world.spool.update_attempt(row.id, name="elsewhere")
    world.clock.seconds += 1
    world.catalog.others["step-9"] = world.spool.attempt(row.id)
    assert world.walk(world.s, "step-9").attr.ino == root


def test_a_miss_in_a_shared_attempt_asks_the_other_members(world):
    world.mkdir(world.s, "step-1")
    row = world.spool.update_attempt(world.attempt("step-1").id, is_joined=True, attempt="step-1.0")

    def others() -> bool:
        world.write(world.s, "step-1/from-afar", b"1")
        return True

    def once() -> bool:
        world.catalog.on_refresh = lambda: False
        return others()

    world.catalog.on_refresh = once
    world.clock.seconds += 1
    assert world.vfs.lookup(world.s, row.root, "from-afar").attr.size == 1


def test_a_new_job_waits_for_checkpoints_that_can_still_commit(world):
    """I12."""
    world.catalog.set_view("", undecided=("step-1.0",), length=2, names=frozenset({"step-1"}))
    with pytest.raises(WouldBlockError):
        world.vfs.lookup(Caller(0, 0, 300), ROOT, "step-1")

    def decide() -> None:
        world.catalog.set_view("", undecided=())
        world.commit("", "step-1", {"w": b"1"})

    world.clock.on_sleep = decide
    assert world.exists(world.s, "step-1/w")
    before = world.clock.seconds
    world.clock.on_sleep = lambda: None
    assert not world.exists(world.s, "step-2")
    assert world.clock.seconds - before < 1


def test_a_shared_attempt_settles_when_it_is_joined(world):
    ino = world.mkdir(world.s, "step-1")
    assert world.vfs.must_settle(ino)
    row = world.attempt("step-1")
    world.clock.on_sleep = lambda: world.spool.update_attempt(row.id, is_joined=True)
    world.vfs.settle(world.s, ino)
    assert not world.vfs.must_settle(ino)
    sub = world.mkdir(world.s, "step-1/d")
    assert world.vfs.must_settle(sub)
    before = world.clock.seconds
    world.vfs.settle(world.s, sub)
    assert 2 <= world.clock.seconds - before < 3
    assert not world.vfs.must_settle(sub)


def test_sessions_never_settle(world):
    assert not world.vfs.must_settle(world.mkdir(world.a, "step-1"))


def test_commit_by_name_finds_the_newest_attempt(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    row = world.vfs.commit_explicit("", "step-1", None, None, is_all=True)
    assert row.state is AttemptState.SEALED
    with pytest.raises(MissingError):
        world.vfs.commit_explicit("", "step-2", 0, 1)


def test_a_hidden_attempt_is_not_found_by_asking_the_other_members(world):
    """I8: what its dead writers left does not come back by way of the shared job's look-up."""
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    world.die(world.a, opened)
    world.catalog.others["step-1"] = world.attempt("step-1")
    assert not world.exists(world.a2, "step-1")
    world.mkdir(world.a2, "step-1")
    assert world.names(world.a2, "step-1") == []


def test_whoever_saw_a_commit_finds_its_pointer(world):
    """The log is read again where the spool knows of a COMMIT that the view does not show."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    row = world.attempt("step-1")
    world.spool.update_attempt(
        row.id, state=AttemptState.COMMITTED, attempt="step-1.0", seal_index=3
    )
    asked: list[float] = []
    old_view = world.catalog.view

    def view(run: str, max_age_s: float):
        asked.append(max_age_s)
        return old_view(run, max_age_s)

    world.catalog.view = view
    world.exists(world.a, "latest")
    assert 0.0 in asked
    asked.clear()
    world.names(world.a)
    assert 0.0 in asked


def test_a_removed_checkpoint_takes_no_changes_through_an_open_directory(world):
    """Else a second `rm -rf` of it would begin a revision that holds everything again."""
    world.commit("", "step-1", {"x": b"1", "y": b"2"})
    root = world.walk(world.a, "step-1").attr.ino
    for name in ("x", "y"):
        world.vfs.unlink(world.a, root, name)
    world.again(lambda: world.vfs.rmdir(world.a, 1, "step-1"))
    with pytest.raises(MissingError):
        world.vfs.unlink(world.a, root, "y")
    with pytest.raises(MissingError):
        world.again(lambda: world.vfs.rmdir(world.a, 1, "step-1"))
    assert world.exists(world.b, "step-1/y")
