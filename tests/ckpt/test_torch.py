"""PyTorch by `ckpt://`: file objects, safetensors, and DCP with its own FsspecWriter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ckpt.places import Place
from tests.e2e.harness import until
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("dcp_job.py")


@pytest.fixture(autouse=True, scope="module")
def _needs(require):
    try:
        for name in ("safetensors.torch", "torch.distributed.checkpoint"):
            importlib.import_module(name)
    except ImportError as exc:
        require(False, str(exc))


def start(place: Place, url: str, world: int, what: str, run_id: str) -> list[subprocess.Popen]:
    """The ranks of a job."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(JOB), url, str(rank), str(world), port, what],
            env=place.environment(run_id) | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def finish(ranks: list[subprocess.Popen]) -> None:
    """Wait for all, which must succeed."""
    for process in ranks:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output


def test_torch_and_safetensors_save_to_and_load_from_file_objects(fs, run):
    import torch
    from safetensors.torch import load, save

    state = {"w": torch.arange(100_000, dtype=torch.float32), "step": 7}
    with fs.open(f"{run}/step-1/state.pt", "wb") as file:
        torch.save(state, file)
    fs.pipe(f"{run}/step-1/model.safetensors", save({"w": state["w"]}))
    fs.commit(f"{run}/step-1")
    fs.wait(f"{run}/step-1", 60)
    with fs.open(f"{run}/step-1/state.pt", "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 7
    assert torch.equal(load(fs.cat(f"{run}/step-1/model.safetensors"))["w"], state["w"])


def test_a_torch_save_that_raises_leaves_nothing(fs, run):
    import torch

    class Bad:
        def __reduce__(self):
            raise RuntimeError("cannot be saved")

    with pytest.raises(RuntimeError), fs.open(f"{run}/step-1/state.pt", "wb") as file:
        torch.save({"w": torch.zeros(10_000), "bad": Bad()}, file)
    assert not fs.exists(f"{run}/step-1/state.pt")


def test_dcp_saves_and_loads_by_its_own_writer(place, fs, run):
    """Two ranks; the metadata seals, as on a mount; nobody says commit."""
    finish(start(place, f"ckpt://{run}/step-1", 2, "both", "dcp-1"))
    until("the commit", lambda: fs.exists(f"{run}/step-1/.metadata"), 60)
    published = Path(place.store, run, "step-1")
    until("the publication", published.exists)
    names = [".ckptgate", ".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert sorted(os.listdir(published)) == names


@pytest.mark.full
def test_a_rank_that_is_killed_in_its_shard_leaves_nothing_and_a_new_start_saves(place, fs, run):
    finish(start(place, f"ckpt://{run}/step-1", 4, "save", "four-1"))
    ranks = start(place, f"ckpt://{run}/step-2", 4, "die", "four-2")
    assert ranks[1].wait(150) != 0
    for process in ranks:
        process.kill()
        process.communicate()
    assert not fs.exists(f"{run}/step-2")
    finish(start(place, f"ckpt://{run}/step-1", 4, "load", "four-3"))
    finish(start(place, f"ckpt://{run}/step-2", 4, "save", "four-3"))
    until("the commit", lambda: fs.exists(f"{run}/step-2/.metadata"), 60)
    finish(start(place, f"ckpt://{run}/step-2", 4, "load", "four-4"))
