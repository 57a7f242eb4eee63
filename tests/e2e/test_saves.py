"""The main job on real mounts, through the command line: on a directory, and (full) on a bucket.

The bucket is one of real SeaweedFS; what is in it is looked at with boto3.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.buckets import BucketCluster, bucket_cluster
from tests.e2e.harness import Cluster, cluster, job, kill_daemon, start_job, tree, until
from tests.s3.servers import Bucket

pytestmark = [pytest.mark.fuse]

Made = Callable[..., contextlib.AbstractContextManager[Cluster | BucketCluster]]


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")


@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.full)])
def made(request, tmp_path: Path) -> Made:
    """Makes a started cluster of some nodes."""
    if request.param == "directory":
        return partial(cluster, tmp_path)
    bucket: Bucket = request.getfixturevalue("bucket")
    return partial(bucket_cluster, tmp_path, bucket)


SAVE = """
import os, sys, ckptgate
path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.makedirs(path, exist_ok=True)
with open(f"{path}/rank{rank}.bin", "wb") as f:
    f.write(bytes([rank]) * 300_000)
ckptgate.commit(path, rank, world)
"""


def is_tree(path: Path, expected: dict[str, bytes]) -> bool:
    """Whether a reader finds just that."""
    try:
        return tree(path) == expected
    except FileNotFoundError:
        return False


def is_committed(c: Cluster | BucketCluster, name: str) -> bool:
    """Whether the store's log says so."""
    return name in c.committed("")


def shows(c: Cluster | BucketCluster, path: str) -> bool:
    """Whether the store shows files under a checkpoint's name."""
    return bool(c.shown(path))


def test_a_checkpoint_is_visible_only_after_all_ranks_committed(made: Made):
    """I8: before the COMMIT only the job sees it; after it everybody does, and `latest` moves."""
    with made(nodes=2) as c:
        one, two = c.nodes
        (one.mnt / "run").mkdir()
        until("the run on the other node", lambda: (two.mnt / "run").is_dir())
        assert job(SAVE, one.mnt / "run/step-1", "0", "2").returncode == 0
        assert not (one.mnt / "run/step-1").exists()
        assert os.listdir(two.mnt / "run") == []
        assert c.names("run") == []
        own = job("import os,sys; print(os.listdir(sys.argv[1]))", one.mnt / "run")
        assert "step-1" in own.stdout
        assert job(SAVE, two.mnt / "run/step-1", "1", "2").returncode == 0
        until("the commit", lambda: c.pointer("run/latest"))
        assert c.pointer("run/latest") == "step-1"
        expected = {f"rank{r}.bin": bytes([r]) * 300_000 for r in range(2)}
        for node in c.nodes:
            until("the name", (node.mnt / "run/step-1").exists)
            assert tree(node.mnt / "run/step-1") == expected
            assert os.readlink(node.mnt / "run/latest") == "step-1"
        assert c.shown("run/step-1") == expected


def test_copying_a_directory_in_and_committing_it_by_hand(made: Made, tmp_path: Path):
    """`cp -r x mnt/step-1; ls mnt/step-1; ckptgate commit --all` does what a person expects."""
    source = tmp_path / "x"
    (source / "sub/empty").mkdir(parents=True)
    (source / "model.bin").write_bytes(os.urandom(100_000))
    (source / "sub/zero").write_bytes(b"")
    (source / "sub/link").symlink_to("../model.bin")
    with made() as c:
        (node,) = c.nodes
        target = node.mnt / "step-1"
        subprocess.run(["cp", "-r", source, target], check=True)
        assert sorted(os.listdir(target)) == ["model.bin", "sub"]
        done = c.cli("commit", target, "--all", "--wait", "--timeout", "30")
        assert done.returncode == 0, done.stderr
        until("it is shown", lambda: shows(c, "step-1"))
        assert c.shown("step-1") == tree(source)
        assert os.readlink(node.mnt / "step-1/sub/link") == "../model.bin"
        if isinstance(c, Cluster):
            assert (c.store / "step-1/sub/empty").is_dir()
            check = ["b3sum", "--check", ".ckptgate/b3sums"]
            subprocess.run(check, cwd=c.store / "step-1", check=True)
        assert c.cli("verify", c.address("step-1")).returncode == 0
        shown = json.loads(c.cli("show", node.mnt / "step-1", "--json").stdout)
        assert {e["path"] for e in shown["entries"]} == {
            "model.bin", "sub", "sub/empty", "sub/link", "sub/zero",
        }  # fmt: skip


