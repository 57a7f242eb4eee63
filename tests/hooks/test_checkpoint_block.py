"""`with ckptgate.checkpoint(run, step)` and `ckptgate.latest(run)`, by several processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Gateway, cli, cluster, job, start_job, until

import ckptgate
from ckptgate.errors import ExistsError, UsageError

pytestmark = [pytest.mark.fuse]

SAVE = """
import sys, os, ckptgate
run, what = sys.argv[1], sys.argv[5]
step, rank, world = map(int, sys.argv[2:5])
try:
    with ckptgate.checkpoint(run, step, rank=rank, world_size=world,
                             saved_by={"data_version": "v7", "layout": {"dp": world}}) as path:
        with open(f"{path}/first{rank}", "wb") as f:
            f.write(what.encode())
        print("half", flush=True)
        word = sys.stdin.readline().strip()
        if word == "fail":
            raise RuntimeError("the disk is on fire")
        with open(f"{path}/second{rank}", "wb") as f:
            f.write(what.encode())
    print("done", flush=True)
except Exception as exc:
    print(f"{type(exc).__name__}: {exc}", flush=True)
    raise SystemExit(3)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def two(require, tmp_path_factory) -> Iterator[Cluster]:
    """Two nodes' mounts of one store."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    with cluster(tmp_path_factory.mktemp("blocks"), nodes=2) as made:
        yield made


@pytest.fixture
def runs(two: Cluster, request) -> list[Path]:
    """This test's run directory on each node."""
    name = request.node.name.partition("[")[0]
    (two.nodes[0].mnt / name).mkdir(exist_ok=True)
    return [node.mnt / name for node in two.nodes]


class Ranks:
    """Two ranks that save, one on each node; each waits in the middle."""

    def __init__(self, stack: contextlib.ExitStack, runs: list[Path], step: int, what: str = "x"):
        self.processes = [
            stack.enter_context(
                start_job(SAVE, run, str(step), str(rank), "2", what, run_id=f"{run.name}")
            )
            for rank, run in enumerate(runs)
        ]

    def half(self) -> None:
        for process in self.processes:
            assert process.stdout.readline() == "half\n", process.stderr.read()

    def go(self, rank: int, word: str = "go") -> str:
        """Let it go on; its last line."""
        process = self.processes[rank]
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    def end(self) -> None:
        for process in self.processes:
            process.communicate("\n", timeout=60)


@contextlib.contextmanager
def ranks(runs: list[Path], step: int, what: str = "x") -> Iterator[Ranks]:
    with contextlib.ExitStack() as stack:
        made = Ranks(stack, runs, step, what)
        made.half()
        yield made
        made.end()


def latest_of(run: Path) -> str | None:
    found = ckptgate.latest(run, wait_s=30)
    return None if found is None else os.path.basename(found)


