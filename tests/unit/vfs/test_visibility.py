"""Who sees what: attempts, committed checkpoints, revisions, deletions."""

from __future__ import annotations

import errno
import os

import pytest

from ckptgate.errors import BusyError, CkptError, ExistsError, MissingError, WouldBlockError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import LocalBytes
from ckptgate.vfs import revisions
from ckptgate.vfs.interface import Caller, SetAttr
from ckptgate.vfs.openfiles import OpenFiles

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


def test_a_writer_starts_a_revision_that_only_it_sees(world):
    """I8: a committed checkpoint never changes under its readers."""
    world.commit("", "step-1", {"w": b"old", "x": b"x"})
    base = world.walk(world.b, "step-1/w").attr.ino
    reader = world.vfs.open(world.b, base, os.O_RDONLY)
    with pytest.raises(CkptError) as caught:
        world.vfs.open(world.a, base, os.O_RDWR)
    assert caught.value.errno == errno.ESTALE
    world.write(world.a, "step-1/w", b"new")
    assert world.read(world.a, "step-1/w") == b"new"
    assert world.read(world.a, "step-1/x") == b"x"
    assert world.read(world.b, "step-1/w") == b"old"
    assert os.pread(reader.fd, 9, 0) == b"old"
    revision = world.attempt("step-1")
    assert (revision.state, revision.base is not None) == (AttemptState.OPEN, True)
    assert (ROOT, "step-1") in world.invalidations.names
    world.close(world.b, reader)


def test_a_revision_stays_when_the_open_that_began_it_says_estale(world):
    """The change that ESTALE announces is kept, though the caller gets an error."""
    world.commit("", "step-1", {"w": b"old"})
    base = world.walk(world.a, "step-1/w").attr.ino
    with pytest.raises(CkptError), world.vfs.atomic(world.a):
        world.vfs.open(world.a, base, os.O_WRONLY | os.O_TRUNC)
    assert world.walk(world.a, "step-1/w").attr.ino != base


def test_calls_on_the_committed_directory_reach_the_owners_copy(world):
    """rm -rf holds the directory that it opened before the revision began."""
    world.commit("", "step-1", {"a": b"1", "b": b"2", "d/c": b"3"})
    root = world.walk(world.a, "step-1").attr.ino
    sub = world.vfs.lookup(world.a, root, "d").attr.ino
    world.vfs.unlink(world.a, root, "a")
    world.vfs.unlink(world.a, sub, "c")
    world.vfs.unlink(world.a, root, "b")
    world.again(lambda: world.vfs.rmdir(world.a, root, "d"))
    assert world.names(world.b, "step-1") == ["a", "b", "d"]
    with pytest.raises(MissingError):
        world.vfs.lookup(world.a, root, "a")
    world.again(lambda: world.vfs.rmdir(world.a, ROOT, "step-1"))
    assert not world.exists(world.a, "step-1")
    assert world.exists(world.b, "step-1/d/c")
    (stone,) = world.spool.tombstones(run="")
    assert (stone.name, stone.attempt) == ("step-1", "step-1.0")
    assert world.attempt("step-1").state is AttemptState.ABANDONED


def test_a_new_file_in_a_committed_directory_is_a_revision(world):
    world.commit("", "step-1", {"a": b"1"})
    world.write(world.a, "step-1/extra", b"e")
    assert world.names(world.a, "step-1") == ["a", "extra"]
    assert world.names(world.b, "step-1") == ["a"]


def test_a_rename_in_a_committed_checkpoint_is_a_revision(world):
    world.commit("", "step-1", {"a": b"1"})
    world.rename(world.a, "step-1/a", "step-1/b")
    assert world.names(world.a, "step-1") == ["b"]
    assert world.names(world.b, "step-1") == ["a"]


def test_bytes_that_are_not_here_are_fetched_before_a_revision_changes_them(world):
    world.commit("", "step-1", {"a": b"1234"})
    world.walk(world.a, "step-1")
    row = world.spool.attempts(name="step-1")[0]
    (_, _, file) = world.spool.files_of_attempt(row.id)[0]
    world.spool.update_file(file.file, local=LocalBytes.NONE)
    opened = world.vfs.open(world.b, world.walk(world.b, "step-1/a").attr.ino, os.O_RDONLY)
    assert not opened.is_complete
    world.vfs.ensure(world.b, opened.fh, 0, 4)
    assert world.catalog.fetched == [(file.file, 0, 4)]
    world.close(world.b, opened)


