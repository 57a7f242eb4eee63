"""kill -9 of the mount, the publisher or both at each step of a save; faults of the kernel channel.

The children of the supervisor count their own calls and fail or die at the n-th one
(`faulty/sitecustomize.py`, put into their interpreters by PYTHONPATH). The save must end as the one
without a fault: the same files, manifest and pointers, and no error for the trainer where nothing
but a process died.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import FAST, Cluster, cluster, job, tree, until

pytestmark = [pytest.mark.fuse]

HERE = Path(__file__).parent / "faulty"
KILLS_PER_MOUNT = 12
"""A supervisor gives up a child that dies more than 20 times in a minute."""

# Saves; with "again" each call that fails is tried again, as one whose effect is unknown.
SAVE = """
import os, sys
place, again = sys.argv[1], sys.argv[2] == "again"
told = []

def do(call, *words):
    for _ in range(4):
        try:
            return call(*words)
        except FileExistsError:
            if not told:
                raise
            return None
        except FileNotFoundError:
            if not told:
                raise
            return None
        except OSError as exc:
            if not again:
                raise
            told.append(exc.errno)
    raise SystemExit(f"never: {told}")

def put(path, data):
    def once():
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    do(once)

run = os.path.dirname(place)
do(os.mkdir, run)
do(os.mkdir, place)
do(os.mkdir, place + "/deep")
put(place + "/a.bin", b"a" * 70000)
put(place + "/a.bin", b"b" * 50000)
put(place + "/deep/part", b"c" * 3000)
do(os.rename, place + "/deep/part", place + "/deep/c.bin")
put(place + "/gone", b"x")
do(os.unlink, place + "/gone")
do(os.symlink, "a.bin", place + "/link")
do(os.symlink, "step-1", run + "/latest")
do(os.setxattr, place, "user.ckptgate.commit", b"all")
print(told)
"""
EXPECTED = {
    "a.bin": b"b" * 50000,
    "deep/c.bin": b"c" * 3000,
    "link": b"b" * 50000,
}


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "passthrough needs root")


class Faulty:
    """Mounts whose children fail as told, and a new run for each save."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, config: str = FAST) -> None:
        self.base = base
        self.config = config
        self.plan = base / "fault.json"
        self.number = 0
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        monkeypatch.setenv("FAULTS_OF_TEST", str(self.plan))

    def saves(self, plans: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
        """A save under each plan; yields it and whether it took place."""
        for start in range(0, len(plans), KILLS_PER_MOUNT):
            place = self.base / f"mount{start}"
            place.mkdir()
            with cluster(place, config=self.config) as made:
                for plan in plans[start : start + KILLS_PER_MOUNT]:
                    yield plan, self.save(made, plan)

    def save(self, made: Cluster, plan: dict[str, Any]) -> bool:
        self.number += 1
        (node,) = made.nodes
        run = f"run{self.number}"
        self.plan.with_suffix(".new").write_text(json.dumps(plan))
        self.plan.with_suffix(".new").rename(self.plan)
        mode = "again" if "error" in plan else "once"
        done = job(SAVE, node.mnt / run / "step-1", mode, run_id=run)
        assert done.returncode == 0, (plan, done.stderr)
        until(f"the commit after {plan}", (made.store / run / "step-1").is_dir, 60)
        until(f"latest after {plan}", lambda: os.path.islink(made.store / run / "latest"), 60)
        is_hit = not self.plan.exists()
        self.plan.unlink(missing_ok=True)
        self.check(made, run, plan)
        return is_hit

    def check(self, made: Cluster, run: str, plan: dict[str, Any]) -> None:
        (node,) = made.nodes
        for place in (made.store / run, node.mnt / run):
            until(f"{place} after {plan}", (place / "step-1").is_dir)
            assert tree(place / "step-1") == EXPECTED, plan
            assert os.readlink(place / "latest") == "step-1", plan
            assert os.readlink(place / "step-1/link") == "a.bin", plan
        manifest = json.loads((made.store / run / "step-1/.ckptgate/manifest.json").read_text())
        paths = [(entry["path"], entry["type"]) for entry in manifest["entries"]]
        assert paths == [
            ("a.bin", "file"), ("deep", "dir"), ("deep/c.bin", "file"), ("link", "symlink"),
        ], plan  # fmt: skip
        (row,) = node.attempts("step-1")[-1:]
        assert row["state"] == "committed"


def kills(process: str, call: str, places: list[int], **more: Any) -> list[dict[str, Any]]:
    return [
        {"process": process, "call": call, "at": at, "kill": when, **more}
        for at in places
        for when in (("before",) if call == "read" else ("before", "after"))
    ]


PLACES = [
    ("mount", "read", 30),
    ("mount", "write", 30),
    ("mount", "ioctl", 8),
    ("mount", "statement", 60),
    ("publisher", "statement", 60),
    ("publisher", "store", 60),
]


def test_a_save_under_kills_is_the_save_without(tmp_path: Path, monkeypatch):
    """I10, I11: at places drawn from all steps of a save, of either process and of both."""
    chance = random.Random(3)
    plans: list[dict[str, Any]] = []
    for process, call, count in PLACES:
        at = chance.randrange(1, count)
        plans += chance.sample(kills(process, call, [at], both=bool(chance.randrange(2))), 1)
    hits = sum(is_hit for _, is_hit in Faulty(tmp_path, monkeypatch).saves(plans))
    assert hits >= len(plans) // 2


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("both", [False, True], ids=["one", "both"])
@pytest.mark.parametrize(("process", "call", "count"), PLACES)
def test_a_save_under_a_kill_at_any_step(tmp_path, monkeypatch, process, call, count, both):
    """I10, I11: for every n, until a save has no such step any more."""
    faulty = Faulty(tmp_path, monkeypatch)
    misses = 0
    for plan, is_hit in faulty.saves(kills(process, call, list(range(1, 400)), both=both)):
        misses = 0 if is_hit else misses + 1
        if misses == 4:
            assert plan["at"] > 3
            return
    pytest.fail("a save never ended")


CHANNEL = [
    ("ask", [errno.EINTR, errno.ENOENT, errno.EAGAIN, errno.EIO]),
    ("write", [errno.ENOENT, errno.EINVAL, errno.EIO]),
    ("ioctl", [errno.EPERM, errno.EMFILE, errno.ENOMEM, errno.EIO]),
]


def faults(call: str, numbers: list[int], places: list[int]) -> list[dict[str, Any]]:
    return [
        {"process": "mount", "call": call, "at": at, "error": number}
        for at in places
        for number in numbers
    ]


def test_a_channel_that_fails_now_and_then(tmp_path: Path, monkeypatch):
    """I10: the caller of a lost reply is told; all else is noticed by nobody."""
    chance = random.Random(4)
    plans: list[dict[str, Any]] = []
    for call, numbers in CHANNEL:
        plans += chance.sample(faults(call, numbers, [chance.randrange(1, 6), 2]), 3)
    hits = sum(is_hit for _, is_hit in Faulty(tmp_path, monkeypatch).saves(plans))
    assert hits >= len(plans) // 2


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("call", "numbers"), CHANNEL)
def test_any_call_of_the_channel_may_fail(tmp_path: Path, monkeypatch, call, numbers):
    """I10: for every n."""
    faulty = Faulty(tmp_path, monkeypatch)
    misses = 0
    for plan, is_hit in faulty.saves(faults(call, numbers, list(range(1, 400)))):
        misses = 0 if is_hit else misses + 1
        if misses == len(numbers):
            assert plan["at"] > 3
            return
    pytest.fail("a save never ended")
