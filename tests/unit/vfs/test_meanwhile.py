"""What others do between a call's first look and its change: it counts, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os

import msgspec
import pytest

from ckptgate.errors import CkptError, ExistsError, MissingError, TransientStoreError
from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.states import AttemptState


def before_the_change(world, action):
    """Have *action* done once, right before the next outermost transaction of the vfs begins."""
    spool = world.spool
    begin = spool.transaction
    is_done = False

    @contextlib.contextmanager
    def transaction():
        nonlocal is_done
        if not is_done:
            is_done = True
            spool.transaction = begin
            action()
        with begin():
            yield

    spool.transaction = transaction


def vote(world, name):
    """The publisher decides that the tree is final."""
    world.spool.update_attempt(world.attempt(name).id, is_voted=True, state=AttemptState.SEALED)


CHANGES = pytest.mark.parametrize(
    "change",
    [
        lambda world: world.open_new(world.a, "step-1/late"),
        lambda world: world.mkdir(world.a, "step-1/late"),
        lambda world: world.symlink(world.a, "w", "step-1/late"),
        lambda world: world.unlink(world.a, "step-1/w"),
        lambda world: world.rmdir(world.a, "step-1/d"),
        lambda world: world.rename(world.a, "step-1/w", "step-1/x"),
        lambda world: world.rename(world.a, "step-1", "step-2"),
        lambda world: world.vfs.open(
            world.a, world.walk(world.a, "step-1/w").attr.ino, os.O_WRONLY
        ),
    ],
    ids=["create", "mkdir", "symlink", "unlink", "rmdir", "rename", "rename-root", "open"],
)


@CHANGES
def test_no_change_gets_into_a_tree_that_was_just_voted(world, change):
    """I1: the vote says what the checkpoint is; a later change waits and becomes a revision."""
    world.mkdir(world.a, "step-1")
    world.mkdir(world.a, "step-1/d")
    world.write(world.a, "step-1/w", b"1")
    before = world.spool.tree(world.attempt("step-1").id)
    before_the_change(world, lambda: vote(world, "step-1"))
    with pytest.raises(CkptError) as caught:
        change(world)
    # It waited for the decision, which doesn't come.
    assert caught.value.errno == errno.EBUSY
    assert world.spool.tree(world.attempt("step-1").id) == before
    assert not world.spool.handles()


@CHANGES
def test_what_is_voted_and_committed_meanwhile_is_revised_with_one_estale_at_most(world, change):
    """The kernel repeats a call once, and what it finds then may need that."""
    world.mkdir(world.a, "step-1")
    world.mkdir(world.a, "step-1/d")
    world.write(world.a, "step-1/w", b"1")
    sleep = world.clock.sleep

    def decide(seconds):
        sleep(seconds)
        world.clock.sleep = sleep
        world.commit_own("", "step-1")

    world.clock.sleep = decide
    before_the_change(world, lambda: vote(world, "step-1"))
    before = world.names(world.a, "step-1")
    result = 0
    try:
        world.again(lambda: change(world))
    except CkptError as exc:
        result = exc.errno or -1
    assert result in {0, errno.EPERM}
    # A committed checkpoint keeps its name; all else is a revision.
    assert (result == errno.EPERM) == (world.attempt("step-1").base is None)
    assert world.names(world.b, "step-1") == before


def test_a_stores_answer_does_not_replace_what_was_made_meanwhile(world):
    """I11: the store said what it had before this mount's file came."""
    world.catalog.add_plain("value.log", b"old")
    before_the_change(world, lambda: world.write(world.a, "value.log", b"newer here"))
    assert world.walk(world.a, "value.log").attr.size == len(b"newer here")
    assert world.read(world.a, "value.log") == b"newer here"


@pytest.mark.parametrize("entry", [b"old", None], ids=["other-bytes", "gone"])
def test_a_stores_late_answer_does_not_replace_a_renamed_file(world, entry):
    """I11."""
    world.write(world.a, "value.log", b"first")
    file = world.spool.node(world.walk(world.a, "value.log").attr.ino).file
    found = os.stat(world.spool.data_path(file))
    world.spool.update_file(file, size=found.st_size, mtime_ns=found.st_mtime_ns)
    for op in world.spool.plain_ops():
        world.spool.drop_plain_op(op.id)
    world.write(world.a, "new.log", b"second")
    if entry is not None:
        world.catalog.add_plain("value.log", entry)
    world.clock.seconds += 10
    before_the_change(world, lambda: world.rename(world.a, "new.log", "value.log"))
    assert world.walk(world.a, "value.log").attr.size == len(b"second")
    assert world.read(world.a, "value.log") == b"second"


def _moved_and_settled(world):
    """The pointer went from step-1 to step-2; returns the views before and after that."""
    for step in (1, 2):
        world.commit("", f"step-{step}", {"w": b"1"})
    world.set_pointer("", "latest", "step-1")
    old = world.catalog.view("", 0)
    world.symlink(world.a, "step-2", ".new")
    world.rename(world.a, ".new", "latest")
    assert world.readlink(world.b, "latest") == "step-1"
    world.set_pointer("", "latest", "step-2")
    world.catalog.set_view("", length=old.length + 1)
    world.settle("latest")
    return old, world.catalog.view("", 0)