def test_killing_the_mount_and_the_publisher_loses_nothing(made: Made):
    """I10, I11: kill -9 of either process in the middle of a save; the save goes on and commits."""
    code = """
import os, sys, ckptgate
path = sys.argv[1]
os.makedirs(path)
with open(f"{path}/a.bin", "wb", buffering=0) as f:
    for i in range(8):
        f.write(bytes([i]) * 65536)
        print(i, flush=True)
        sys.stdin.readline()
with open(f"{path}/b.bin", "wb") as f:
    f.write(b"b" * 1000)
assert sorted(os.listdir(path)) == ["a.bin", "b.bin"]
ckptgate.commit(path, 0, 1)
ckptgate.wait(path, 60)
print("committed", flush=True)
"""
    with made() as c:
        (node,) = c.nodes
        with start_job(code, node.mnt / "step-1") as writer:
            for i in range(8):
                line = writer.stdout.readline()
                assert line == f"{i}\n", writer.stderr.read()
                if i in (2, 5):
                    node.kill("mount")
                if i in (3, 5):
                    node.kill("publisher")
                writer.stdin.write("\n")
                writer.stdin.flush()
            out, err = writer.communicate(timeout=90)
        assert writer.returncode == 0, err
        assert "committed" in out
        until("it is shown", lambda: shows(c, "step-1"))
        assert c.shown("step-1") == {
            "a.bin": b"".join(bytes([i]) * 65536 for i in range(8)),
            "b.bin": b"b" * 1000,
        }


def test_a_rank_that_dies_leaves_latest_where_it_was(made: Made):
    """I4: without its commit there is no SEAL, and status names the rank that owes it."""
    with made() as c:
        (node,) = c.nodes
        assert job(SAVE, node.mnt / "run/step-1", "0", "1").returncode == 0
        until("step-1", lambda: c.pointer("run/latest"))
        assert job(SAVE, node.mnt / "run/step-2", "0", "2").returncode == 0
        until(
            "what is owed",
            lambda: [r for r in node.attempts("step-2") if "ranks 1 of 2" in str(r["missing"])],
        )
        assert c.pointer("run/latest") == "step-1"
        waited = c.cli("wait", node.mnt / "run/step-2", "--timeout", "1")
        assert waited.returncode == 2, waited.stderr
        aborted = c.cli("abort", node.mnt / "run/step-2", "--reason", "rank 1 is dead")
        assert aborted.returncode == 0, aborted.stderr
        assert c.cli("wait", node.mnt / "run/step-2").returncode == 3
        assert os.readlink(node.mnt / "run/latest") == "step-1"
        assert c.committed("run") == ["step-1"]


def test_live_files_are_seen_at_once_and_reach_the_store(made: Made):
    with made(nodes=2) as c:
        one, two = c.nodes
        log = one.mnt / "run/train.log"
        log.parent.mkdir()
        with log.open("a", buffering=1) as stream:
            stream.write("step 1\n")
            assert log.read_text() == "step 1\n"
            until("the copy", lambda: c.plain("run/train.log"))
            stream.write("step 2\n")
        until("all of it", lambda: c.plain("run/train.log") == b"step 1\nstep 2\n")
        assert (two.mnt / "run/train.log").read_text() == "step 1\nstep 2\n"


def test_mkdir_and_rename_on_one_node_writes_on_the_other(made: Made):
    """One name space for an open attempt; the rename to the final name seals it."""
    with made(nodes=2) as c:
        one, two = c.nodes
        began = job("import os,sys; os.makedirs(sys.argv[1])", one.mnt / "run/step-7.tmp/items")
        assert began.returncode == 0, began.stderr
        write = "import sys; open(sys.argv[1], 'wb').write(sys.argv[2].encode() * 1000)"
        for node, name in ((two, "b"), (one, "a")):
            done = job(write, node.mnt / f"run/step-7.tmp/items/{name}", name)
            assert done.returncode == 0, done.stderr
        done = job(
            "import os,sys; os.rename(sys.argv[1] + '.tmp', sys.argv[1])", one.mnt / "run/step-7"
        )
        assert done.returncode == 0, done.stderr
        until("the commit", lambda: shows(c, "run/step-7"))
        expected = {"items/a": b"a" * 1000, "items/b": b"b" * 1000}
        assert c.shown("run/step-7") == expected
        for node in c.nodes:
            assert tree(node.mnt / "run/step-7") == expected


