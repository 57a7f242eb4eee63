"""Pointers, whole files, and moves between what is held and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import ROOT_INO, NodeKind, PendingKind, PlainOpKind
from ckptgate.ports.store import PlainEntry, PlainKind
from ckptgate.vfs.context import RenewedError


def _pending(world, name):
    return [row for row in world.spool.pending() if row.name == name]


def test_a_new_pointer_is_seen_by_its_incarnation_only(world):
    """I5: readers keep the previous value until the target is committed."""
    world.commit("", "step-1", {"w": b"1"})
    world.set_pointer("", "latest", "step-1")
    world.mkdir(world.a, "step-2")
    world.unlink(world.a, "latest")
    assert not world.exists(world.a, "latest")
    assert world.readlink(world.b, "latest") == "step-1"
    world.symlink(world.a, "step-2", "latest")
    assert world.readlink(world.a, "latest") == "step-2"
    assert world.readlink(world.b, "latest") == "step-1"
    (row,) = _pending(world, "latest")
    assert (row.kind, row.target) == (PendingKind.POINTER, "step-2")
    assert world.names(world.b) == ["latest", "step-1"]


def test_a_link_renamed_over_the_pointer_is_held(world):
    world.commit("", "step-1", {})
    world.set_pointer("", "latest", "step-1")
    world.mkdir(world.a, "step-2")
    world.symlink(world.a, "step-2", ".latest.tmp")
    world.rename(world.a, ".latest.tmp", "latest")
    assert world.readlink(world.a, "latest") == "step-2"
    assert world.readlink(world.b, "latest") == "step-1"
    assert not world.exists(world.a, ".latest.tmp")


def test_a_text_pointer_is_decided_when_it_is_closed(world):
    world.mkdir(world.a, "global_step5")
    opened = world.open_new(world.a, "latest")
    assert _pending(world, "latest")[0].target == ""
    os.pwrite(opened.fd, b"global_step5\n", 0)
    world.close(world.a, opened)
    assert _pending(world, "latest")[0].target == "global_step5"
    assert world.read(world.a, "latest") == b"global_step5\n"
    assert not world.exists(world.b, "latest")


def _texts(world, name):
    nodes = [world.spool.node(row.ino) for row in _pending(world, name)]
    return [Path(world.spool.data_path(node.file)).read_bytes() for node in nodes]


def test_a_text_that_is_written_again_stays_for_the_commit_of_what_it_named(world):
    """I5: else that commit would know nothing of the framework's pointer, and make a link."""
    for step in (5, 6, 7):
        world.mkdir(world.a, f"global_step{step}")
    for step in (5, 6, 6):
        world.write(world.a, "latest", f"global_step{step}".encode())
        assert world.read(world.a, "latest") == f"global_step{step}".encode()
    assert [row.target for row in _pending(world, "latest")] == ["global_step5", "global_step6"]
    assert _texts(world, "latest") == [b"global_step5", b"global_step6"]
    # What will never be committed needs none.
    world.spool.update_attempt(world.attempt("global_step5").id, state=AttemptState.ABORTED)
    world.write(world.a, "latest", b"global_step7")
    assert [row.target for row in _pending(world, "latest")] == ["global_step6", "global_step7"]
    world.unlink(world.a, "latest")
    assert _pending(world, "latest") == []


def test_a_tracker_with_a_number_names_the_checkpoint_that_ends_with_it(world):
    world.mkdir(world.a, "iter_0000012")
    world.mkdir(world.a, "iter_0000112")
    world.write(world.a, "latest_checkpointed_iteration.txt", b"12")
    assert _pending(world, "latest_checkpointed_iteration.txt")[0].target == "iter_0000012"


def test_rewriting_the_logs_text_pointer_leaves_readers_the_old_text(world):
    value = PointerValue(
        pointer="latest", kind=PointerKind.TEXT, target="step-1", content="step-1\n"
    )
    world.commit("", "step-1", {})
    world.catalog.set_view("", pointers={"latest": value})
    assert world.read(world.b, "latest") == b"step-1\n"
    world.mkdir(world.a, "step-2")
    world.write(world.a, "latest", b"step-2\n")
    assert world.read(world.a, "latest") == b"step-2\n"
    assert world.read(world.b, "latest") == b"step-1\n"


def test_a_reader_that_holds_an_old_pointer_keeps_its_node(world):
    """A polled pointer is never ENOENT while it is replaced."""
    world.set_pointer("", "latest", "step-1")
    old = world.walk(world.b, "latest").attr.ino
    world.set_pointer("", "latest", "step-2")
    new = world.walk(world.b, "latest").attr.ino
    assert new != old
    assert world.vfs.readlink(world.b, old) == "step-1"
    assert world.vfs.readlink(world.b, new) == "step-2"
    assert world.walk(world.b, "latest").timeout_s == 0


