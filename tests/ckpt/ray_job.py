"""A training by Ray Train whose storage is `ckpt://` by pyarrow: `ray_job.py RUN`.

Two workers save a file each, report them as one checkpoint and commit their parts; the first start
dies at its third step, and Ray starts the workers again from the newest checkpoint. Prints what
came of it as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import fsspec
import pyarrow.fs
import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

STEPS = 4


def train(config: dict[str, Any]) -> None:
    """One worker."""
    fs = fsspec.filesystem("ckpt")
    rank = ray.train.get_context().get_world_rank()
    began = ray.train.get_checkpoint()
    first = 0
    if began is not None:
        with began.as_directory() as here:
            first = torch.load(f"{here}/rank{rank}.pt")["step"] + 1
    for step in range(first, STEPS):
        if step == 2 and began is None:
            raise RuntimeError("the worker dies")
        with tempfile.TemporaryDirectory() as here:
            torch.save({"step": step, "rank": rank}, f"{here}/rank{rank}.pt")
            checkpoint = ray.train.Checkpoint.from_directory(here)
            name = f"checkpoint_{step}"
            ray.train.report(
                {"step": step, "first": first}, checkpoint=checkpoint, checkpoint_dir_name=name
            )
        # What this rank reported is written; nothing but this tells that it is all.
        fs.commit(f"{config['directory']}/{name}")


def main(run: str) -> None:
    """Train, and read the last checkpoint back."""
    storage = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("ckpt")))
    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"directory": f"{run}/training"},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="training",
            storage_path=run,
            storage_filesystem=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    last = result.checkpoint
    assert last is not None
    with ray.train.Checkpoint(last.path, filesystem=storage).as_directory() as here:
        found = {name: torch.load(f"{here}/{name}") for name in sorted(os.listdir(here))}
    print(json.dumps({"path": last.path, "metrics": result.metrics, "found": found}, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
