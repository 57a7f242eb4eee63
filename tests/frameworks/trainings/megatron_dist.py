"""Megatron-core's dist_checkpointing, and the tracker that Megatron-LM writes after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from tests.frameworks.job import Job
from tests.frameworks.trainings import toy
from tests.frameworks.trainings.rules import MegatronRules

__all__ = ["Megatron"]

TRACKER = "latest_checkpointed_iteration.txt"


class Megatron(MegatronRules):
    """Each rank has a part of each tensor."""

    def train(self, job: Job) -> object:
        toy.joined()
        # It doesn't ask whether there is a GPU.
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"
        parallel_state.initialize_model_parallel()
        job.root.mkdir(exist_ok=True)
        state = {
            "weights": torch.arange(64.0).reshape(4, 16) + 64 * job.rank,
            "moments": torch.zeros(4, 16),
        }
        found = self.newest(job.root)
        job.began(found and found.name)
        done = 0
        if found is not None:
            loaded = dist_checkpointing.load(self._sharded(state, job, 0), str(found))
            state = {key: loaded[key] for key in state}
            done = loaded["iteration"]
        for step in range(done + 1, job.steps + 1):
            moments = state["moments"] * 0.9 + toy.batch(step, job.rank)
            state = {"weights": state["weights"] * 0.99 + moments, "moments": moments}
            if job.is_due(step):
                job.saving(step)
                self._save(job, state, step)
        dist.barrier()
        dist.destroy_process_group()
        return state

    def _sharded(self, state: dict[str, torch.Tensor], job: Job, step: int) -> dict[str, Any]:
        sharded: dict[str, Any] = {
            key: ShardedTensor.from_rank_offsets(key, held, (0, job.rank, job.world))
            for key, held in state.items()
        }
        return sharded | {"iteration": step}

    def _save(self, job: Job, state: dict[str, torch.Tensor], step: int) -> None:
        path = job.root / f"iter_{step:07d}"
        path.mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(self._sharded(state, job, step), str(path))
        dist.barrier()
        if job.rank == 0:
            (job.root / TRACKER).write_text(str(step))

    def load(self, path: Path) -> object:
        toy.alone()
        return {
            "tensors": dist_checkpointing.load_plain_tensors(str(path)),
            "common": dist_checkpointing.load_common_state_dict(str(path)),
        }