def test_reading_times_alone_is_no_revision(world):
    world.commit("", "step-1", {"a": b"1"})
    ino = world.walk(world.a, "step-1/a").attr.ino
    world.vfs.setattr(world.a, ino, SetAttr(atime_ns=1), None)
    assert len(world.spool.attempts()) == 1


def test_a_committed_revision_takes_the_place_of_its_base(world):
    world.commit("", "step-1", {"w": b"old"})
    world.walk(world.b, "step-1")
    world.write(world.a, "step-1/w", b"new")
    row = world.attempt("step-1")
    (_, _, file) = world.spool.files_of_attempt(row.id)[0]
    world.spool.update_file(file.file, state=FileState.DIGESTED)
    world.spool.update_attempt(row.base, state=AttemptState.REPLACED)
    world.spool.update_attempt(
        row.id, state=AttemptState.COMMITTED, attempt="step-1.1", seal_index=3
    )
    world.commit("", "step-1", {}, k=1)
    assert world.read(world.b, "step-1/w") == b"new"


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


def test_the_rename_from_a_temporary_name_is_the_commit_event(world):
    world.mkdir(world.a, "5.orbax-checkpoint-tmp")
    world.write(world.a, "5.orbax-checkpoint-tmp/x", b"1")
    world.rename(world.a, "5.orbax-checkpoint-tmp", "5")
    row = world.attempt("5")
    assert (row.state, row.event) == (AttemptState.SEALED, "rename")
    assert world.read(world.a, "5/x") == b"1"
    assert not world.exists(world.b, "5")


def test_a_rename_between_final_names_is_no_event(world):
    world.mkdir(world.a, "step-1")
    world.rename(world.a, "step-1", "step-2")
    assert world.attempt("step-2").event == ""
    with pytest.raises(CkptError) as caught:
        world.rename(world.a, "step-2", "other")
    assert caught.value.errno == errno.EXDEV


def test_a_checkpoint_is_not_renamed_over_another(world):
    world.commit("", "step-1", {"w": b"1"})
    world.mkdir(world.a, "tmp_step-1")
    with pytest.raises(CkptError) as caught:
        world.rename(world.a, "tmp_step-1", "step-1")
    assert caught.value.errno == errno.ENOTEMPTY
    world.mkdir(world.a, "step-2")
    world.rename(world.a, "tmp_step-1", "step-2")
    assert [row.state for row in world.spool.attempts(name="step-2")].count(
        AttemptState.SEALED
    ) == 1


