"""`ckptgate drain`, `ckptgate wait RUN`, and SIGTERM to the daemon."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Gateway, cli, cluster, start_job, until

from ckptgate.app.left import LEFT_FILE
from ckptgate.errors import ExitCode

pytestmark = [pytest.mark.fuse]

SAVE = """
import os, sys
path = sys.argv[1]
os.makedirs(path)
with open(path + "/a.bin", "wb") as stream:
    stream.write(b"a" * 1000)
print("saving", flush=True)
sys.stdin.readline()
with open(path + "/b.bin", "wb") as stream:
    stream.write(b"b" * 1000)
os.setxattr(path, "user.ckptgate.commit", b"all")
sys.stdin.readline()
"""

DRAIN = """
import sys
from ckptgate.app.cli import main
sys.exit(main(["drain", sys.argv[1], "--timeout", "60"]))
"""


def save(run: Path, name: str) -> Path:
    path = run / name
    path.mkdir()
    (path / "w.bin").write_bytes(name.encode())
    return path


def saving(path: Path):
    """A process in the middle of a save; a line lets it finish."""
    process = start_job(SAVE, path)
    assert process.stdout.readline().strip() == "saving"
    return process


def go_on(process) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_drain_ends_with_everything_in_the_store(node: Gateway, run: Path):
    path = save(run, "step-1")
    assert cli("commit", path, "--all").returncode == 0
    (run / "log.txt").write_text("plain")
    done = cli("drain", node.mnt, "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert "everything is in the store" in done.stdout
    assert (node.store / run.name / "step-1/w.bin").read_bytes() == b"step-1"
    assert (node.store / run.name / "log.txt").read_text() == "plain"
    # It goes on as before.
    save(run, "step-2")
    assert cli("abort", run / "step-2").returncode == 0


def test_nothing_is_begun_during_a_drain_and_what_was_begun_is_finished(node: Gateway, run: Path):
    with saving(run / "step-1") as process:
        drain = start_job(DRAIN, node.mnt)
        with drain:

            def is_refused() -> bool:
                try:
                    (run / "step-2").mkdir()
                except OSError as exc:
                    return exc.errno == errno.EROFS
                (run / "step-2").rmdir()
                return False

            until("the drain", is_refused)
            shown = node.status()["finishing"]
            assert (shown["why"], shown["refuses_new"]) == ("drain", True)
            assert 0 < shown["left_s"] <= 60
            assert "draining: " in cli("status", node.mnt).stdout
            go_on(process)
            out, err = drain.communicate(timeout=60)
            assert (drain.returncode, out.strip()[:7]) == (0, "drained"), err
    assert (node.store / run.name / "step-1/b.bin").exists()
    assert node.status()["finishing"] is None
    (run / "step-2").mkdir()
    (run / "step-2").rmdir()


def test_what_a_drain_leaves_is_named(node: Gateway, run: Path):
    with saving(run / "step-1"):
        done = cli("drain", node.mnt, "--timeout", "0.5")
        assert done.returncode == ExitCode.PENDING
        assert f"left: {run.name}/step-1 (open)" in done.stderr
        done = cli("drain", node.mnt, "--timeout", "0.5", "--json")
        (left,) = json.loads(done.stdout)["left"]
        assert left["name"] == "step-1"
        assert cli("abort", run / "step-1").returncode == 0


def test_who_waits_for_a_run_is_told_how_it_ended(node: Gateway, run: Path):
    assert cli("wait", run / "nothing", "--timeout", "1").returncode == ExitCode.NOT_FOUND
    save(run, "step-1")
    done = cli("wait", run, "--timeout", "0.3")
    assert done.returncode == ExitCode.PENDING
    assert f"{run.name}/step-1 (open)" in done.stderr
    assert cli("commit", run / "step-1", "--all").returncode == 0
    done = cli("wait", run, "--timeout", "60")
    assert (done.returncode, done.stdout.strip()) == (0, f"{run.name}/step-1: committed")
    done = cli("wait", run / "latest", "--timeout", "60")
    assert (done.returncode, done.stdout.strip()) == (0, "step-1: committed")
    save(run, "step-2")
    assert cli("abort", run / "step-2", "--reason", "not good").returncode == 0
    done = cli("wait", run, "--timeout", "60")
    assert done.returncode == ExitCode.REFUSED
    assert "step-2" in done.stderr
    assert "not good" in done.stderr
    assert cli("wait", node.mnt, "--timeout", "60", "--json").returncode == ExitCode.REFUSED
    save(run, "step-3")
    assert cli("commit", run / "step-3", "--all").returncode == 0
    done = cli("wait", run, "--timeout", "60", "--json")
    assert done.returncode == 0
    assert [row["name"] for row in json.loads(done.stdout)["last"]] == ["step-3"]


@pytest.fixture
def alone(require, tmp_path: Path):
    """A node that may end."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    with cluster(tmp_path) as made:
        yield made


def end(node: Gateway) -> None:
    info = node.info()
    os.kill(info.pid, signal.SIGTERM)
    until("its end", lambda: not info.is_alive)


def test_a_signal_lets_a_save_end_publishes_it_and_then_unmounts(alone: Cluster):
    (node,) = alone.nodes
    run = node.mnt / "run1"
    run.mkdir()
    with saving(run / "step-1") as process:
        info = node.info()
        os.kill(info.pid, signal.SIGTERM)
        until("the stop", lambda: "budget_s" in node.log())
        with pytest.raises(OSError, match="Read-only"):
            (run / "step-2").mkdir()
        shown = node.status()["finishing"]
        assert (shown["why"], shown["left_s"] > 0) == ("stop", True)
        # A drain that ends meanwhile doesn't undo it.
        assert cli("drain", node.mnt, "--timeout", "0").returncode == ExitCode.PENDING
        assert node.status()["finishing"]["deadline"] == shown["deadline"]
        go_on(process)
        until("its end", lambda: not info.is_alive)
    assert (alone.store / "run1/step-1/b.bin").exists()
    assert json.loads((node.spool / LEFT_FILE).read_text()) == []


def test_what_a_signal_leaves_the_next_mount_finishes(alone: Cluster):
    """I10, I11."""
    (node,) = alone.nodes
    config = node.config.read_text()
    node.stop()
    node.config.write_text(config + '[stop]\ntimeout_s = 2\nnew_checkpoints = "allow"\n')
    assert node.mount().returncode == 0
    for name in ("run1", "run2"):
        (node.mnt / name).mkdir()
    with saving(node.mnt / "run1/step-1"):
        info = node.info()
        os.kill(info.pid, signal.SIGTERM)
        until("the stop", lambda: "refuses_new=False" in node.log())
        # The policy allows it.
        (node.mnt / "run2/step-2").mkdir()
        until("its end", lambda: not info.is_alive)
    left = json.loads((node.spool / LEFT_FILE).read_text())
    assert [(row["name"], row["state"]) for row in left] == [("step-1", "open"), ("step-2", "open")]
    assert "left name=run1/step-1 state=open" in node.log()
    assert node.mount().returncode == 0
    assert (
        cli("commit", node.mnt / "run1/step-1", "--all", "--wait", "--timeout", "60").returncode
        == 0
    )


def test_a_second_signal_ends_the_waiting(alone: Cluster):
    (node,) = alone.nodes
    (node.mnt / "run1").mkdir()
    with saving(node.mnt / "run1/step-1"):
        info = node.info()
        os.kill(info.pid, signal.SIGTERM)
        until("the stop", lambda: "budget_s" in node.log())
        assert info.is_alive
        os.kill(info.pid, signal.SIGINT)
        until("its end", lambda: not info.is_alive)
