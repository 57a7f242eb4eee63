"""What every program does with files: outside of checkpoints and inside of one's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from ckptgate.errors import CkptError, ExistsError, InvalidNameError, MissingError, RefusedError
from ckptgate.model.jobkey import RankInfo
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import NodeKind, PlainOpKind
from ckptgate.vfs.bytes import make_file
from ckptgate.vfs.interface import SetAttr

ROOT = 1


def test_a_file_written_into_an_own_attempt_is_read_back(world):
    world.mkdir(world.a, "run")
    world.mkdir(world.a, "run/step-1")
    world.write(world.a, "run/step-1/w.bin", b"hello")
    assert world.read(world.a, "run/step-1/w.bin") == b"hello"
    assert world.names(world.a, "run/step-1") == ["w.bin"]
    attr = world.walk(world.a, "run/step-1/w.bin").attr
    assert (attr.size, attr.kind, attr.nlink, attr.mode) == (5, NodeKind.FILE, 1, 0o644)


def test_an_attempt_row_says_who_writes_where(world):
    world.mkdir(world.s, "run")
    world.mkdir(world.s, "run/step-1")
    world.write(world.s, "run/step-1/w", b"x")
    row = world.attempt("step-1")
    assert (row.run, row.job_key, row.state) == ("run", "run:train-7", AttemptState.OPEN)
    assert row.world_size == 2
    assert world.spool.writer_ranks(row.id) == (0,)
    assert "run" in world.spool.watched_runs()
    assert world.waker.count > 0


def test_a_close_by_the_opener_makes_the_file_quiet(world):
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    (_, _, file) = world.spool.files_of_attempt(world.attempt("step-1").id)[0]
    assert file.state is FileState.OPEN
    world.vfs.flush(world.a2, opened.fh)  # a forked child's
    assert world.spool.file(file.file).state is FileState.OPEN
    world.vfs.flush(world.a, opened.fh)
    assert world.spool.file(file.file).state is FileState.QUIET
    world.vfs.release(opened.fh)
    assert world.spool.handles(file=file.file) == []


def test_two_writers_must_both_close(world):
    world.mkdir(world.a, "step-1")
    first = world.open_new(world.a, "step-1/w")
    second = world.vfs.open(world.a2, world.walk(world.a2, "step-1/w").attr.ino, os.O_WRONLY)
    world.close(world.a, first)
    (_, _, file) = world.spool.files_of_attempt(world.attempt("step-1").id)[0]
    assert file.state is FileState.OPEN
    world.close(world.a2, second)
    assert world.spool.file(file.file).state is FileState.QUIET


def test_opening_a_quiet_file_again_voids_its_digest(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"old")
    (_, node, file) = world.spool.files_of_attempt(world.attempt("step-1").id)[0]
    world.spool.update_file(file.file, state=FileState.DIGESTED, digest="1" * 64)
    opened = world.vfs.open(world.a, node.ino, os.O_RDWR)
    assert world.spool.file(file.file).state is FileState.OPEN
    assert world.spool.file(file.file).digest == ""
    world.close(world.a, opened)


def test_bytes_that_are_in_the_store_are_copied_before_they_are_written(world):
    """I9: what a store may share is never written again."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"old")
    (_, node, file) = world.spool.files_of_attempt(world.attempt("step-1").id)[0]
    world.spool.update_file(file.file, state=FileState.DIGESTED)
    world.spool.update_file(file.file, state=FileState.STORED, is_linked=True)
    with open(world.spool.data_path(file.file), "rb") as kept:
        opened = world.vfs.open(world.a, node.ino, os.O_RDWR)
        os.pwrite(opened.fd, b"NEW", 0)
        assert kept.read() == b"old"
    world.close(world.a, opened)
    assert world.read(world.a, "step-1/w") == b"NEW"


def test_a_node_that_lost_its_name_by_the_commit_is_not_opened_from_a_stale_name(world):
    """I8: the kernel looks the name up again, though it was not told yet."""
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w")
    old = world.walk(world.a, "step-1/w").attr.ino
    world.vfs.flush(world.a, opened.fh)
    row = world.commit_own("", "step-1")
    assert world.read(world.b, "step-1/w") == b""
    world.spool.unlink(row.root, "w")
    with pytest.raises(CkptError) as caught:
        world.vfs.open(world.b, old, os.O_RDONLY)
    assert caught.value.errno == errno.ESTALE
    assert os.pwrite(opened.fd, b"x", 0) == 1, "whoever has it open goes on"
    world.vfs.release(opened.fh)


