"""Stores and spools that are read-only, full or go away; a dead supervisor. Nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway, cli, cluster, job, kill_daemon, start_job, until
from tests.e2e.test_mount import SAVE

pytestmark = [pytest.mark.fuse]


@pytest.fixture(autouse=True)
def _needs_root(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "mounting a tmpfs needs root")


@contextlib.contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def started(node: Gateway) -> Iterator[Gateway]:
    try:
        yield node.start()
    except BaseException:
        print(node.log()[-6000:])
        raise
    finally:
        node.destroy()


def test_a_read_only_store_is_refused_with_the_remedy(tmp_path: Path):
    """I13."""
    with tmpfs(tmp_path / "store", "size=1m,ro") as store:
        done = cli("mount", store, tmp_path / "mnt", "--spool", tmp_path / "spool")
        assert done.returncode == 6
        assert "read-only" in done.stderr.lower()
        assert "hint" in done.stderr
        assert not os.path.ismount(tmp_path / "mnt")


def test_a_read_only_spool_is_refused_with_the_remedy(tmp_path: Path):
    """I13."""
    (tmp_path / "store").mkdir()
    with tmpfs(tmp_path / "disk", "size=1m,ro") as disk:
        done = cli("mount", tmp_path / "store", tmp_path / "mnt", "--spool", disk / "spool")
        assert done.returncode == 6
        assert "--spool" in done.stderr


def test_a_full_store_delays_the_commit_and_loses_nothing(tmp_path: Path):
    """I11: the bytes stay in the spool; once there is room the same save is committed."""
    with (
        tmpfs(tmp_path / "store", "size=2m") as store,
        started(Gateway(tmp_path, "node", store)) as node,
    ):
        big = "import sys; open(sys.argv[1] + '/big.bin', 'wb').write(b'x' * 4_000_000)"
        (node.mnt / "step-1").mkdir()
        done = subprocess.run(["python3", "-c", big, node.mnt / "step-1"], check=False)
        assert done.returncode == 0
        assert cli("commit", node.mnt / "step-1", "--all").returncode == 0
        until("the refusal", lambda: [e for e in node.status()["events"] if "full" in e["kind"]])
        assert not (store / "step-1").exists()
        assert (node.mnt / "step-1/big.bin").stat().st_size == 4_000_000
        subprocess.run(["mount", "-o", "remount,size=20m", store], check=True)
        until("the commit", lambda: (store / "step-1/big.bin").exists(), 60)
        assert (store / "step-1/big.bin").read_bytes() == b"x" * 4_000_000


def test_a_full_spool_is_enospc_at_the_write_and_the_mount_goes_on(tmp_path: Path):
    (tmp_path / "store").mkdir()
    with tmpfs(tmp_path / "disk", "size=40m") as disk:
        node = Gateway(tmp_path, "node", tmp_path / "store")
        node.spool = disk / "spool"
        with started(node):
            assert job(SAVE, node.mnt / "step-1", "0", "1").returncode == 0
            until("step-1", lambda: (node.store / "step-1").is_dir())
            (node.mnt / "step-2").mkdir()
            fd = os.open(node.mnt / "step-2/big.bin", os.O_CREAT | os.O_WRONLY)
            with pytest.raises(OSError) as caught:
                for _ in range(64):
                    os.write(fd, b"y" * (1 << 20))
            assert caught.value.errno == errno.ENOSPC
            os.close(fd)
            assert os.statvfs(disk).f_bavail == 0
            (node.mnt / "step-2/big.bin").unlink()
            until("room", lambda: os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize > 4 << 20)
            assert (node.mnt / "step-1/rank0.bin").read_bytes() == b"\0" * 300_000
            assert job(SAVE, node.mnt / "step-3", "0", "1").returncode == 0
            until("step-3", lambda: (node.store / "step-3").is_dir())


def test_a_store_that_goes_away_for_a_while(tmp_path: Path):
    """I11: saves go on into the spool; when it is back they are committed."""
    disk = tmp_path / "disk"
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        assert job(SAVE, node.mnt / "run/step-1", "0", "1").returncode == 0
        until("step-1", lambda: (c.store / "run/step-1").is_dir())
        c.store.rename(disk)
        saved = job(SAVE, node.mnt / "run/step-2", "0", "1")
        assert saved.returncode == 0, saved.stderr
        assert node.attempts("step-2")[0]["state"] in {"open", "sealed"}
        disk.rename(c.store)
        until("step-2", lambda: (c.store / "run/step-2").is_dir(), 60)
        until("latest", lambda: os.readlink(c.store / "run/latest") == "step-2")


def test_commands_wait_for_a_publisher_that_is_being_started_again(tmp_path: Path):
    """Each may come just after its death; none fails, none is done twice."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        step = node.mnt / "run/step-1"
        assert job(SAVE, step, "0", "2").returncode == 0
        commit = ("commit", step, "--rank", "1", "--world-size", "2", "--wait")
        for words in (("status", node.mnt), commit, ("pin", step), ("gc", node.mnt, "--dry-run")):
            node.kill("publisher")
            done = cli(*words)
            assert done.returncode in ({0, 2} if words[0] == "status" else {0}), (
                words,
                done.stderr,
            )
        assert [row["name"] for row in node.status()["attempts"]] == ["step-1"]


