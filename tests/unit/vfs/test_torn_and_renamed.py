"""Commit events that are renames, torn closes, and what a restarted mount finds open."""

from __future__ import annotations

import errno
import os

import pytest

from ckptgate.errors import BusyError, CkptError, WouldBlockError
from ckptgate.model.states import AttemptState
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.openfiles import OpenFiles


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