def test_a_reader_of_stored_bytes_keeps_them_while_a_writer_gets_a_new_node(world):
    """I8."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"old")
    (_, node, file) = world.spool.files_of_attempt(world.attempt("step-1").id)[0]
    world.spool.update_file(file.file, state=FileState.DIGESTED)
    world.spool.update_file(file.file, state=FileState.STORED)
    reader = world.vfs.open(world.a2, node.ino, os.O_RDONLY)
    with pytest.raises(CkptError) as caught:
        world.vfs.open(world.a, node.ino, os.O_WRONLY)
    assert caught.value.errno == errno.ESTALE
    new = world.walk(world.a, "step-1/w").attr.ino
    assert new != node.ino
    opened = world.vfs.open(world.a, new, os.O_WRONLY)
    os.pwrite(opened.fd, b"new", 0)
    assert os.pread(reader.fd, 9, 0) == b"old"
    world.close(world.a, opened)
    world.close(world.a2, reader)


def test_names_inside_an_attempt_can_be_renamed_over_and_removed(world):
    world.mkdir(world.a, "step-1")
    world.mkdir(world.a, "step-1/sub")
    world.write(world.a, "step-1/x.tmp", b"1")
    world.write(world.a, "step-1/sub/x", b"2")
    world.rename(world.a, "step-1/x.tmp", "step-1/sub/x")
    assert world.read(world.a, "step-1/sub/x") == b"1"
    with pytest.raises(CkptError) as caught:
        world.rmdir(world.a, "step-1/sub")
    assert caught.value.errno == errno.ENOTEMPTY
    world.unlink(world.a, "step-1/sub/x")
    world.rmdir(world.a, "step-1/sub")
    assert world.names(world.a, "step-1") == []


def test_a_file_can_be_renamed_while_it_is_open(world):
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/.tmp1")
    world.rename(world.a, "step-1/.tmp1", "step-1/m.safetensors")
    os.pwrite(opened.fd, b"late", 0)
    world.close(world.a, opened)
    assert world.read(world.a, "step-1/m.safetensors") == b"late"


def test_noreplace_and_exchange(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/x", b"x")
    world.write(world.a, "step-1/y", b"y")
    with pytest.raises(ExistsError):
        world.rename(world.a, "step-1/x", "step-1/y", 1)
    world.rename(world.a, "step-1/x", "step-1/y", 2)
    assert world.read(world.a, "step-1/x") == b"y"
    assert world.read(world.a, "step-1/y") == b"x"


def test_a_directory_is_not_moved_into_itself(world):
    world.mkdir(world.a, "step-1")
    world.mkdir(world.a, "step-1/d")
    world.mkdir(world.a, "step-1/d/e")
    with pytest.raises(CkptError) as caught:
        world.rename(world.a, "step-1/d", "step-1/d/e/f")
    assert caught.value.errno == errno.EINVAL


def test_a_removed_open_file_lives_until_it_is_forgotten(world):
    """The node and its bytes go with the last handle and look-up, not before."""
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"abc")
    ino = world.walk(world.a, "step-1/w").attr.ino
    file = world.spool.node(ino).file
    opened = world.vfs.open(world.a, ino, os.O_RDONLY)
    world.unlink(world.a, "step-1/w")
    assert world.vfs.getattr(world.a, ino, opened.fh).nlink == 0
    assert os.pread(opened.fd, 9, 0) == b"abc"
    world.vfs.forget([(ino, 1)])
    assert world.spool.node(ino) is not None
    world.close(world.a, opened)
    world.vfs.forget([(ino, 1000)])
    assert world.spool.node(ino) is None
    assert world.spool.file(file) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a\nb", errno.EINVAL),
        ("\udcff", errno.EILSEQ),
        ("x" * 256, errno.ENAMETOOLONG),
        ("step-" + "x" * 240, errno.ENAMETOOLONG),
    ],
)
def test_names_that_cannot_be_stored_are_refused(world, name, value):
    """I13: a hostile name is an error that says so."""
    with pytest.raises(InvalidNameError) as caught:
        world.vfs.mkdir(world.a, ROOT, name, 0o755)
    assert caught.value.errno == value


def test_the_gateways_own_directory_is_neither_seen_nor_made(world):
    world.catalog.add_plain(".ckptgate", kind="dir")
    with pytest.raises(MissingError):
        world.walk(world.a, ".ckptgate")
    with pytest.raises(RefusedError) as caught:
        world.mkdir(world.a, ".ckptgate")
    assert caught.value.errno == errno.EACCES
    assert world.names(world.a) == []


def test_a_path_that_is_too_long_is_refused(world):
    ino = ROOT
    with pytest.raises(InvalidNameError) as caught:
        for _ in range(40):
            ino = world.vfs.mkdir(world.a, ino, "d" * 200, 0o755).attr.ino
    assert caught.value.errno == errno.ENAMETOOLONG


def test_plain_names_are_visible_at_once_and_queued_for_the_store(world):
    world.mkdir(world.a, "logs")
    world.write(world.a, "logs/train.log", b"line\n")
    world.symlink(world.a, "train.log", "logs/now")
    assert world.read(world.b, "logs/train.log") == b"line\n"
    assert world.readlink(world.b, "logs/now") == "train.log"
    ops = [(row.op, row.path) for row in world.spool.plain_ops()]
    assert ops == [
        (PlainOpKind.MKDIR, "logs"),
        (PlainOpKind.PUT, "logs/train.log"),
        (PlainOpKind.SYMLINK, "logs/now"),
    ]


def test_a_plain_directory_is_renamed_with_all_below(world):
    world.mkdir(world.a, "old")
    world.mkdir(world.a, "old/sub")
    world.write(world.a, "old/sub/x", b"1")
    world.rename(world.a, "old", "new")
    node = world.spool.node(world.walk(world.a, "new/sub/x").attr.ino)
    assert node.plain_path == "new/sub/x"
    assert not world.exists(world.a, "old")


def test_a_run_directory_cannot_be_renamed(world):
    world.mkdir(world.a, "run")
    world.mkdir(world.a, "run/step-1")
    with pytest.raises(CkptError) as caught:
        world.rename(world.a, "run", "other")
    assert caught.value.errno == errno.EBUSY


def test_what_only_the_store_has_is_listed_and_read(world):
    world.catalog.add_plain("config.json", b"{}")
    world.catalog.add_plain("run", kind="dir", is_managed=True)
    assert world.names(world.a) == ["config.json"]
    assert world.read(world.a, "config.json") == b"{}"


def test_appending_to_a_file_of_the_store_fetches_it_first(world):
    world.catalog.add_plain("train.log", b"one\n")
    ino = world.walk(world.a, "train.log").attr.ino
    opened = world.vfs.open(world.a, ino, os.O_WRONLY | os.O_APPEND)
    os.pwrite(opened.fd, b"two\n", 4)
    world.close(world.a, opened)
    assert world.read(world.a, "train.log") == b"one\ntwo\n"


def test_a_file_that_the_store_was_given_follows_the_store(world):
    """Another node replaces it there; what is newer here is kept."""
    world.write(world.a, "config.json", b"mine")
    world.catalog.add_plain("config.json", b"theirs")
    assert world.read(world.a, "config.json") == b"mine"
    for op in world.spool.plain_ops():
        world.spool.drop_plain_op(op.id)
    assert world.read(world.a, "config.json") == b"mine"
    node = world.spool.node(world.walk(world.a, "config.json").attr.ino)
    found = os.stat(world.spool.data_path(node.file))
    world.spool.update_file(node.file, size=found.st_size, mtime_ns=found.st_mtime_ns)
    world.clock.sleep(2)
    assert world.read(world.b, "config.json") == b"theirs"


def test_a_removed_name_of_the_store_stays_away_until_the_store_agrees(world):
    world.catalog.add_plain("old.log", b"x")
    world.unlink(world.a, "old.log")
    assert not world.exists(world.b, "old.log")
    assert world.names(world.b) == []


def test_nothing_waits_on_a_protocol_thread(world):
    from ckptgate.errors import WouldBlockError
    from ckptgate.vfs.interface import Caller

    world.catalog.fresh = False
    quick = Caller(0, 0, 100)
    with pytest.raises(WouldBlockError):
        world.vfs.lookup(quick, ROOT, "step-1")


def test_attributes_are_changed(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"12345")
    ino = world.walk(world.a, "step-1/w").attr.ino
    attr = world.vfs.setattr(world.a, ino, SetAttr(mode=0o600, mtime_ns=10**18), None)
    assert (attr.mode, attr.mtime_ns) == (0o600, 10**18)
    assert world.vfs.setattr(world.a, ino, SetAttr(size=2), None).size == 2
    assert world.read(world.a, "step-1/w") == b"12"
    (_, _, file) = world.spool.files_of_attempt(world.attempt("step-1").id)[0]
    assert file.state is FileState.QUIET


def test_a_symlink_out_of_its_checkpoint_is_refused(world):
    """I13."""
    world.mkdir(world.a, "step-1")
    world.symlink(world.a, "w", "step-1/ok")
    with pytest.raises(RefusedError):
        world.symlink(world.a, "../../etc/passwd", "step-1/bad")


def test_xattrs_commit_and_show_the_state(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w", b"1")
    ino = world.walk(world.a, "step-1").attr.ino
    world.vfs.setxattr(world.a, ino, "user.ckptgate.commit", b"0/2", 0)
    assert world.spool.rank_commits(world.attempt("step-1").id) == (0,)
    assert world.attempt("step-1").state is AttemptState.OPEN
    world.vfs.setxattr(world.a, ino, "user.ckptgate.commit", b"1/2", 0)
    assert world.attempt("step-1").state is AttemptState.SEALED
    assert b'"sealed"' in world.vfs.getxattr(world.a, ino, "user.ckptgate.state")
    with pytest.raises(CkptError) as caught:
        world.vfs.setxattr(world.a, ino, "user.ckptgate.commit", b"7", 0)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(CkptError) as caught:
        world.vfs.setxattr(world.a, ino, "user.ckptgate.other", b"7", 0)
    assert caught.value.errno == errno.ENOTSUP


def test_a_reply_is_remembered_with_the_mutation(world):
    from ckptgate.vfs.interface import Caller

    caller = Caller(0, 0, 100, may_block=True, request=77)
    assert world.vfs.replay(caller) is None
    with world.vfs.atomic(caller):
        world.vfs.mkdir(caller, ROOT, "d", 0o755)
        world.vfs.remember(caller, b"done")
    assert world.vfs.replay(caller) == b"done"


def test_a_mutation_that_fails_leaves_nothing(world):
    """I10: a mutation and its reply are one transaction."""
    with pytest.raises(ZeroDivisionError), world.vfs.atomic(world.a):
        world.vfs.mkdir(world.a, ROOT, "d", 0o755)
        raise ZeroDivisionError
    assert not world.exists(world.a, "d")


def test_a_changed_local_copy_is_read_and_copied_by_way_of_the_store(world):
    """Rule 12: what `is_local` lets go is neither served nor the source of a revision."""
    world.commit("", "step-1", {"w": b"evil"})
    file = world.spool.node(world.walk(world.a, "step-1/w").attr.ino).file
    path = Path(world.spool.data_path(file))

    def is_local(asked):
        assert asked == file
        path.unlink(missing_ok=True)
        return False

    def fetch(asked, offset, length):
        world.catalog.fetched.append((asked, offset, length))
        path.unlink()
        path.write_bytes(b"good")

    world.catalog.is_local = is_local
    world.catalog.fetch = fetch
    opened = world.vfs.open(world.a, world.walk(world.a, "step-1/w").attr.ino, os.O_RDONLY)
    assert not opened.is_complete
    assert not opened.keep_cache
    world.vfs.ensure(world.a, opened.fh, 0, 4)
    # The descriptor follows to the file that the fetch made.
    assert os.pread(opened.fd, 10, 0) == b"good"
    world.close(world.a, opened)
    parent, name = world.place(world.a, "step-1/w")
    with pytest.raises(CkptError):
        world.vfs.open(world.a, world.vfs.lookup(world.a, parent, name).attr.ino, os.O_RDWR)
    opened = world.vfs.open(world.a, world.walk(world.a, "step-1/w").attr.ino, os.O_RDWR)
    assert os.pread(opened.fd, 10, 0) == b"good"
    assert [item[0] for item in world.catalog.fetched] == [file, file]
    world.close(world.a, opened)


def test_a_new_spool_file_never_empties_one_that_has_another_name(tmp_path):
    """Rule 11: bytes left by a crash may be the store's own by now."""
    old, shared = tmp_path / "7", tmp_path / "stored"
    old.write_bytes(b"precious")
    os.link(old, shared)
    os.close(make_file(str(old)))
    assert old.read_bytes() == b""
    assert shared.read_bytes() == b"precious"


