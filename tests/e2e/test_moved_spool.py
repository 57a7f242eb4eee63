"""A node that is gone for good: another machine goes on with its spool, on a disk that moved there.

The other machine is a process with another host name and another boot, and the spool is at another
path there. Commands are run in its namespaces, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import FAST, Cluster, Gateway, cli, cluster, job, kill_daemon, until

from ckptgate.errors import CkptError
from ckptgate_adapters.channels import control_call

pytestmark = [pytest.mark.fuse]

OTHER = """
set -eu
hostname other-machine
mount --bind "$1" /proc/sys/kernel/random/boot_id
shift
exec "$@"
"""
SAVE = """
import os, sys
os.makedirs(sys.argv[1])
with open(sys.argv[1] + "/a.bin", "wb") as stream:
    stream.write(b"a" * 100_000)
os.setxattr(sys.argv[1], "user.ckptgate.commit", b"all")
"""


class Other:
    """The other machine, with the first one's spool."""

    def __init__(self, c: Cluster, base: Path, *, is_copied: bool) -> None:
        (node,) = c.nodes
        base.mkdir()
        self.spool, self.mnt = base / "reattached", base / "mnt"
        self.mnt.mkdir()
        self.boot_id = base / "boot_id"
        self.boot_id.write_text(f"{uuid.uuid4()}\n")
        if is_copied:
            # Its sockets can't be copied.
            sockets = shutil.ignore_patterns("*.sock")
            shutil.copytree(node.spool, self.spool, copy_function=shutil.copy2, ignore=sockets)
        else:
            node.spool.rename(self.spool)
        where = [node.address, self.mnt, "--spool", self.spool, "--config", node.config]
        self.words = [sys.executable, "-m", "ckptgate.app.cli", "mount", "--foreground"]
        self.words += map(str, where)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Other:
        """Start it; whoever lets it is told nothing of mounts in there."""
        process = self.process = subprocess.Popen(
            ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", OTHER, "sh",
             str(self.boot_id), *self.words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        until("it serves", lambda: self.status() is not None or process.poll() is not None)
        return self

    def status(self) -> dict[str, Any] | None:
        with contextlib.suppress(CkptError):
            found: dict[str, Any] = control_call(str(self.spool), {"op": "status"}, timeout_s=5)
            return found
        return None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command on that machine."""
        assert self.process is not None
        entered = ["nsenter", "-t", str(self.process.pid), "--uts", "--mount"]
        return subprocess.run([*entered, *words], capture_output=True, text=True, check=False)

    def end(self) -> str:
        """Stop it, and what it said."""
        if self.process is None:
            return ""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=60)[0]
        finally:
            self.process.kill()
            kill_daemon(self.spool)


@pytest.fixture
def made(require, tmp_path: Path) -> Iterator[Cluster]:
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "another machine's host name needs root")
    done = subprocess.run(
        ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c",
         f"hostname x && mount --bind {tmp_path} {tmp_path}"],
        capture_output=True, check=False,
    )  # fmt: skip
    require(done.returncode == 0, f"no namespaces: {done.stderr!r}")
    with cluster(tmp_path, config=FAST) as started:
        yield started


@pytest.fixture
def other(made: Cluster, tmp_path: Path) -> Iterator[Any]:
    """Makes the other machine, once the first one is dead."""
    machines: list[Other] = []

    def make(*, is_copied: bool = False) -> Other:
        (node,) = made.nodes
        kill_daemon(node.spool)
        machines.append(Other(made, tmp_path / "other", is_copied=is_copied))
        return machines[-1].start()

    yield make
    for machine in machines:
        print(machine.end())


@contextlib.contextmanager
def away(c: Cluster) -> Iterator[None]:
    """The store doesn't answer meanwhile."""
    hidden = c.store.with_name("away")
    c.store.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(c.store)


def begin_run(node: Gateway) -> None:
    """A run that is known here: it goes on without the store."""
    (node.mnt / "run").mkdir()
    assert job(SAVE, node.mnt / "run/step-0").returncode == 0
    assert cli("wait", node.mnt / "run/step-0", "--timeout", "60").returncode == 0


def test_another_machine_publishes_what_a_dead_one_had_staged(made: Cluster, other: Any):
    """I10, I11: as the same member; bytes whose digest is known survive the other boot."""
    (node,) = made.nodes
    member = node.status()["member"]
    begin_run(node)
    with away(made):
        assert job(SAVE, node.mnt / "run/step-1").returncode == 0
        until("it is digested", lambda: node.attempts("step-1")[-1]["files"].get("digested"))
        kill_daemon(node.spool)
    there = other()
    until("it is published", (made.store / "run/step-1/a.bin").exists, 60)
    assert (made.store / "run/step-1/a.bin").read_bytes() == b"a" * 100_000
    report = there.status()
    assert report is not None
    assert report["member"] == member
    moved = [event for event in report["events"] if event["kind"] == "spool-moved"]
    assert "other-machine" in moved[0]["detail"]
    assert "no longer uses this spool" in moved[0]["hint"]
    # It is a mount like any other.
    done = there.run("cat", str(there.mnt / "run/step-1/a.bin"))
    assert done.stdout == "a" * 100_000
    saved = there.run(sys.executable, "-c", SAVE, str(there.mnt / "run/step-2"))
    assert saved.returncode == 0, saved.stderr
    until("the next one, too", (made.store / "run/step-2/a.bin").exists, 60)


@pytest.mark.full
@pytest.mark.parametrize("is_copied", [False, True])
def test_what_is_not_proven_on_the_other_machine_is_named_with_the_next_step(
    made: Cluster, other: Any, *, is_copied: bool
):
    """I11: whether bytes without a digest, or of a copy, are what was staged nobody can say."""
    (node,) = made.nodes
    begin_run(node)
    with away(made):
        if not is_copied:
            os.kill(node.child("publisher"), signal.SIGSTOP)
        assert job(SAVE, node.mnt / "run/step-1").returncode == 0
        if is_copied:
            until("it is digested", lambda: node.attempts("step-1")[-1]["files"].get("digested"))
        kill_daemon(node.spool)
    there = other(is_copied=is_copied)
    report = until("its report", there.status)
    lost = [event for event in report["events"] if event["kind"] == "power-lost"]
    assert "a.bin" in json.dumps(lost)
    assert lost[0]["severity"] == "critical"
    assert lost[0]["hint"]
    assert not (made.store / "run/step-1").exists()
    # The job saves it once more there.
    again = there.run(sys.executable, "-c", SAVE.replace("makedirs(sys.argv[1])", "makedirs("
                      "sys.argv[1], exist_ok=True)"), str(there.mnt / "run/step-1"))  # fmt: skip
    assert again.returncode == 0, again.stderr
    until("it is published", (made.store / "run/step-1/a.bin").exists, 60)