def test_a_committed_checkpoint_changes_only_as_a_whole_revision(made: Made):
    """I8: a reader sees the old one until the revision is committed, then the new one."""
    with made(nodes=2) as c:
        one, two = c.nodes
        assert job(SAVE, one.mnt / "step-1", "0", "1").returncode == 0
        until("it is shown", lambda: shows(c, "step-1"))
        until("the name", lambda: (two.mnt / "step-1/rank0.bin").exists())
        edit = """
import sys, os
path = sys.argv[1]
open(f"{path}/extra.json", "w").write("{}")
with open(f"{path}/rank0.bin", "r+b") as f:
    f.seek(10)
    f.write(b"changed")
assert open(f"{path}/rank0.bin", "rb").read(20)[10:17] == b"changed"
"""
        done = job(edit, one.mnt / "step-1")
        assert done.returncode == 0, done.stderr
        old = {"rank0.bin": b"\0" * 300_000}
        assert tree(one.mnt / "step-1") == old
        assert tree(two.mnt / "step-1") == old
        done = job("import ckptgate,sys; ckptgate.commit(sys.argv[1], 0, 1)", one.mnt / "step-1")
        assert done.returncode == 0, done.stderr
        new = {"rank0.bin": b"\0" * 10 + b"changed" + b"\0" * 299_983, "extra.json": b"{}"}
        until("the revision", lambda: c.shown("step-1") == new)
        for node in c.nodes:
            until("the revision everywhere", partial(is_tree, node.mnt / "step-1", new))
        assert c.cli("verify", c.address("step-1")).returncode == 0


def test_deleting_a_committed_checkpoint(made: Made):
    """The newest one is kept for everybody else; an older one is retired."""
    with made() as c:
        (node,) = c.nodes
        for name in ("step-1", "step-2"):
            assert job(SAVE, node.mnt / name, "0", "1").returncode == 0
            until(name, partial(is_committed, c, name))
        shutil.rmtree(node.mnt / "step-1")
        assert not (node.mnt / "step-1").exists()
        until("the retirement", lambda: not shows(c, "step-1"))
        assert c.committed("") == ["step-2"]
        assert (node.mnt / "step-2").exists()


def test_a_reader_of_what_is_only_in_the_store_goes_on_over_a_killed_mount(made: Made):
    """I8: the successor knows of a descriptor, and not yet that its bytes are missing here."""
    with made(nodes=2) as c:
        one, two = c.nodes
        (one.mnt / "step-1").mkdir()
        (one.mnt / "step-1/a").write_bytes(b"a" * 300_000)
        assert c.cli("commit", one.mnt / "step-1", "--all").returncode == 0
        until("the name", lambda: (two.mnt / "step-1/a").exists())
        with (two.mnt / "step-1/a").open("rb", buffering=0) as stream:
            two.kill("mount")
            assert stream.read(300_000) == b"a" * 300_000


@pytest.mark.full
def test_who_has_the_directory_open_reads_one_save_and_who_goes_by_path_the_newest(made: Made):
    """I8: between two opens by path the name may come to mean the next save."""
    with made() as c:
        (node,) = c.nodes
        step = node.mnt / "run/step-1"
        for fill in (b"1", b"2"):
            code = "import os, sys; os.makedirs(sys.argv[1], exist_ok=True)\n"
            code += "for n in 'ab': open(f'{sys.argv[1]}/{n}', 'w').write(sys.argv[2] * 1000)\n"
            code += "os.setxattr(sys.argv[1], 'user.ckptgate.commit', b'all')"
            done = job(code, step, fill.decode(), run_id=f"job{fill.decode()}")
            assert done.returncode == 0, done.stderr
            until("the commit", partial(is_tree, step, {"a": fill * 1000, "b": fill * 1000}))
            if fill == b"1":
                held = os.open(step, os.O_RDONLY | os.O_DIRECTORY)
        with os.fdopen(os.open("b", os.O_RDONLY, dir_fd=held), "rb") as old:
            assert old.read() == b"1" * 1000
        os.close(held)


@pytest.mark.full
def test_a_node_that_was_killed_goes_on_at_its_next_mount(made: Made):
    """I10, I11: kill -9 of all its processes while the other rank hasn't begun."""
    with made(nodes=2) as c:
        one, two = c.nodes
        (one.mnt / "run").mkdir()
        until("the run on the other node", lambda: (two.mnt / "run").is_dir())
        assert job(SAVE, one.mnt / "run/step-1", "0", "2").returncode == 0
        kill_daemon(one.spool)
        assert job(SAVE, two.mnt / "run/step-1", "1", "2").returncode == 0
        until("a new mount", lambda: one.mount().returncode == 0)
        until("the commit", lambda: c.pointer("run/latest"), 60)
        expected = {f"rank{r}.bin": bytes([r]) * 300_000 for r in range(2)}
        assert c.shown("run/step-1") == expected
        for node in c.nodes:
            until("all of it", partial(is_tree, node.mnt / "run/step-1", expected))