def test_a_file_says_which_rank_wrote_it(world):
    """Formats of which every rank has to write something count by it."""
    other = RankInfo(rank=1, world_size=2)
    world.identify.add(701, world.identify.processes[world.s.pid].job_key, other)
    one = msgspec.structs.replace(world.s, pid=701)
    world.mkdir(world.s, "run")
    world.mkdir(world.s, "run/step-1")
    world.write(world.s, "run/step-1/a", b"x")
    world.write(one, "run/step-1/b", b"y")
    row = world.attempt("step-1")

    def ranks() -> dict[str, int]:
        return {path: file.evidence.rank for path, _, file in world.spool.files_of_attempt(row.id)}

    assert ranks() == {"a": 0, "b": 1}
    counts = world.spool.count_ranks(row.id)
    assert {rank: list(states.values()) for rank, states in counts.items()} == {
        0: [(1, 1)],
        1: [(1, 1)],
    }
    world.write(one, "run/step-1/a", b"rewritten")
    assert ranks() == {"a": 1, "b": 1}
    # Who tells no rank takes none away.
    world.identify.add(702, world.identify.processes[world.s.pid].job_key)
    world.write(msgspec.structs.replace(world.s, pid=702), "run/step-1/c", b"z")
    assert ranks()["c"] == -1
