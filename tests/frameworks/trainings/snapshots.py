"""torchsnapshot, data-parallel."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torchsnapshot
from tests.frameworks.job import Job
from tests.frameworks.trainings import toy
from tests.frameworks.trainings.rules import SnapshotRules
from torchsnapshot import StateDict
from torchsnapshot.manifest import is_container_entry

__all__ = ["Snapshot"]


class Snapshot(SnapshotRules):
    """Each rank has weights of its own, and a tensor that all have."""

    def train(self, job: Job) -> object:
        toy.joined()
        net = toy.model()
        optim = torch.optim.Adam(net.parameters(), lr=1e-3)
        count = StateDict(steps=0)
        state = {"net": net, "optim": optim, "count": count}
        job.root.mkdir(exist_ok=True)
        found = self.newest(job.root)
        job.began(found and found.name)
        if found is not None:
            torchsnapshot.Snapshot(str(found)).restore(state)
        for step in range(count["steps"] + 1, job.steps + 1):
            data = toy.batch(step, job.rank)
            optim.zero_grad()
            (net(data) - data).pow(2).mean().backward()
            optim.step()
            count["steps"] = step
            if job.is_due(step):
                job.saving(step)
                torchsnapshot.Snapshot.take(str(job.root / f"step_{step}"), state)
        result = {"net": net.state_dict(), "optim": optim.state_dict()["state"]}
        dist.barrier()
        dist.destroy_process_group()
        return result

    def load(self, path: Path) -> object:
        snapshot = torchsnapshot.Snapshot(str(path))
        return {
            key: snapshot.read_object(key)
            for key, entry in snapshot.get_manifest().items()
            if not is_container_entry(entry)
        }