def test_a_settled_pointer_keeps_its_node_and_everybody_has_that(world):
    world.mkdir(world.a, "step-2")
    ino = world.symlink(world.a, "step-2", "latest")
    world.set_pointer("", "latest", "step-2")
    world.settle("latest")
    assert world.walk(world.a, "latest").attr.ino == ino
    assert _pending(world, "latest") == []
    assert world.walk(world.b, "latest").attr.ino == ino


def test_a_settled_text_stands_for_the_logs_and_is_written_beside_it(world):
    value = PointerValue(
        pointer="latest", kind=PointerKind.TEXT, target="step-2", content="step-2\n"
    )
    world.mkdir(world.a, "step-2")
    world.write(world.a, "latest", b"step-2\n")
    ino = world.walk(world.a, "latest").attr.ino
    world.catalog.set_view("", length=1, pointers={"latest": value})
    world.settle("latest")
    assert world.walk(world.b, "latest").attr.ino == ino
    assert world.read(world.b, "latest") == b"step-2\n"
    world.mkdir(world.a, "step-3")
    world.write(world.a, "latest", b"step-3\n")
    assert world.read(world.a, "latest") == b"step-3\n"
    assert world.read(world.b, "latest") == b"step-2\n"


def test_a_pending_value_that_the_log_had_once_is_still_what_the_job_wrote(world):
    """I5: `latest` was step-1, is written to step-2 and back, which the publisher hasn't seen."""
    world.commit("", "step-1", {"w": b"1"})
    world.commit("", "step-2", {"w": b"2"})
    world.set_pointer("", "latest", "step-1")
    for target in ("step-2", "step-1"):
        world.symlink(world.a, target, ".new")
        world.rename(world.a, ".new", "latest")
    assert world.readlink(world.a, "latest") == "step-1"
    # The publisher was about to append the first; then comes the second, if it is still pending.
    world.set_pointer("", "latest", "step-2")
    assert world.readlink(world.a, "latest") == "step-1"
    assert [row.target for row in _pending(world, "latest")] == ["step-1"]


def test_a_pointer_to_something_else_is_a_plain_link(world):
    world.symlink(world.a, "logs/today", "latest")
    assert world.readlink(world.b, "latest") == "logs/today"
    assert _pending(world, "latest") == []


def test_a_pointer_to_a_file_and_what_it_pointed_to_stay_for_others_until_it_moved(world):
    """I5: as Lightning does it with `save_last="link"` and one checkpoint to keep."""
    for step in (1, 2):
        world.write(world.a, f"epoch={step}.ckpt", b"x")
        if step == 2:
            world.unlink(world.a, "epoch=1.ckpt")
            world.unlink(world.a, "last.ckpt")
            assert not world.exists(world.a, "last.ckpt")
            assert world.readlink(world.b, "last.ckpt") == "epoch=1.ckpt"
        world.symlink(world.a, f"epoch={step}.ckpt", "last.ckpt")
        assert world.readlink(world.a, "last.ckpt") == f"epoch={step}.ckpt"
        assert [row.kind for row in _pending(world, "last.ckpt")] == [PendingKind.WHOLE]
        if step == 1:
            assert not world.exists(world.b, "last.ckpt")
            for name in ("epoch=1.ckpt", "last.ckpt"):
                world.publish_whole(name)
            world.catalog.plain["last.ckpt"] = PlainEntry(
                name="last.ckpt",
                kind=PlainKind.SYMLINK,
                size=12,
                mode=0o777,
                mtime_ns=1,
                uid=0,
                gid=0,
                target="epoch=1.ckpt",
            )
    assert not world.exists(world.a, "epoch=1.ckpt")
    assert world.readlink(world.b, "last.ckpt") == "epoch=1.ckpt"
    assert world.exists(world.b, "epoch=1.ckpt")
    assert not world.exists(world.b, "epoch=2.ckpt")


def test_a_text_that_names_nothing_is_a_live_file(world):
    world.write(world.a, "latest", b"hello world, no such name")
    assert _pending(world, "latest") == []
    assert world.read(world.b, "latest") == b"hello world, no such name"
    assert (PlainOpKind.PUT, "latest") in [(row.op, row.path) for row in world.spool.plain_ops()]