def test_the_metadata_of_dcp_is_a_commit_event(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/__0_0.distcp", b"x")
    world.write(world.a, "step-1/.metadata.tmp", b"m")
    assert world.attempt("step-1").state is AttemptState.OPEN
    world.rename(world.a, "step-1/.metadata.tmp", "step-1/.metadata")
    row = world.attempt("step-1")
    assert (row.state, row.event, row.detail) == (AttemptState.SEALED, "format", "dcp-metadata")
    world.write(world.a, "step-1/late", b"l")
    assert world.exists(world.a, "step-1/late")


def test_a_torn_close_hides_the_attempt_once_its_writers_are_gone(world):
    """I8: nobody takes a dead writer's files for a checkpoint."""
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    os.pwrite(opened.fd, b"half", 0)
    world.die(world.a, opened)
    assert world.evidence_torn("step-1") == [True]
    assert not world.exists(world.a2, "step-1")
    assert world.names(world.a2) == []


def test_a_new_process_begins_again_where_all_writers_died(world):
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    world.die(world.a, opened)
    world.mkdir(world.a2, "step-1")
    old, new = world.spool.attempts(name="step-1")
    assert old.state is AttemptState.ABANDONED
    assert "died" in old.reason
    assert new.state is AttemptState.OPEN
    assert world.names(world.a2, "step-1") == []


def test_a_torn_close_with_living_writers_hides_nothing(world):
    world.mkdir(world.a2, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    world.die(world.a, opened)
    assert world.exists(world.a2, "step-1/w")


def test_a_forked_childs_death_is_not_torn(world):
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    world.identify.exiting.add(101)
    world.vfs.flush(world.a2, opened.fh)
    assert world.evidence_torn("step-1") == [False]
    world.close(world.a, opened)


def test_writing_a_torn_file_again_mends_it(world):
    world.mkdir(world.a2, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    world.die(world.a, opened)
    world.write(world.a2, "step-1/w", b"whole")
    assert world.evidence_torn("step-1") == [False]


def test_unknown_content_stays_visible_to_its_session(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/notes", b"x")
    world.die(world.a)
    assert world.exists(world.a2, "step-1/notes")


def test_a_known_format_that_is_not_whole_is_hidden_when_its_writers_are_gone(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/__0_0.distcp", b"x")
    assert world.exists(world.a2, "step-1")
    world.die(world.a)
    assert not world.exists(world.a2, "step-1")


def test_handles_of_dead_processes_are_torn_after_a_restart(world):
    """I10: a death that nobody saw counts as one."""
    world.mkdir(world.a, "step-1")
    world.open_new(world.a, "step-1/w")
    world.identify.dead.add(100)
    world.vfs.start_session(is_takeover=True)
    assert world.evidence_torn("step-1") == [True]
    assert not world.exists(world.a2, "step-1")


def test_a_successor_reopens_handles(world):
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    os.pwrite(opened.fd, b"abc", 0)
    world.vfs._ctx.memory.files = OpenFiles()
    again = world.vfs.reopen(opened.fh)
    assert os.pread(again.fd, 9, 0) == b"abc"
    world.close(world.a, again)
    assert world.vfs.reopen(12345) is None


def test_all_that_a_predecessor_opened_is_open_in_its_successor(world):
    """I11: fsync, an unlinked file and a file of the store only go on working after a restart."""
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    world.vfs._ctx.memory.files = OpenFiles()
    world.vfs.start_session(is_takeover=True)
    world.vfs.fsync(world.a, opened.fh, data_only=False)
    ino = world.walk(world.a, "step-1/w").attr.ino
    assert world.vfs._ctx.memory.files.count(ino) == 1
    world.catalog.add_plain("config.json", b"{}")
    plain = world.vfs.open(world.a, world.walk(world.a, "config.json").attr.ino, os.O_RDONLY)
    world.vfs._ctx.memory.files = OpenFiles()
    assert world.vfs.reopen(plain.fh) == plain
    assert world.vfs.read(world.a, plain.fh, 0, 9) == b"{}"
    world.vfs.release(plain.fh)
    world.close(world.a, opened)
    assert world.vfs._ctx.spool.handles() == []


def test_a_write_waits_while_the_attempt_is_decided(world):
    """I4: after the final vote there are no more writes; then it is a revision."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    row = world.attempt("step-1")
    world.spool.update_attempt(row.id, state=AttemptState.SEALED, is_voted=True)
    with pytest.raises(WouldBlockError):
        world.vfs.create(Caller(0, 0, 100), row.root, "x", os.O_WRONLY, 0o644)
    with pytest.raises(BusyError):
        world.vfs.create(world.a, row.root, "x", os.O_WRONLY, 0o644)
    world.clock.on_sleep = lambda: (
        world.commit_own("", "step-1")
        if world.attempt("step-1").state is AttemptState.SEALED
        else None
    )
    world.vfs.create(world.a, row.root, "x", os.O_WRONLY, 0o644)
    assert world.attempt("step-1").base == row.id
    assert world.names(world.b, "step-1") == ["w"]


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


def test_two_threads_that_write_first_begin_one_revision(world):
    world.commit("", "step-1", {"x": b"1"})
    assert world.exists(world.a, "step-1/x")
    base = world.spool.attempts(name="step-1")[-1]
    ctx = world.vfs._ctx
    first = revisions.revise(ctx, ctx.who(world.a), base)
    assert revisions.revise(ctx, ctx.who(world.a), base).id == first.id