def test_after_a_dead_supervisor_the_next_mount_goes_on(tmp_path: Path):
    """I10, I11: kill -9 of supervisor and keeper; the next mount commits what was staged."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        assert job(SAVE, node.mnt / "step-1", "0", "2").returncode == 0
        info = node.info()
        kill_daemon(node.spool)
        until("its end", lambda: not info.is_alive)
        again = ("mount", c.store, node.mnt, "--spool", node.spool, "--config", node.config)
        until("a new mount", lambda: cli(*again).returncode == 0)
        assert job(SAVE, node.mnt / "step-1", "1", "2").returncode == 0
        until("the commit", lambda: (c.store / "step-1").is_dir())
        assert sorted(os.listdir(c.store / "step-1")) == [".ckptgate", "rank0.bin", "rank1.bin"]


def test_a_log_record_that_was_edited_is_refused_by_name(tmp_path: Path):
    """I7, I13: the run is refused with the record's name; other runs go on."""
    with cluster(tmp_path, nodes=2) as c:
        one, two = c.nodes
        for run in ("bad", "good"):
            assert job(SAVE, one.mnt / run / "step-1", "0", "1").returncode == 0
            until(run, (c.store / run / "step-1").is_dir)
        record = c.store / "bad/.ckptgate/log/0000000001.json"
        record.write_bytes(record.read_bytes().replace(b"explicit", b"Explicit"))
        for words in (("ls", c.store / "bad"), ("verify", c.store / "bad/step-1")):
            done = cli(*words)
            assert done.returncode == 5, done.stderr
            assert "0000000001.json" in done.stderr
        assert (two.mnt / "good/step-1/rank0.bin").read_bytes() == b"\0" * 300_000
        manifest = next((c.store / "good/.ckptgate/attempts/step-1.0").glob("manifest-*"))
        manifest.write_bytes(manifest.read_bytes()[:-1])
        done = cli("show", c.store / "good/step-1")
        assert done.returncode == 5
        assert manifest.name in done.stderr


BUSY = """
import os, sys, time
k = 0
while True:
    try:
        d = f"{sys.argv[1]}/r/step-{sys.argv[2]}{k:04d}"
        os.makedirs(d)
        with open(d + "/f", "w") as f:
            f.write("x")
        os.setxattr(d, "user.ckptgate.commit", b"all")
        k += 1
    except OSError:
        time.sleep(0.05)
"""


@pytest.mark.parametrize("victims", ["supervisor", "all"])
def test_a_busy_mount_whose_daemon_is_killed_does_not_hang(tmp_path: Path, victims: str):
    """I10, I11: kill -9 amid many saves, keeper included; nothing hangs, the next mount goes on."""
    with cluster(tmp_path) as c, contextlib.ExitStack() as jobs:
        (node,) = c.nodes
        for number in range(3):
            jobs.enter_context(contextlib.closing(_Running(BUSY, node.mnt, str(number))))
        until("some commits", lambda: len(c.committed("r")) > 3)
        kill_daemon(node.spool, with_children=victims == "all")
        again = ("mount", c.store, node.mnt, "--spool", node.spool, "--config", node.config)
        until("a new mount", lambda: cli(*again, timeout=30).returncode == 0, 60)
        before = len(c.committed("r"))
        until("more commits", lambda: len(c.committed("r")) > before + 3)


def test_umount_removes_a_mount_whose_daemon_is_dead(tmp_path: Path):
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        kill_daemon(node.spool)
        done = cli("umount", node.mnt, timeout=30)
        assert done.returncode in {2, 4}, done.stderr
        assert not os.path.ismount(node.mnt)


class _Running:
    """A job that runs until it is closed."""

    def __init__(self, code: str, *words: str | Path) -> None:
        self._process = start_job(code, *words)

    def close(self) -> None:
        self._process.__exit__(None, None, None)


BIG_SAVE = """
import os, sys
os.makedirs(sys.argv[1])
with open(sys.argv[1] + "/w.bin", "wb") as f:
    f.write(bytes([int(sys.argv[2])]) * (8 << 20))
"""


def test_published_checkpoints_make_room_in_a_small_spool(tmp_path: Path):
    """Ten saves of 8 MB through a spool of 64 MB; the first one is read from the store again."""
    (tmp_path / "store").mkdir()
    with tmpfs(tmp_path / "disk", "size=64m") as disk:
        node = Gateway(tmp_path, "node", tmp_path / "store", "[commit]\nidle_interval_s = 0.3\n")
        node.spool = disk / "spool"
        with started(node):
            for step in range(10):
                place = node.mnt / f"run/step-{step}"
                saved = job(BIG_SAVE, place, str(step))
                assert saved.returncode == 0, saved.stderr
                done = cli("commit", place, "--all", "--wait")
                assert done.returncode == 0, done.stderr
            events = [e for e in node.status()["events"] if e["kind"] == "evicted"]
            assert events
            assert all("files" in e["detail"] for e in events)
            for step in (0, 9):
                path = node.mnt / f"run/step-{step}/w.bin"
                assert path.read_bytes() == bytes([step]) * (8 << 20)
            assert os.statvfs(disk).f_bavail > 0
