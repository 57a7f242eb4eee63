"""Real PyTorch on real mounts: torch.save of each rank, safetensors, a torch file by itself."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import start_job, until
from tests.frameworks.torch_job import RANKS
from tests.frameworks.torch_seen import Run

from ckptgate.app.cli import main

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow]

RANK_SAVE = """
import sys, torch, ckptgate, os
path, rank, world, seed = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(path, exist_ok=True)
torch.manual_seed(seed + rank)
torch.save({"weight": torch.randn(1000, 1000), "rank": rank}, f"{path}/rank{rank}.pt")
sys.stdin.readline()
ckptgate.commit(path, rank, world)
"""


def weights(seed: int) -> Any:
    import torch

    return torch.randn(1000, 1000, generator=torch.Generator().manual_seed(seed))


def save_all(run: Run, run_id: str, seed: int) -> None:
    """Each rank saves with torch.save; nothing is to be seen until the last has committed."""
    import torch

    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start_job(
                    RANK_SAVE,
                    *(run.paths[rank * 2 // RANKS] / "step-1", str(rank), str(RANKS), str(seed)),
                    run_id=run_id,
                )
            )
            for rank in range(RANKS)
        ]
        before = len(run.committed())
        for rank, process in enumerate(ranks):
            for path in run.seen:
                known = (path / "step-1").exists()
                assert known == bool(before)
                if known:
                    assert torch.load(path / "step-1/rank0.pt")["rank"] == 0
            assert len(run.committed()) == before
            _, err = process.communicate("\n", timeout=90)
            assert process.returncode == 0, (rank, err)
    until("the commit", lambda: len(run.committed()) == before + 1)


def test_torch_save_of_each_rank_is_mapped_on_the_other_node(run: Run):
    """I8: a mapped old version stays what it was when the same name is saved again."""
    import torch

    def mapped(place: Path) -> list[Any]:
        files = [place / f"step-1/rank{rank}.pt" for rank in range(RANKS)]
        return [torch.load(file, mmap=True)["weight"] for file in files]

    def is_new(place: Path) -> bool:
        return torch.equal(mapped(place)[0], weights(200))

    save_all(run, "first", seed=100)
    old = []
    for place in run.seen:
        until("the name", (place / "step-1/rank0.pt").exists)
        old += mapped(place)
    save_all(run, "second", seed=200)
    until("both publications", lambda: len(run.entries("PUBLISHED")) == 2)
    for place in (run.stored, *run.seen):
        until(f"the new one in {place}", partial(is_new, place))
        assert all(torch.equal(new, weights(200 + rank)) for rank, new in enumerate(mapped(place)))
    for number, tensor in enumerate(old):
        assert torch.equal(tensor, weights(100 + number % RANKS))
    assert main(["verify", str(run.stored / "step-1")]) == 0


SAFETENSORS_SAVE = """
import os, sys, torch, ckptgate
from safetensors.torch import load_file, save_file
run, scale = sys.argv[1], float(sys.argv[2])
os.makedirs(f"{run}/step-1", exist_ok=True)
tensors = {"a": torch.full((512, 512), scale), "b": torch.arange(1000) * scale}
for path in (f"{run}/step-1/model.safetensors", f"{run}/model.safetensors"):
    save_file(tensors, path)
    assert torch.equal(load_file(path)["a"], tensors["a"])
assert os.listdir(f"{run}/step-1") == ["model.safetensors"]
ckptgate.commit(f"{run}/step-1", 0, 1)
"""


def test_safetensors_are_saved_and_loaded_through_the_mount(run: Run):
    """It writes a temporary file with mode 0600 and renames it before it closes it."""
    import torch
    from safetensors.torch import load_file

    for scale in (1.0, 2.0):
        with start_job(
            SAFETENSORS_SAVE, run.paths[0], str(scale), run_id=f"scale{scale}"
        ) as writer:
            _, err = writer.communicate(timeout=90)
        assert writer.returncode == 0, err
        for place in (run.stored, *run.seen):
            for name in ("step-1/model.safetensors", "model.safetensors"):
                path = place / name

                def is_new(path: Path = path, scale: float = scale) -> bool:
                    return path.exists() and float(load_file(path)["a"][0, 0]) == scale

                until(f"{path} of {scale}", is_new)
                assert torch.equal(load_file(path)["b"], torch.arange(1000) * scale)
                assert path.stat().st_mode & 0o777 == 0o600
            names = {"step-1", "latest", "model.safetensors"}
            assert set(os.listdir(place)) - {".ckptgate"} == names
    assert main(["verify", str(run.stored / "step-1")]) == 0


# The pickle is made after the file was opened and truncated.
SLOW_SAVE = """
import sys, torch
class Slow:
    def __reduce__(self):
        print("open", flush=True)
        sys.stdin.readline()
        return (int, (int(sys.argv[2]),))
torch.save({"version": Slow(), "data": torch.zeros(300_000)}, sys.argv[1])
own = torch.load(sys.argv[1], weights_only=False)["version"]
assert own == int(sys.argv[2]), own
"""


def test_a_plain_torch_file_is_replaced_as_a_whole(run: Run):
    """I8: until the new one is whole in the store, everybody else loads the old one."""
    import torch

    places = [run.stored / "best.pt", *(path / "best.pt" for path in run.seen)]

    def versions() -> set[int]:
        return {torch.load(path, weights_only=False)["version"] for path in places}

    for version in (1, 2, 3):
        path = run.paths[version % 2] / "best.pt"
        with start_job(SLOW_SAVE, path, str(version), run_id=f"v{version}") as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n", writer.stderr.read()
            for _ in range(3):
                if version == 1:
                    assert not any(path.exists() for path in places)
                else:
                    assert versions() == {version - 1}
            _, err = writer.communicate("\n", timeout=90)
            assert writer.returncode == 0, err
        until("the first one", lambda: all(path.exists() for path in places))

        def is_everywhere(version: int = version) -> bool:
            known = versions()
            assert known <= {version - 1, version}
            return known == {version}

        until("the new version everywhere", is_everywhere)
        assert set(os.listdir(run.stored)) - {".ckptgate"} == {"best.pt"}
