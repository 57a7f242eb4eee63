"""What close() promises about the other nodes of a job, and what it does where it can't."""

from __future__ import annotations

import os

import pytest

from ckptgate.errors import TransientStoreError, WouldBlockError
from ckptgate.model.states import FileState
from ckptgate.vfs.interface import Caller


def staged(world, name: str, caller: Caller | None = None):
    """A shared job's open checkpoint of that name and a file in it, written and not closed."""
    caller = caller or world.s
    world.mkdir(caller, "run")
    world.mkdir(caller, f"run/{name}")
    opened = world.open_new(caller, f"run/{name}/x.bin")
    os.pwrite(opened.fd, b"bytes", 0)
    return opened, world.walk(caller, f"run/{name}/x.bin").attr.ino


def waited(world, call) -> float:
    started = world.clock.seconds
    call()
    return world.clock.seconds - started


def test_a_close_under_a_temporary_name_fails_where_this_node_cannot_be_registered(world):
    """I1: the rename of another member would commit the checkpoint without this node's file."""
    opened, ino = staged(world, "tmp_step-1")
    assert world.vfs.flush(world.s, opened.fh)
    started = world.clock.seconds
    with pytest.raises(TransientStoreError, match="tmp_step-1"):
        world.vfs.settle(world.s, ino, is_close=True)
    assert 30.0 <= world.clock.seconds - started < 31.0
    # Every later close says so again: a trainer that ignores one meets the next.
    assert world.vfs.must_settle(ino, is_close=True)
    with pytest.raises(TransientStoreError):
        world.vfs.settle(world.s, ino, is_close=True)
    world.vfs.release(opened.fh)
    assert world.read(world.s, "run/tmp_step-1/x.bin") == b"bytes"
    (found,) = world.spool.files_of_attempt(world.attempt("tmp_step-1").id)
    assert found[2].state is FileState.QUIET


def test_such_a_close_succeeds_once_the_store_is_back(world):
    opened, ino = staged(world, "tmp_step-1")
    world.vfs.flush(world.s, opened.fh)
    row, started = world.attempt("tmp_step-1"), world.clock.seconds

    def join_after_a_while() -> None:
        if world.clock.seconds - started >= 12.0:
            world.spool.update_attempt(row.id, attempt="tmp_step-1.0", is_joined=True)

    world.clock.on_sleep = join_after_a_while
    assert 12.0 <= waited(world, lambda: world.vfs.settle(world.s, ino, is_close=True)) < 13.0
    assert not world.vfs.must_settle(ino, is_close=True)


def test_a_fenced_off_incarnations_close_ends_its_wait_when_it_is_given_up(world):
    opened, ino = staged(world, "tmp_step-1")
    world.vfs.flush(world.s, opened.fh)
    row = world.attempt("tmp_step-1")
    world.clock.on_sleep = lambda: world.spool.update_attempt(row.id, state="abandoned")
    assert waited(world, lambda: world.vfs.settle(world.s, ino, is_close=True)) < 1.0


def test_a_close_under_a_final_name_goes_on_without_the_store(world):
    """There the expected set or the world size proves it whole, or it does not commit."""
    _, ino = staged(world, "step-1")
    assert 2.0 <= waited(world, lambda: world.vfs.settle(world.s, ino, is_close=True)) < 2.1
    assert not world.vfs.must_settle(ino, is_close=True)


def test_only_close_waits_longer_than_a_moment_while_the_store_is_away(world):
    _, ino = staged(world, "tmp_step-1")
    run = world.walk(world.s, "run").attr.ino
    for node in (run, ino):
        world.clock.seconds += 100
        assert 2.0 <= waited(world, lambda node=node: world.vfs.settle(world.s, node)) < 2.1
        assert not world.vfs.must_settle(node)
    assert world.vfs.must_settle(ino, is_close=True)


def test_closes_that_promise_nothing_wait_for_nobody(world):
    """A reader's, a forked child's, and one by the kernel for a process that died."""
    opened, ino = staged(world, "tmp_step-1")
    reading = world.vfs.open(world.s, ino, os.O_RDONLY)
    assert not world.vfs.flush(world.s, reading.fh)
    world.vfs.release(reading.fh)
    child = Caller(0, 0, 301, may_block=True)
    world.identify.processes[301] = world.identify.processes[300].__class__(
        301, 3010, world.identify.processes[300].job_key, world.identify.processes[300].rank
    )
    assert not world.vfs.flush(child, opened.fh)
    world.identify.exiting.add(300)
    assert not world.vfs.flush(world.s, opened.fh)


def test_a_close_that_must_wait_is_left_to_the_pool(world):
    opened, ino = staged(world, "tmp_step-1")
    world.vfs.flush(world.s, opened.fh)
    with pytest.raises(WouldBlockError):
        world.vfs.settle(Caller(0, 0, 300), ino, is_close=True)
    assert world.waker.count > 0


def test_a_close_in_a_revision_fails_where_this_node_cannot_be_registered(world):
    """I1: the base's file would be committed in the place of the one that this node wrote."""
    world.mkdir(world.s, "run")
    world.commit("run", "step-1", {"x.bin": b"old"})
    world.catalog.on_refresh = lambda: False
    opened = world.open_new(world.s, "run/step-1/x.bin")
    os.pwrite(opened.fd, b"new", 0)
    ino = world.walk(world.s, "run/step-1/x.bin").attr.ino
    assert world.vfs.flush(world.s, opened.fh)
    started = world.clock.seconds
    with pytest.raises(TransientStoreError, match="step-1"):
        world.vfs.settle(world.s, ino, is_close=True)
    assert 30.0 <= world.clock.seconds - started < 31.0
    world.vfs.release(opened.fh)
    assert world.read(world.s, "run/step-1/x.bin") == b"new"
