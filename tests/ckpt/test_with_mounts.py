"""Nodes on mounts and processes on `ckpt://` in one job, and the daemon of a mount as theirs."""

from __future__ import annotations

import os
import subprocess
import sys

import fsspec
import pytest
from tests.ckpt.places import Place
from tests.e2e.harness import Cluster, cluster, job, until

pytestmark = pytest.mark.fuse

SAVE = """
import os, sys, ckptgate
path, rank = sys.argv[1], int(sys.argv[2])
os.makedirs(path, exist_ok=True)
with open(f"{path}/rank{rank}.bin", "wb") as f:
    f.write(bytes([rank]) * 10_000)
ckptgate.commit(path, rank, 2)
"""
SAVE_BY_URL = """
import sys, fsspec, ckptgate
path, rank = sys.argv[1], int(sys.argv[2])
with fsspec.open(f"{path}/rank{rank}.bin", "wb") as f:
    f.write(bytes([rank]) * 10_000)
ckptgate.commit(path, rank, 2)
"""


@pytest.fixture(scope="module")
def shared(require, tmp_path_factory):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    with cluster(tmp_path_factory.mktemp("mounts")) as made:
        yield made


def test_a_job_on_a_mount_and_on_urls_commits_together(shared: Cluster, tmp_path):
    """Two nodes: one has a mount, the other a spool of its own and no mount."""
    place = Place.make(tmp_path, store=str(shared.store))
    try:
        first = job(SAVE, shared.nodes[0].mnt / "run/step-1", "0", run_id="mixed")
        assert first.returncode == 0, first.stderr
        done = place.python(SAVE_BY_URL, "ckpt://run/step-1", "1", run_id="mixed")
        assert done.returncode == 0, done.stderr
        published = shared.store / "run/step-1"
        until("the commit", published.is_dir, 60)
        for rank in (0, 1):
            assert (published / f"rank{rank}.bin").read_bytes() == bytes([rank]) * 10_000
        assert place.fs().cat("run/step-1/rank0.bin") == b"\0" * 10_000
    finally:
        place.end()


def test_the_daemon_of_a_mount_serves_clients_too(shared: Cluster, tmp_path):
    """The same spool: what a process writes by URL its job sees on the mount at once."""
    node = shared.nodes[0]
    fs = fsspec.filesystem("ckpt", store=str(shared.store))
    fs.pipe("run2/step-1/a.bin", b"by url")
    assert (node.mnt / "run2/step-1/a.bin").read_bytes() == b"by url"
    (node.mnt / "run2/step-1/b.bin").write_bytes(b"by path")
    assert fs.cat("run2/step-1/b.bin") == b"by path"
    fs.mv("run2/step-1/a.bin", "run2/step-1/c.bin")
    assert sorted(os.listdir(node.mnt / "run2/step-1")) == ["b.bin", "c.bin"]
    fs.pipe("run2/step-1/b.bin", b"again")
    assert (node.mnt / "run2/step-1/b.bin").read_bytes() == b"again"
    fs.commit("run2/step-1")
    fs.wait("run2/step-1", 60)
    assert fs.reach(False, False) == str(node.spool)
    fs.client.close()


def test_a_mount_killed_while_a_client_writes_loses_nothing(shared: Cluster):
    node = shared.nodes[0]
    fs = fsspec.filesystem("ckpt", store=str(shared.store))
    with fs.open("run3/step-1/a.bin", "wb") as file:
        file.write(b"a" * 200_000)
        node.kill("mount")
        file.write(b"b" * 200_000)
    assert fs.cat("run3/step-1/a.bin") == b"a" * 200_000 + b"b" * 200_000
    assert (node.mnt / "run3/step-1/a.bin").stat().st_size == 400_000
    fs.client.close()


def test_an_unmount_is_refused_while_a_client_has_a_file_open(tmp_path):
    """Exit code 7 as with a file that is open by its path, and who it is; then nothing is lost."""
    with cluster(tmp_path) as made:
        (node,) = made.nodes
        fs = fsspec.filesystem("ckpt", store=str(made.store))
        with fs.open("run/notes.txt", "wb") as file:
            file.write(b"before")
            done = node.stop(timeout=1)
            assert done.returncode == 7, done.stderr
            assert f"by ckpt:// in process {os.getpid()} (" in done.stderr
            assert os.path.ismount(node.mnt)
            file.write(b" and after")
        with fs.open("run/notes.txt", "rb") as file:
            assert node.stop(timeout=1).returncode == 7
            assert file.read() == b"before and after"
        done = node.stop()
        assert done.returncode == 0, done.stderr
        assert (made.store / "run/notes.txt").read_bytes() == b"before and after"
        fs.client.close()


def test_a_lazy_unmount_lets_a_client_close_its_file(tmp_path):
    """As it lets who has one open by its path."""
    with cluster(tmp_path) as made:
        (node,) = made.nodes
        fs = fsspec.filesystem("ckpt", store=str(made.store))
        with fs.open("run/notes.txt", "wb") as file:
            file.write(b"before")
            command = [sys.executable, "-m", "ckptgate.app.cli", "umount", "--lazy", str(node.mnt)]
            leaving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            until("the unmount", lambda: not os.path.ismount(node.mnt))
            file.write(b" and after")
        _, errors = leaving.communicate(timeout=60)
        assert leaving.returncode == 0, errors
        assert (made.store / "run/notes.txt").read_bytes() == b"before and after"
        fs.client.close()
