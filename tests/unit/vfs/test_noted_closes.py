"""Closes that are answered before the spool's database has them."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from ckptgate.errors import ExistsError
from ckptgate.model.states import FileState
from ckptgate.ports.spool import FileRow
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.sqlite_spool.noted import SLOTS, NotedCloses

NEVER_S = 3600.0


@pytest.fixture
def noting(world):
    """The world, with closes that are only taken over by a change."""
    world.vfs._ctx.settings = replace(world.vfs._ctx.settings, close_delay_s=NEVER_S)
    world.vfs.start_session(is_takeover=False)
    world.mkdir(world.a, "step-1")
    return world


def file_at(world, path: str) -> FileRow:
    node = world.spool.node(world.walk(world.a, path).attr.ino)
    return world.spool.file(node.file)


def restarted(world) -> Vfs:
    """A new mount process on the same spool, after a kill -9 of the other."""
    ctx = world.vfs._ctx
    world.spool = SqliteSpool.attach(world.spool.path)
    world.vfs = Vfs(
        spool=world.spool,
        catalog=world.catalog,
        waker=world.waker,
        clock=world.clock,
        patterns=ctx.patterns,
        identify=world.identify,
        settings=VfsSettings(),
    )
    return world.vfs


def test_a_close_is_in_the_database_after_the_next_change(noting):
    noting.write(noting.a, "step-1/w", b"abc")
    assert file_at(noting, "step-1/w").state is FileState.OPEN
    assert len(noting.spool.noted_closes()) == 1
    noting.write(noting.a, "step-1/v", b"abc")
    assert file_at(noting, "step-1/w").state is FileState.QUIET
    assert noting.spool.node(noting.walk(noting.a, "step-1/w").attr.ino).size == 3


def test_what_is_quiet_and_released_has_no_handle_left(noting):
    noting.write(noting.a, "step-1/w", b"abc")
    noting.vfs._ctx.apply_closes()
    assert noting.spool.handles() == []
    assert noting.spool.noted_closes() == []
    assert file_at(noting, "step-1/w").state is FileState.QUIET


@pytest.mark.parametrize("is_takeover", [True, False])
@pytest.mark.parametrize("is_released", [True, False])
def test_a_noted_close_survives_a_kill(noting, is_takeover, is_released):
    """I11: close() was answered, so its writer's death after it tears nothing."""
    opened = noting.open_new(noting.a, "step-1/w")
    os.pwrite(opened.fd, b"abc", 0)
    assert noting.vfs.flush(noting.a, opened.fh)
    if is_released:
        noting.vfs.release(opened.fh)
    noting.identify.dead.add(noting.a.pid)
    vfs = restarted(noting)
    if not is_takeover:
        noting.spool.clear_handles()
    vfs.start_session(is_takeover=is_takeover)
    assert noting.evidence_torn("step-1") == [False]
    ((_, _, file),) = noting.spool.files_of_attempt(noting.attempt("step-1").id)
    assert file.state is FileState.QUIET
    assert len(noting.spool.handles()) == (is_takeover and not is_released)
    assert noting.spool.noted_closes() == []


def test_an_unclosed_file_of_a_dead_writer_is_torn_all_the_same(noting):
    noting.open_new(noting.a, "step-1/w")
    noting.identify.dead.add(noting.a.pid)
    restarted(noting).start_session(is_takeover=True)
    assert noting.evidence_torn("step-1") == [True]


def test_a_change_that_is_undone_loses_no_close(noting):
    noting.write(noting.a, "step-1/w", b"abc")
    with pytest.raises(ExistsError), noting.vfs._ctx.change():
        raise ExistsError("x")
    assert file_at(noting, "step-1/w").state is FileState.OPEN
    assert len(noting.spool.noted_closes()) == 1
    noting.vfs._ctx.apply_closes()
    assert file_at(noting, "step-1/w").state is FileState.QUIET