def test_a_whole_file_shows_its_old_version_until_it_is_placed(world):
    """I8 for single files."""
    world.write(world.a, "model.pt", b"one")
    assert not world.exists(world.b, "model.pt")
    world.publish_whole("model.pt")
    assert world.read(world.b, "model.pt") == b"one"
    reader = world.vfs.open(world.b, world.walk(world.b, "model.pt").attr.ino, os.O_RDONLY)
    world.write(world.a, "model.pt", b"second")
    assert world.read(world.a, "model.pt") == b"second"
    assert world.read(world.b, "model.pt") == b"one"
    world.publish_whole("model.pt")
    assert world.read(world.b, "model.pt") == b"second"
    assert os.pread(reader.fd, 9, 0) == b"one"
    world.close(world.b, reader)


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_TRUNC, os.O_RDWR])
def test_a_whole_file_that_is_being_published_is_not_written_in_place(world, flags):
    """I8 for single files: the store must not get a mixture of two versions."""
    world.write(world.a, "model.pt", b"one")
    entry = world.walk(world.a, "model.pt")
    published = world.spool.node(entry.attr.ino).file
    world.spool.update_file(published, state=FileState.DIGESTED, size=3)
    with open(world.spool.data_path(published), "rb") as on_its_way:
        opened = world.vfs.open(world.a, entry.attr.ino, flags)
        os.pwrite(opened.fd, b"two", 0)
        assert on_its_way.read() == b"one"
    world.close(world.a, opened)
    assert world.read(world.a, "model.pt") == b"two"


def test_a_temporary_renamed_to_a_whole_files_name_is_held(world):
    opened = world.open_new(world.a, ".tmp1")
    world.rename(world.a, ".tmp1", "m.safetensors")
    os.pwrite(opened.fd, b"x", 0)
    world.close(world.a, opened)
    assert world.read(world.a, "m.safetensors") == b"x"
    assert not world.exists(world.b, "m.safetensors")
    assert _pending(world, "m.safetensors")[0].kind is PendingKind.WHOLE


def test_a_big_file_under_a_pointers_name_is_a_whole_file(world):
    world.write(world.a, "last.ckpt", b"\0" * 5000)
    (row,) = _pending(world, "last.ckpt")
    assert row.kind is PendingKind.WHOLE


def test_removing_a_whole_file_removes_all_its_versions(world):
    world.write(world.a, "model.pt", b"one")
    world.publish_whole("model.pt")
    world.write(world.a, "model.pt", b"two")
    world.unlink(world.a, "model.pt")
    assert not world.exists(world.a, "model.pt")
    assert not world.exists(world.b, "model.pt")
    assert _pending(world, "model.pt") == []


def test_files_move_between_plain_directories_and_attempts(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "staged.json", b"{}")
    world.rename(world.a, "staged.json", "step-1/config.json")
    assert world.read(world.a, "step-1/config.json") == b"{}"
    assert not world.exists(world.b, "staged.json")
    world.rename(world.a, "step-1/config.json", "config.json")
    assert world.read(world.b, "config.json") == b"{}"
    assert world.names(world.a, "step-1") == []
    node = world.spool.node(world.walk(world.b, "config.json").attr.ino)
    assert (node.plain_path, node.attempt, node.kind) == ("config.json", None, NodeKind.FILE)


def test_a_torn_pointer_is_not_believed(world):
    world.mkdir(world.a2, "step-1")
    opened = world.open_new(world.a, "latest")
    os.pwrite(opened.fd, b"step-1", 0)
    world.die(world.a, opened)
    assert _pending(world, "latest")[0].target == ""


def test_an_aborted_attempts_name_can_be_written_again(world):
    world.mkdir(world.a, "step-1")
    world.spool.update_attempt(world.attempt("step-1").id, state=AttemptState.ABORTED)
    assert not world.exists(world.a, "step-1")
    world.mkdir(world.a, "step-1")
    assert world.exists(world.a, "step-1")


def test_a_replaced_version_goes_as_soon_as_nobody_uses_it(world):
    """The publisher tells which node lost its name; the kernel may have forgotten it before."""
    world.write(world.a, "model.pt", b"one")
    world.publish_whole("model.pt")
    known = world.walk(world.b, "model.pt").attr.ino
    file = world.spool.node(known).file
    world.write(world.a, "model.pt", b"second")
    world.publish_whole("model.pt")
    world.vfs.node_replaced(known)
    assert world.spool.node(known) is not None  # the kernel may still ask for it
    world.vfs.forget([(known, world.vfs._ctx.memory.lookups[known])])
    assert world.spool.node(known) is None
    world.spool.finish_removals()
    assert not os.path.exists(world.spool.data_path(file))
    newest = world.spool.child(1, "model.pt").ino
    world.vfs.forget([(newest, world.vfs._ctx.memory.lookups.get(newest, 0))])
    world.write(world.a, "model.pt", b"third")
    world.vfs.forget([(newest, world.vfs._ctx.memory.lookups.get(newest, 0))])
    world.publish_whole("model.pt")
    assert world.spool.node(newest) is not None
    world.vfs.node_replaced(newest)
    assert world.spool.node(newest) is None


