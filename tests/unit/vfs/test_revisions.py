"""Changes of a committed checkpoint are a revision, which only its writer sees until its COMMIT."""

from __future__ import annotations

import errno
import os

import pytest

from ckptgate.errors import CkptError, MissingError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import LocalBytes
from ckptgate.vfs import revisions
from ckptgate.vfs.interface import SetAttr

ROOT = 1


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


def test_two_threads_that_write_first_begin_one_revision(world):
    world.commit("", "step-1", {"x": b"1"})
    assert world.exists(world.a, "step-1/x")
    base = world.spool.attempts(name="step-1")[-1]
    ctx = world.vfs._ctx
    first = revisions.revise(ctx, ctx.who(world.a), base)
    assert revisions.revise(ctx, ctx.who(world.a), base).id == first.id