def test_fsync_takes_closes_over_first(noting):
    """I11: fsync makes durable what was closed before."""
    noting.write(noting.a, "step-1/w", b"abc")
    opened = noting.open_new(noting.a, "step-1/v")
    noting.write(noting.a, "step-1/u", b"abc")
    noting.vfs.fsync(noting.a, opened.fh, data_only=False)
    assert noting.spool.noted_closes() == []
    assert file_at(noting, "step-1/u").state is FileState.QUIET


def test_a_thread_takes_over_what_no_change_does(world):
    world.vfs._ctx.settings = replace(world.vfs._ctx.settings, close_delay_s=0.001)
    world.vfs.start_session(is_takeover=False)
    world.mkdir(world.a, "step-1")
    taken = threading.Event()
    world.waker.wake = taken.set
    world.write(world.a, "step-1/w", b"abc")
    taken.wait(10)
    while world.spool.noted_closes():
        pass
    assert file_at(world, "step-1/w").state is FileState.QUIET


def test_what_a_write_by_another_descriptor_adds_after_the_release_is_seen_at_the_latest(noting):
    """The size is that of the release until somebody writes on."""
    opened = noting.open_new(noting.a, "step-1/w")
    os.pwrite(opened.fd, b"abc", 0)
    second = noting.vfs.open(noting.a, noting.walk(noting.a, "step-1/w").attr.ino, os.O_WRONLY)
    noting.close(noting.a, opened)
    os.pwrite(second.fd, b"defgh", 3)
    noting.close(noting.a, second)
    noting.vfs._ctx.apply_closes()
    assert file_at(noting, "step-1/w").state is FileState.QUIET
    assert noting.spool.node(noting.walk(noting.a, "step-1/w").attr.ino).size == 8


def test_a_commit_event_is_never_only_noted(noting):
    noting.write(noting.a, "step-1/__0_0.distcp", b"x")
    noting.write(noting.a, "step-1/.metadata", b"x")
    assert noting.attempt("step-1").event == "format"


def test_with_all_slots_in_use_a_close_changes_the_database_itself(noting):
    opened = [noting.open_new(noting.a, f"step-1/{number}") for number in range(SLOTS + 3)]
    for one in opened:
        noting.close(noting.a, one)
    assert len(noting.spool.noted_closes()) <= SLOTS
    noting.vfs._ctx.apply_closes()
    assert noting.spool.handles() == []


def test_a_file_without_a_name_is_dropped_at_its_release(noting):
    opened = noting.open_new(noting.a, "step-1/w")
    ino = noting.walk(noting.a, "step-1/w").attr.ino
    noting.unlink(noting.a, "step-1/w")
    noting.vfs.forget([(ino, 99)])
    noting.close(noting.a, opened)
    assert noting.spool.node(ino) is None


def test_a_slot_is_free_again_once_its_close_is_dropped(tmp_path):
    noted = NotedCloses(str(tmp_path))
    for fh in range(1, SLOTS + 1):
        assert noted.note(fh, is_released=False)
    assert not noted.note(SLOTS + 1, is_released=False)
    assert noted.note(7, is_released=True)
    again = NotedCloses(str(tmp_path))
    assert (7, True) in again.all()
    assert (8, False) in again.all()
    noted.drop(7)
    assert noted.note(SLOTS + 1, is_released=True)


@pytest.mark.parametrize("delay_s", [0.0, NEVER_S])
def test_a_file_with_a_duplicated_descriptor_is_not_closed_before_that_is(world, delay_s):
    """`> FILE` opens, duplicates and closes before the first byte is written."""
    world.vfs._ctx.settings = replace(world.vfs._ctx.settings, close_delay_s=delay_s)
    world.vfs.start_session(is_takeover=False)
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    ino = world.walk(world.a, "step-1/w").attr.ino
    world.identify.held.add((world.a.pid, ino))
    world.vfs.flush(world.a, opened.fh)
    world.vfs._ctx.apply_closes()
    assert file_at(world, "step-1/w").state is FileState.OPEN
    assert not world.spool.handle(opened.fh).is_closed
    os.pwrite(opened.fd, b"abc", 0)
    world.identify.held.clear()
    world.close(world.a, opened)
    world.vfs._ctx.apply_closes()
    assert file_at(world, "step-1/w").state is FileState.QUIET
    assert world.spool.handles() == []
