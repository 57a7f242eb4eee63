"""What calls mean while the store is away, and after a kill -9 of the mount process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Gateway, cli, job, until

pytestmark = [pytest.mark.fuse]


@contextmanager
def store_away(cluster: Cluster) -> Iterator[None]:
    """The store's root is not there."""
    hidden = cluster.store.with_name("away")
    cluster.store.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(cluster.store)


def commit(path: Path) -> None:
    os.setxattr(path, "user.ckptgate.commit", b"all")


def is_committed(path: Path) -> bool:
    return b'"committed"' in os.getxattr(path, "user.ckptgate.state")


def test_a_save_goes_on_without_the_store(shared: Cluster, run: Path):
    """I11: all calls of a save succeed; the commit follows when the store is back."""
    (run / "step-0").mkdir()
    (run / "step-0/a").write_bytes(b"0")
    commit(run / "step-0")
    until("the commit", lambda: is_committed(run / "step-0"))
    with store_away(shared):
        path = run / "tmp_1"
        (path / "sub").mkdir(parents=True)
        (path / "sub/a").write_bytes(b"1")
        with (path / "sub/a").open("r+b") as stream:
            stream.write(b"2")
            os.fsync(stream.fileno())
        (path / "sub/b").write_bytes(b"b")
        (path / "sub/b").unlink()
        (path / "sub").rename(path / "items")
        assert os.listdir(path / "items") == ["a"]
        path.rename(run / "step-1")
        assert (run / "step-1/items/a").read_bytes() == b"2"
        assert (run / "step-0/a").read_bytes() == b"0"
        commit(run / "step-1")
        assert not is_committed(run / "step-1")
        seen = job("import os,sys; print(os.path.exists(sys.argv[1]))", run / "step-1", run_id="x")
        assert seen.stdout != "True\n"
    until("the commit", lambda: is_committed(run / "step-1"))
    assert os.readlink(run / "latest") == "step-1"


def test_live_files_are_written_without_the_store(shared: Cluster, run: Path):
    (run / "train.log").write_text("1")
    with store_away(shared):
        with (run / "train.log").open("a") as stream:
            stream.write("2")
        assert (run / "train.log").read_text() == "12"
    stored = shared.store / run.name / "train.log"
    until("the copy", lambda: stored.exists() and stored.read_text() == "12")


def test_what_only_the_store_knows_is_an_error_and_never_a_wrong_absence(
    shared: Cluster, run: Path
):
    """A name of which nothing is known here is EIO, not ENOENT."""
    stored = shared.store / run.name
    until("the directory", stored.is_dir)
    (stored / "sub").mkdir()
    (stored / "sub/given.txt").write_text("given")
    until("the directory here", (run / "sub").is_dir)
    with store_away(shared):
        with pytest.raises(OSError) as caught:
            (run / "sub/given.txt").read_text()
        assert caught.value.errno == errno.EIO
        with pytest.raises(OSError) as caught:
            os.listdir(run / "sub")
        assert caught.value.errno == errno.EIO
    assert (run / "sub/given.txt").read_text() == "given"


def test_a_killed_mount_loses_no_descriptor_name_or_lock(node: Gateway, run: Path):
    """I11: calls wait until its successor answers them; what was open goes on."""
    path = run / "step-1"
    path.mkdir()
    with (path / "a").open("wb", buffering=0) as out, (path / "a").open("rb") as stream:
        directory = os.open(path, os.O_RDONLY)
        fcntl.flock(out, fcntl.LOCK_EX)
        out.write(b"1")
        pid = node.kill("mount")
        out.write(b"2")
        assert stream.read() == b"12"
        os.rename("a", "b", src_dir_fd=directory, dst_dir_fd=directory)
        (path / "c").mkdir()
        assert sorted(os.listdir(directory)) == ["b", "c"]
        held = subprocess.run(["flock", "-n", path / "b", "true"], check=False)
        assert held.returncode != 0
        os.fsync(out)
        os.fsync(directory)
        os.close(directory)
        assert node.child("mount") != pid
    assert (path / "b").read_bytes() == b"12"
    commit(path)
    until("the commit", lambda: is_committed(path))


def test_a_killed_publisher_is_noticed_by_nobody(node: Gateway, run: Path):
    for step in range(3):
        path = run / f"step-{step}"
        path.mkdir()
        (path / "a").write_bytes(b"1")
        commit(path)
        node.kill("publisher")
        assert (path / "a").read_bytes() == b"1"
        until("the commit", partial(is_committed, path))
    assert os.readlink(run / "latest") == "step-2"


def test_a_mount_process_that_cannot_start_ends_the_command(tmp_path: Path, require):
    """The command says so, does not wait for ever, and leaves nothing mounted."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    made = Cluster(tmp_path)
    (broken,) = made.nodes
    (broken.spool / "mount.sock").mkdir(parents=True)
    try:
        done = cli("mount", made.store, broken.mnt, "--spool", broken.spool, timeout=60)
        assert done.returncode == 6, done.stderr
        assert not os.path.ismount(broken.mnt)
    finally:
        broken.destroy()