def test_a_settled_pointer_is_not_followed_by_an_older_view(world):
    """I5: the value went from the pending row to the log; the known view is older than that."""
    old, new = _moved_and_settled(world)
    world.catalog.view = lambda run, age: old if age else new
    for caller in (world.a, world.b):
        assert world.readlink(caller, "latest") == "step-2"
    assert "latest" in world.names(world.a)


@pytest.mark.parametrize("was_there", [True, False], ids=["moved", "new"])
def test_a_settled_pointer_stays_when_the_log_cannot_be_read_again(world, was_there):
    """I5: the store goes away before the mount has read what the publisher wrote."""
    old, _ = _moved_and_settled(world)
    if not was_there:
        old = dataclasses.replace(old, pointers={})
    world.catalog.view = lambda run, age: old
    for caller in (world.a, world.b, world.a):
        assert world.readlink(caller, "latest") == "step-2"
    assert "latest" in world.names(world.a)


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_TRUNC, os.O_RDWR], ids=["trunc", "rdwr"])
def test_a_pointer_that_is_settled_while_it_is_opened_is_not_written_in_place(world, flags):
    """I8: it is everybody's then; the job gets a new version, with one ESTALE as ever."""
    value = PointerValue(
        pointer="latest", kind=PointerKind.TEXT, target="step-1", content="step-1\n"
    )
    world.commit("", "step-1", {"w": b"1"})
    world.write(world.a, "latest", b"step-1\n")
    ino = world.walk(world.a, "latest").attr.ino
    world.catalog.set_view("", pointers={"latest": value})
    before_the_change(world, lambda: world.settle("latest"))
    with pytest.raises(CkptError) as caught:
        world.vfs.open(world.a, ino, flags)
    assert caught.value.errno == errno.ESTALE
    assert world.read(world.b, "latest") == b"step-1\n"
    opened = world.vfs.open(world.a, world.walk(world.a, "latest").attr.ino, flags)
    os.pwrite(opened.fd, b"step-2\n", 0)
    assert world.read(world.b, "latest") == b"step-1\n"
    world.close(world.a, opened)
    assert world.read(world.a, "latest") == b"step-2\n"
    assert world.read(world.b, "latest") == b"step-1\n"


def test_a_slow_look_up_does_not_put_the_older_value_in_the_place_of_the_settled_one(world):
    """I5: it began before that; whoever comes after it must find the newer one."""
    for step in (1, 2):
        world.commit("", f"step-{step}", {"w": b"1"})
    world.set_pointer("", "latest", "step-1")
    old = world.catalog.view("", 0)
    world.symlink(world.a, "step-2", ".new")
    world.rename(world.a, ".new", "latest")

    def publish():
        world.set_pointer("", "latest", "step-2")
        world.catalog.set_view("", length=old.length + 1)
        world.settle("latest")

    before_the_change(world, publish)
    world.readlink(world.b, "latest")
    world.catalog.view = lambda run, age: old
    assert world.readlink(world.a, "latest") == "step-2"


def test_a_file_that_only_the_store_has_grows_while_somebody_has_it_open(world):
    """`tail -f` on another node than the writer's: asked by descriptor, not by name."""
    world.catalog.add_plain("train.log", b"1")
    ino = world.walk(world.a, "train.log").attr.ino
    opened = world.vfs.open(world.a, ino, os.O_RDONLY)
    assert world.vfs.read(world.a, opened.fh, 0, 100) == b"1"
    world.catalog.add_plain("train.log", b"1 and 2")
    world.clock.seconds += 2
    assert world.vfs.getattr(world.a, ino, opened.fh).size == 7
    assert world.vfs.read(world.a, opened.fh, 0, 100) == b"1 and 2"
    world.close(world.a, opened)


@pytest.mark.parametrize("is_slow", [False, True], ids=["just-asked", "asked-meanwhile"])
def test_no_size_is_below_what_was_read(world, is_slow):
    """`tail` takes that for a truncation, and begins anew: the store had grown since it was asked.

    Nor does somebody change that who asked before, and whose answer comes after it.
    """
    world.catalog.add_plain("train.log", b"1")
    ino = world.walk(world.a, "train.log").attr.ino
    opened = world.vfs.open(world.a, ino, os.O_RDONLY)
    sizes = []

    def read():
        world.catalog.add_plain("train.log", b"1 and 2")
        assert world.vfs.read(world.a, opened.fh, 0, 100) == b"1 and 2"
        sizes.append(world.vfs.getattr(world.a, ino, opened.fh).size)

    if is_slow:
        world.clock.seconds += 2
        world.catalog.add_plain("train.log", b"1 an")
        before_the_change(world, read)
    else:
        read()
    sizes.append(world.vfs.getattr(world.b, ino, None).size)
    assert set(sizes) == {7}
    world.close(world.a, opened)


