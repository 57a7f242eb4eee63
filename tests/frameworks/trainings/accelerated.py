"""accelerate's save_state with its own names; it removes an old one before it writes a new one."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from safetensors.torch import load_file
from tests.frameworks.job import Job
from tests.frameworks.trainings import toy
from tests.frameworks.trainings.rules import AcceleratedRules, is_served

__all__ = ["Accelerated"]


class _Count:
    """How many steps are done: an object of the user's own in the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Accelerated(AcceleratedRules):
    """Keeps two checkpoints."""

    def train(self, job: Job) -> object:
        project = ProjectConfiguration(
            project_dir=str(job.root), automatic_checkpoint_naming=True, total_limit=job.keep
        )
        accelerator = Accelerator(cpu=True, project_config=project)
        # The states of all generators are saved.
        set_seed(7)
        net = toy.model()
        optim = torch.optim.Adam(net.parameters(), lr=1e-3)
        count = _Count()
        net, optim = accelerator.prepare(net, optim)
        accelerator.register_for_checkpointing(count)
        if self.is_hooked and is_served(job.root):
            from ckptgate.accelerate import attach

            attach(accelerator, saved_by={"data_version": "toy"})
        run = self.run_of(job.root)
        found = self.newest(run) if run.is_dir() else None
        job.began(found and found.name)
        if found is not None:
            accelerator.load_state()
            project.iteration = int(found.name.rpartition("_")[2]) + 1
        for step in range(count.steps + 1, job.steps + 1):
            data = toy.batch(step, job.rank)
            accelerator.backward((net(data) - data).pow(2).mean())
            optim.step()
            optim.zero_grad()
            count.steps = step
            if job.is_due(step):
                job.saving(step)
                accelerator.save_state()
        accelerator.wait_for_everyone()
        model = accelerator.unwrap_model(net).state_dict()
        return {"model": model, "optim": optim.state_dict()["state"]}

    def load(self, path: Path) -> object:
        found: dict[str, object] = {}
        for name in self.files(path):
            if name.endswith(".safetensors"):
                found[name] = load_file(path / name)
            else:
                found[name] = torch.load(path / name, weights_only=False)
        return found
