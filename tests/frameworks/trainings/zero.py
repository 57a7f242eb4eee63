"""DeepSpeed with ZeRO, saved by its engine."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from tests.frameworks.job import Job
from tests.frameworks.trainings import toy
from tests.frameworks.trainings.rules import ZeroRules, is_served

__all__ = ["Zero"]


class Zero(ZeroRules):
    """A stage of ZeRO."""

    def train(self, job: Job) -> object:
        # An all-reduce of its own would be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
        model = toy.model()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        }
        optim = torch.optim.Adam(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)
        if self.is_hooked and is_served(job.root):
            from ckptgate.deepspeed import attach

            attach(engine, saved_by={"data_version": "toy"})
        path, _ = engine.load_checkpoint(str(job.root))
        job.began(path and Path(path).parent.name)
        for step in range(engine.global_steps + 1, job.steps + 1):
            data = toy.batch(step, job.rank).to(torch.bfloat16)
            engine.backward((engine(data) - data).pow(2).mean())
            engine.step()
            if job.is_due(step):
                job.saving(step)
                engine.save_checkpoint(str(job.root))
        held = engine.optimizer
        groups = (
            getattr(held, "single_partition_of_fp32_groups", None)
            or held.fp32_partitioned_groups_flat
        )
        return {"groups": list(groups), "moments": list(held.optimizer.state.values())}

    def load(self, path: Path) -> object:
        found = {name: torch.load(path / name, weights_only=False) for name in self.files(path)}
        for state in found.values():
            # Times and paths of the start that wrote it.
            state.pop("ds_config", None)
        return found