def test_a_small_file_of_the_store_is_read_as_one_version(world):
    """I8: another node replaces it between two reads of one descriptor, by a longer text."""
    world.catalog.add_plain("value.log", b"9\n")
    ino = world.walk(world.a, "value.log").attr.ino
    world.catalog.add_plain("value.log", b"100\n")
    opened = world.vfs.open(world.a, ino, os.O_RDONLY)
    assert opened.is_direct
    # As much as the size that was known, and one more to see the end.
    assert world.vfs.read(world.a, opened.fh, 0, 3) == b"100"
    world.catalog.add_plain("value.log", b"20000000\n")
    assert world.vfs.read(world.a, opened.fh, 3, 100) == b"\n"
    assert world.vfs.read(world.a, opened.fh, 4, 100) == b""
    assert world.vfs.read(world.a, opened.fh, 0, 100) == b"20000000\n"
    del world.catalog.plain["value.log"], world.catalog.plain_bytes["value.log"]
    assert world.vfs.read(world.a, opened.fh, 3, 100) == b"00000\n"
    assert world.vfs.read(world.a, opened.fh, 9, 100) == b""
    world.close(world.a, opened)


def test_a_log_of_the_store_is_followed_beyond_what_was_kept_of_it(world):
    text = b"".join(b"line %d\n" % number for number in range(30_000))
    world.catalog.add_plain("train.log", text[:10])
    opened = world.vfs.open(world.a, world.walk(world.a, "train.log").attr.ino, os.O_RDONLY)
    found = b""
    for end in (10, 11, 5_000, 5_000, 200_000, len(text)):
        world.catalog.add_plain("train.log", text[:end])
        while data := world.vfs.read(world.a, opened.fh, len(found), 50_000):
            found += data
        assert found == text[:end]
    assert world.vfs.read(world.a, opened.fh, 70, 7) == text[70:77]
    world.close(world.a, opened)


def test_changes_through_a_directory_whose_checkpoint_was_given_up_find_nothing(world):
    """As in a removed directory: `rm -rf` by two processes has no error."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    root = world.walk(world.a, "step-1").attr.ino
    world.spool.update_attempt(world.attempt("step-1").id, state=AttemptState.ABANDONED)
    for change in (world.vfs.unlink, world.vfs.rmdir):
        with pytest.raises(CkptError) as caught:
            change(world.a2, root, "w")
        assert caught.value.errno in {errno.ENOENT, errno.ENOTDIR}


def test_a_retired_checkpoint_that_is_still_open_is_a_removed_directory(world):
    """Of two `rm -rf` the slower one has the directory open when it is gone for everybody."""
    world.commit("", "step-1", {"a": b"1", "b": b"2"})
    world.commit("", "step-2", {"a": b"1"})
    root = world.walk(world.a, "step-1").attr.ino
    world.walk(world.a, "step-1/a")
    row = world.attempt("step-1")
    world.spool.update_attempt(row.id, state=AttemptState.REPLACED)
    with pytest.raises(MissingError):
        world.vfs.unlink(world.a, root, "a")
    world.spool.add_attempt(dataclasses.replace(row, id=0, state=AttemptState.OPEN))
    with pytest.raises(CkptError) as caught:
        world.vfs.unlink(world.a, root, "a")
    assert caught.value.errno == errno.ESTALE


def test_a_save_that_another_process_began_meanwhile_is_not_begun_again(world):
    """I1: all ranks of a job write one attempt; the first one's was given up as a dead one's."""
    before_the_change(world, lambda: world.mkdir(world.a2, "step-1"))
    with pytest.raises(ExistsError):
        world.mkdir(world.a, "step-1")
    assert [row.state for row in world.spool.attempts(name="step-1")] == [AttemptState.OPEN]
    world.write(world.a, "step-1/w", b"1")


def test_a_save_of_another_node_is_not_begun_again_where_the_store_goes_away_once_it_told_of_it(
    world,
):
    """I1: the row is there, only this member's registration has to be done later."""

    def find_open(run, run_ino, name, job_key):
        row = world.attempt("step-0")
        root = world.spool.node(row.root)
        root = world.spool.add_node(msgspec.structs.replace(root, ino=0, attempt=None))
        row = world.spool.add_attempt(
            dataclasses.replace(row, id=0, name=name, attempt=f"{name}.0", root=root.ino)
        )
        world.spool.update_node(root.ino, attempt=row.id)
        msg = "no reply to create"
        raise TransientStoreError(msg, subject=name)

    world.mkdir(world.s, "step-0")
    world.catalog.find_open = find_open
    with pytest.raises(ExistsError):
        world.mkdir(world.s, "step-1")
    (row,) = world.spool.attempts(name="step-1")
    assert (row.state, row.attempt) == (AttemptState.OPEN, "step-1.0")
    assert world.walk(world.s, "step-1").attr.ino == row.root