def shown(two: Cluster, run: Path, name: str) -> dict:
    done = cli("show", two.store / run.name / name, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_checkpoint_is_committed_when_all_ranks_blocks_have_ended(two: Cluster, runs: list[Path]):
    """I8; the manifest says how it was saved."""
    with ranks(runs, 1) as both:
        assert both.go(0) == "done"
        assert ckptgate.latest(runs[1]) is None
        assert not (runs[0] / "step-1").exists()
        assert both.go(1) == "done"
    assert [latest_of(run) for run in runs] == ["step-1", "step-1"]
    names = {"first0", "first1", "second0", "second1"}
    assert set(os.listdir(ckptgate.latest(runs[0]) or "")) == names
    saved_by = shown(two, runs[0], "step-1")["saved_by"]
    record = saved_by["record"]
    assert saved_by["conflicts"] == []
    assert (record["step"], record["world_size"]) == (1, 2)
    assert (record["data_version"], record["layout"]) == ("v7", {"dp": 2})
    assert record["versions"]["python"]
    text = cli("show", two.store / runs[0].name / "step-1").stdout
    assert 'saved by data_version: "v7"\n' in text


def is_aborted(node: Gateway, run: str) -> bool:
    return any(row["run"] == run and row["state"] == "aborted" for row in node.attempts("step-1"))


def test_a_rank_that_fails_gives_the_checkpoint_up_for_all_and_it_is_saved_again(
    two: Cluster, runs: list[Path]
):
    """I4: nothing of the first try is in the second one."""
    with ranks(runs, 1, "bad") as both:
        assert both.go(0, "fail") == "RuntimeError: the disk is on fire"
        until("the abort on the other node", lambda: is_aborted(two.nodes[1], runs[1].name))
        told = both.go(1)
        assert told.startswith(("RefusedError", "FileNotFoundError")), told
    assert ckptgate.latest(runs[0]) is None
    assert two.names(runs[0].name) == []
    with ranks(runs, 1, "good") as both:
        assert [both.go(0), both.go(1)] == ["done", "done"]
    assert latest_of(runs[1]) == "step-1"
    found = two.shown(f"{runs[0].name}/step-1")
    assert set(found.values()) == {b"good"}
    assert len(found) == 4


@pytest.mark.parametrize("when", ["half", "done"])
def test_a_rank_that_is_killed_leaves_nothing_and_its_successor_begins_anew(
    two: Cluster, runs: list[Path], when: str
):
    """I4, I8: a restart in place has the same job key; its files are mixed with none of before."""
    run = [path / when for path in runs]
    run[0].mkdir()
    with ranks(run, 1, "bad") as both:
        assert both.go(0) == "done"
        if when == "done":
            os.kill(both.processes[0].pid, signal.SIGKILL)
        os.kill(both.processes[1].pid, signal.SIGKILL)
        both.processes[1].wait()
    assert ckptgate.latest(run[0]) is None
    with ranks(run, 1, "good") as both:
        assert [both.go(0), both.go(1)] == ["done", "done"]
    assert latest_of(run[1]) == "step-1"
    assert set(two.shown(f"{runs[0].name}/{when}/step-1").values()) == {b"good"}


def test_a_step_that_is_committed_is_not_saved_over(runs: list[Path]):
    with ckptgate.checkpoint(runs[0], 1, durable=True) as path:
        Path(path, "a").write_text("1")
    with pytest.raises(ExistsError, match="is committed already"):
        ckptgate.checkpoint(runs[0], 1).__enter__()
    assert Path(path, "a").read_text() == "1"


def test_the_newest_is_the_log_s_whatever_pointers_say(runs: list[Path]):
    assert ckptgate.latest(runs[0]) is None
    assert ckptgate.latest(runs[0] / "missing") is None
    for step in (3, 2):
        with ckptgate.checkpoint(runs[0], step, durable=True) as path:
            Path(path, "a").write_text(str(step))
    assert ckptgate.latest(runs[0]) == str(runs[0] / "step-2")
    os.symlink("step-3", runs[0] / "last.ckpt")
    os.mkdir(runs[0] / "step-9")
    assert ckptgate.latest(str(runs[0])) == str(runs[0] / "step-2")


def test_a_directory_that_no_gateway_serves_is_told(tmp_path: Path):
    for call in (
        lambda: ckptgate.latest(tmp_path),
        lambda: ckptgate.annotate(tmp_path, {"step": 1}),
        lambda: ckptgate.commit(tmp_path),
        lambda: ckptgate.abort(tmp_path),
        lambda: ckptgate.checkpoint(tmp_path, 1).__enter__(),
    ):
        with pytest.raises(UsageError, match="not a checkpoint on a ckptgate mount"):
            call()
    for step, rank, world in ((-1, None, None), (True, None, None), (1, 2, 2), (1, 0, None)):
        with pytest.raises(UsageError):
            ckptgate.checkpoint(tmp_path, step, rank=rank, world_size=world).__enter__()
    with pytest.raises(UsageError, match="not a path on a mount"):
        ckptgate.latest("s3://bucket/run")


def test_a_hostile_record_ends_the_block_before_it_begins(runs: list[Path]):
    """I13"""
    loop: dict = {}
    loop["a"] = loop
    for record in ({"a": float("nan")}, {"a": "\ud800"}, {"a": "x" * 20_000}, loop, {"a": {1}}):
        with pytest.raises(UsageError):
            ckptgate.checkpoint(runs[0], 1, saved_by=record).__enter__()
    with ckptgate.checkpoint(runs[0], 1, durable=True) as path:
        Path(path, "a").write_text("1")
    assert ckptgate.latest(runs[0]) == path


def test_what_is_annotated_by_hand_is_in_the_manifest(two: Cluster, runs: list[Path]):
    path = runs[0] / "step-1"
    path.mkdir()
    (path / "a").write_text("1")
    ckptgate.annotate(path, {"rank": 0, "data_version": "v1"})
    ckptgate.annotate(path, {"rank": 1, "data_version": "v2"})
    ckptgate.commit(path)
    ckptgate.wait(path, timeout_s=60)
    (conflict,) = shown(two, runs[0], "step-1")["saved_by"]["conflicts"]
    assert conflict == {
        "field": ["data_version"],
        "values": [{"value": "v1", "ranks": [0]}, {"value": "v2", "ranks": [1]}],
    }
    with pytest.raises(OSError, match="step-1"):
        ckptgate.annotate(path, {"data_version": "v3"})
    with pytest.raises(PermissionError):
        ckptgate.abort(path)


def test_an_attempt_that_is_aborted_by_hand_is_gone(two: Cluster, runs: list[Path]):
    path = runs[0] / "step-1"
    path.mkdir()
    (path / "a").write_text("1")
    ckptgate.abort(path, "no good")
    until("the abort", lambda: not path.exists())
    assert [row["reason"] for row in two.nodes[0].attempts("step-1")][-1] == "no good"


def test_importing_the_package_imports_no_framework_and_no_store():
    done = job(
        "import sys, ckptgate; heavy = ('torch', 'fsspec', 's3fs', 'lightning', 'sqlite3'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr
