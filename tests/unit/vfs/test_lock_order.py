"""Two locks are taken in one order only: the spool's, then that of what the vfs remembers."""

from __future__ import annotations

import threading

import pytest

from ckptgate.vfs import liveness


class OwnedLast:
    """The vfs's lock, which refuses to be held while the spool's is taken."""

    def __init__(self, world) -> None:
        self.mine = world.vfs._ctx.lock
        self.its = world.spool._db.lock

    def acquire(self, *args: object) -> bool:
        if self.mine._is_owned():
            assert self.its._is_owned(), "the spool is asked under the lock of memory"
        return self.its.acquire(*args)

    def release(self) -> None:
        self.its.release()

    def _is_owned(self) -> bool:
        return self.its._is_owned()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def ordered(world, monkeypatch) -> None:
    monkeypatch.setattr(world.spool._db, "lock", OwnedLast(world))


def forget(world) -> None:
    """As after a change that was undone, or in a process that took over."""
    world.vfs._ctx.memory.writers.clear()
    world.vfs._ctx.memory.clones.clear()


def test_no_call_asks_the_spool_under_the_lock_of_memory(world, ordered):
    world.mkdir(world.a, "step-1")
    forget(world)
    assert not world.exists(world.b, "step-1")
    forget(world)
    world.write(world.a2, "step-1/x", b"1")
    forget(world)
    assert world.read(world.a, "step-1/x") == b"1"
    world.mkdir(world.a, "plain")
    world.mkdir(world.a, "step-1/sub")
    forget(world)
    world.rmdir(world.a2, "step-1/sub")
    world.symlink(world.a, "step-1", "plain/link")
    world.unlink(world.a, "plain/link")
    world.rmdir(world.a, "plain")
    world.unlink(world.a, "step-1/x")


def test_who_looks_first_at_an_attempt_waits_for_no_change_that_waits_for_it(world):
    """A look-up after a restart and a change at once: both had waited for the other for ever."""
    world.mkdir(world.a, "step-1")
    forget(world)
    with world.spool.transaction():
        looking = threading.Thread(target=liveness._writers, args=(world.vfs._ctx, 1), daemon=True)
        looking.start()
        looking.join(0.2)
        got = world.vfs._ctx.lock.acquire(timeout=10)
        assert got
        world.vfs._ctx.lock.release()
    looking.join(30)
    assert not looking.is_alive()


def test_what_was_read_before_a_change_was_undone_is_read_again(world, monkeypatch):
    world.mkdir(world.a, "step-1")
    forget(world)
    real, calls = world.spool.get_meta, []

    def undone_meanwhile(key: str):
        value = real(key)
        if key.startswith("writers"):
            calls.append(key)
            if len(calls) == 1:
                world.vfs._ctx.memory.forgotten += 1
                return "[]"
        return value

    monkeypatch.setattr(world.spool, "get_meta", undone_meanwhile)
    assert world.exists(world.a, "step-1")
    assert len(calls) == 2
    assert world.vfs._ctx.memory.writers