def test_a_pointer_that_moves_a_thousand_times_leaves_no_nodes(world):
    for step in range(5):
        world.commit("", f"step-{step}", {"x": b"1"})
        world.set_pointer("", "latest", f"step-{step}")
        ino = world.walk(world.b, "latest").attr.ino
        world.vfs.forget([(ino, 1)])
    assert world.spool.nameless_nodes() == []


def test_a_removed_pointer_stays_removed_for_its_job_and_remembers_what_it_hid(world):
    world.commit("", "step-1", {"x": b"1"})
    world.set_pointer("", "latest", "step-1")
    world.unlink(world.a, "latest")
    assert not world.exists(world.a, "latest")
    assert world.readlink(world.b, "latest") == "step-1"
    (row,) = _pending(world, "latest")
    assert (row.ino, row.target) == (None, "step-1")
    # Also over a commit: a trainer that makes it again must not find it there.
    world.commit("", "step-2", {"x": b"1"})
    world.set_pointer("", "latest", "step-2")
    assert not world.exists(world.a, "latest")
    world.symlink(world.a, "step-2", "latest")
    assert world.readlink(world.a, "latest") == "step-2"


@pytest.mark.parametrize("name", ["plain", "latest", "latest.tmp", "step-1.tmp", "a.safetensors"])
def test_the_kernel_keeps_a_name_as_long_whether_it_was_made_or_looked_up(world, name):
    """I8: the kernel's entry of what is renamed to a pointer's name goes on under that one."""
    entry, opened = world.vfs.create(world.a, ROOT_INO, name, os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(opened.fd, b"nothing in particular", 0)
    world.close(world.a, opened)
    looked_up = world.vfs.lookup(world.a, ROOT_INO, name)
    assert looked_up.attr.ino == entry.attr.ino
    assert entry.timeout_s == looked_up.timeout_s
    assert (entry.timeout_s > 0) == (name == "plain")


@pytest.mark.parametrize("name", ["latest", "model.safetensors"])
def test_a_file_of_a_checkpoint_is_looked_up_again_before_its_job_alone_has_it(world, name):
    """I8: others would find it in the kernel where they may not see it."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/f", b"step-1")
    inner = world.walk(world.a, "step-1").attr.ino
    assert world.vfs.lookup(world.a, inner, "f").timeout_s > 0
    with pytest.raises(RenewedError):
        world.vfs.rename(world.a, inner, "f", ROOT_INO, name, 0)
    assert world.vfs.lookup(world.a, inner, "f").timeout_s == 0
    world.vfs.rename(world.a, inner, "f", ROOT_INO, name, 0)
    assert world.read(world.a, name) == b"step-1"
    assert not world.exists(world.b, name)


@pytest.mark.parametrize("state", [FileState.DIGESTED, FileState.STORED])
@pytest.mark.parametrize("old", ["a.safetensors", "step-1/f"])
def test_a_file_that_gets_a_whole_files_name_is_judged_by_that(world, old, state):
    """What was found of it under another name, or published, says nothing of this one."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, old, b"no container")
    node = world.spool.node(world.walk(world.a, old).attr.ino)
    world.spool.update_file(node.file, state=FileState.DIGESTED)
    world.spool.update_file(node.file, state=state)
    if old == "a.safetensors" and state is FileState.STORED:
        world.publish_whole(old)
    world.rename(world.a, old, "b.safetensors")
    (row,) = _pending(world, "b.safetensors")
    assert (row.kind, row.ino) == (PendingKind.WHOLE, node.ino)
    assert world.spool.file(node.file).state is FileState.QUIET


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [("y.tmp", "y.safetensors", FileState.QUIET), ("y.tmp", "y.dat", FileState.DIGESTED)],
)
def test_a_checkpoints_file_that_gets_a_containers_name_is_judged_by_that(world, old, new, state):
    """I1: under a name that promised nothing, torn bytes were no problem."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, f"step-1/{old}", b"no container")
    node = world.spool.node(world.walk(world.a, f"step-1/{old}").attr.ino)
    world.spool.update_file(node.file, state=FileState.DIGESTED)
    world.rename(world.a, f"step-1/{old}", f"step-1/{new}")
    assert world.spool.file(node.file).state is state
