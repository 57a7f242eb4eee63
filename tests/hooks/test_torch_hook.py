"""`ckptgate.torch` with two ranks of real PyTorch; see `dcp_ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, cli
from tests.ports import free_port

from ckptgate.errors import PendingError, RefusedError, UsageError

pytestmark = [pytest.mark.fuse, pytest.mark.torch]

RANKS = Path(__file__).with_name("dcp_ranks.py")


def ranks(run: Path, way: str) -> list[str]:
    """What the two ranks print; their errors where one fails."""
    port = str(free_port())
    env = dict(os.environ, CKPTGATE_RUN_ID=run.name, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    started = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(run), way, str(rank), port],
            env=env | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=180)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(told)
    return [text.splitlines()[-1] for text in told]


def shown(one: Cluster, run: Path) -> dict:
    done = cli("show", one.store / run.name / "step-1", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def torch_is_there(require) -> None:
    require(find_spec("torch"), "PyTorch is not installed")


@pytest.mark.parametrize(
    "way", ["sync", "fails", pytest.param("fails-late", marks=pytest.mark.full)]
)
def test_what_all_ranks_wrote_is_committed_and_recorded_and_what_one_failed_to_is_not(
    one: Cluster, run: Path, way: str
):
    """I4, I8: the second save of a step has nothing of the one that failed."""
    assert ranks(run, way) == ["saved and loaded"] * 2
    found = shown(one, run)
    record = found["saved_by"]["record"]
    assert (found["format_name"], found["event"]) == ("dcp", "dcp-metadata")
    assert (record["framework"], record["layout"]) == ("torch-dcp", {"dp": 2})
    assert (record["step"], record["world_size"]) == (1, 2)
    assert record["versions"]["torch"].startswith("2.")
    states = [row["state"] for row in one.nodes[0].attempts("step-1") if row["run"] == run.name]
    assert sorted(states) == (["committed"] if way == "sync" else ["aborted", "committed"])


@pytest.mark.full
def test_a_process_in_the_background_commits_what_it_wrote(one: Cluster, run: Path):
    assert ranks(run, "process") == ["saved and loaded"] * 2
    assert shown(one, run)["saved_by"]["record"]["data_version"] == "v1"


def test_the_reader_reads_committed_checkpoints_only(run: Path):
    from ckptgate.torch import StorageReader

    path = run / "step-1"
    path.mkdir()
    (path / ".metadata").write_bytes(b"not yet")
    with pytest.raises((RefusedError, PendingError)):
        StorageReader(path, wait_s=0.2).read_metadata()
    with pytest.raises(FileNotFoundError):
        StorageReader(run / "step-2").read_metadata()
    with pytest.raises(UsageError):
        StorageReader("/tmp").read_metadata()


def test_a_place_that_no_gateway_serves_is_told_before_anything_is_written(tmp_path: Path):
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptgate.torch import StorageWriter

    with pytest.raises(dcp.CheckpointException, match="not a checkpoint on a ckptgate mount"):
        dcp.save(
            {"w": torch.zeros(2)}, storage_writer=StorageWriter(tmp_path / "step-1"), no_dist=True
        )
    assert list((tmp_path / "step-1").iterdir()) == []


def test_a_framework_that_is_not_there_is_told_with_its_extra():
    for name in ("torch", "lightning", "deepspeed", "transformers", "accelerate"):
        code = (
            "import sys\n"
            f"sys.modules[{name!r}] = None\n"
            f"try:\n    import ckptgate.{name}\n"
            "except ImportError as exc:\n    print(exc)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert f"pip install 'ckptgate[{name}]'" in done.stdout, (name, done.stderr)
