"""Reclaiming and the spool's limit on real mounts, through the command line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import FAST, Cluster, Gateway, cli, cluster, job, kill_daemon, tree, until

SIZE = 4 << 20
SAVE = """
import os, sys
path, size, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.makedirs(path, exist_ok=True)
for n in range(2):
    with open(f"{path}/w{n}.bin", "wb") as f:
        f.write((seed + str(n)).encode().ljust(16, b".") * (size // 32))
"""
COMMIT = SAVE + "\nimport ckptgate\nckptgate.commit(path)\nckptgate.wait(path, timeout_s=60)\n"
REMOVE = "import shutil, sys; shutil.rmtree(sys.argv[1])"


@pytest.fixture
def made(tmp_path: Path, require) -> Iterator[Cluster]:
    require(os.path.exists("/dev/fuse"), "no /dev/fuse")
    with cluster(tmp_path) as made:
        yield made


def save(
    node: Gateway, name: str, seed: str = "a", *, size: int = SIZE, code: str = COMMIT
) -> None:
    done = job(code, node.mnt / "run" / name, str(size), seed)
    assert done.returncode == 0, done.stderr


def used(*paths: Path) -> int:
    """Bytes that files below these paths take, each inode once."""
    seen: dict[tuple[int, int], int] = {}
    for path in paths:
        for root, _, names in os.walk(path):
            for name in names:
                found = os.lstat(os.path.join(root, name))
                seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def gc(*words: str | Path) -> Any:
    done = cli("gc", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_dead_goes_from_store_and_spool_and_what_is_good_stays(made: Cluster) -> None:
    """I9: save, save again, give up, delete; after `gc` all that is committed verifies."""
    (node,) = made.nodes
    run = node.mnt / "run"
    data, staged = made.store / "run", node.spool / "data"
    save(node, "step-1")
    save(node, "step-2", "old")
    save(node, "step-2", "new")
    save(node, "step-3", code=SAVE)
    assert cli("abort", run / "step-3").returncode == 0
    save(node, "step-4")
    assert job(REMOVE, run / "step-1").returncode == 0
    until("step-1 is retired", lambda: made.committed("run") == ["step-2", "step-4"])
    save(node, "step-5")
    until("step-5 is in its place", lambda: made.records("run")[-1]["entry"]["type"] == "PUBLISHED")
    before = used(data), used(staged)
    assert gc(node.mnt)["removed"] == []
    said = gc("--dry-run", "--grace", "0s", node.mnt)
    assert {(item["place"], item["what"], item["why"]) for item in said["removed"]} >= {
        ("store", "step-1.0", "retired"),
        ("store", "step-2.0", "replaced"),
        ("store", "step-3.0", "aborted"),
        ("spool", "step-2.0", "replaced"),
        ("spool", "step-3.0", "aborted"),
    }
    assert (used(data), used(staged)) == before
    went = gc("--grace", "0s", run)
    assert went["bytes"] >= said["bytes"] * 0.9 > 2 * SIZE
    assert used(data) <= before[0] - 2 * SIZE
    assert used(staged) <= before[1] - 2 * SIZE
    for name in ("step-2", "step-4", "step-5", "latest"):
        assert cli("verify", run / name).returncode == 0
    assert tree(run / "step-2") == tree(made.store / "run/step-2")
    assert b"new0" in (run / "step-2/w0.bin").read_bytes()
    assert gc("--grace", "0s", node.mnt)["removed"] == []
    kinds = [event["kind"] for event in node.status()["events"]]
    assert "reclaimed" in kinds
    assert node.stop().returncode == 0
    assert node.start().attempts("step-5") or True
    assert cli("verify", node.mnt / "run/step-2").returncode == 0


def test_a_pinned_checkpoint_outlives_its_deletion(made: Cluster) -> None:
    (node,) = made.nodes
    run = node.mnt / "run"
    for name in ("step-1", "step-2"):
        save(node, name)
    assert cli("pin", run / "step-1", "--reason", "paper").returncode == 0
    assert cli("pin", run / "step-1").returncode == 0
    assert job(REMOVE, run / "step-1").returncode == 0
    gc("--grace", "0s", node.mnt)
    assert "step-1" in made.committed("run")
    assert cli("verify", made.store / "run/step-1").returncode == 0
    assert cli("unpin", made.store.parent / "run/step-1").returncode == 4
    assert cli("unpin", run / "nothing").returncode == 4
    assert cli("gc", made.store.parent).returncode == 4
    assert cli("gc", node.mnt / "nothing").returncode == 4
    assert cli("gc", node.mnt, "--grace", "soon").returncode == 64
    assert cli("unpin", run / "step-1").returncode == 0
    until("step-1 is retired", lambda: made.committed("run") == ["step-2"])
    gc("--grace", "0s", node.mnt)
    assert not any((made.store / "run/.ckptgate/attempts/step-1.0").glob("data/*"))


def test_a_word_that_is_empty_means_nothing(made: Cluster) -> None:
    """I13: an unset variable is no mount and no grace; `forever` is one."""
    (node,) = made.nodes
    for words in (("gc", ""), ("gc", "--grace", "", node.mnt)):
        done = cli(*words)
        assert done.returncode == 64, done.stderr
        assert "hint:" in done.stderr
    done = cli("gc", "--grace", "forever", node.mnt)
    assert done.returncode == 0, done.stderr
    assert "0 files went" in done.stdout


def test_what_a_killed_gateway_left_goes_at_the_next_mount(made: Cluster) -> None:
    (node,) = made.nodes
    save(node, "step-1")
    stray = node.spool / "data/00/99999744"
    stray.write_bytes(b"x" * 100_000)
    kill_daemon(node.spool)
    node.start()
    assert not stray.exists()
    assert cli("verify", node.mnt / "run/step-1").returncode == 0


def test_a_spool_at_its_limit_gives_up_what_is_published_then_refuses_new_files(
    tmp_path: Path, require
) -> None:
    require(os.path.exists("/dev/fuse"), "no /dev/fuse")
    # On another file system than the store: what the two share by links costs the spool nothing.
    require(os.stat("/dev/shm").st_dev != tmp_path.stat().st_dev, "no second file system")
    limit = 24 << 20
    config = FAST + f'spool_max = "{limit // (1 << 20)}MiB"\nwait_s = 0\n'
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ckptgate-test-") as other,
        _limited(tmp_path, Path(other), config) as made,
    ):
        (node,) = made.nodes
        run = node.mnt / "run"
        shown = os.statvfs(node.mnt)
        assert shown.f_blocks * shown.f_frsize == limit
        for number in range(1, 9):
            save(node, f"step-{number}")
            # What is given up goes from the disk a moment later.
            until("room is made", lambda: used(node.spool / "data") < limit + 2 * SIZE)
        until("there is room", lambda: node.status()["room"]["used"] <= limit)
        room = node.status()["room"]
        assert room["limit"] == limit
        assert room["evicted"] > 0
        assert not room["is_full"]
        assert "evicted" in [event["kind"] for event in node.status()["events"]]
        for number in range(1, 9):
            assert b"a0" in (run / f"step-{number}/w0.bin").read_bytes()
        save(node, "step-9", size=limit + SIZE, code=SAVE)
        until("the spool is full", lambda: node.status()["room"]["is_full"])
        done = job(
            "import sys, time\ntime.sleep(1)\nopen(sys.argv[1], 'w')", run / "step-9/more.bin"
        )
        assert f"[Errno {errno.ENOSPC}]" in done.stderr, done.stderr
        assert os.statvfs(node.mnt).f_bavail == 0
        assert "new files are refused" in cli("status", node.mnt).stdout
        assert "spool-full" in [event["kind"] for event in node.status()["events"]]
        assert job(REMOVE, run / "step-9").returncode == 0
        gc("--grace", "0s", node.mnt)
        until("there is room again", lambda: not node.status()["room"]["is_full"])
        until("the mount knows it", lambda: job(SAVE, run / "step-10", "64", "b").returncode == 0)


@contextlib.contextmanager
def _limited(base: Path, other: Path, config: str) -> Iterator[Cluster]:
    """A node whose spool is in the directory *other*."""
    made = Cluster(base, 1, config)
    made.nodes[0].spool = other / "spool"
    try:
        made.nodes[0].start()
        yield made
    finally:
        print(made.logs())
        made.nodes[0].destroy()
