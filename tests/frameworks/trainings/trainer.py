"""The Hugging Face Trainer, data-parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tests.frameworks.job import Job
from tests.frameworks.trainings.rules import TrainerRules, is_served
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

__all__ = ["Trainer"]


class _Marks(TrainerCallback):  # type: ignore[misc]  # untyped base
    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.job.is_due(state.global_step):
            self.job.saving(state.global_step)


class Trainer(TrainerRules):
    """Keeps two checkpoints."""

    def train(self, job: Job) -> object:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        arguments = TrainingArguments(
            output_dir=str(job.root),
            max_steps=job.steps,
            save_steps=job.every,
            save_total_limit=job.keep,
            per_device_train_batch_size=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
        model = GPT2LMHeadModel(config)
        rows = [torch.arange(n, n + 8) % 16 for n in range(16)]
        last = get_last_checkpoint(str(job.root)) if job.root.is_dir() else None
        job.began(last and Path(last).name)
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[_Marks(job), *self._hook(job)],
        )
        trainer.train(resume_from_checkpoint=last)
        return {"model": model.state_dict(), "optim": trainer.optimizer.state_dict()["state"]}

    def _hook(self, job: Job) -> list[TrainerCallback]:
        if not (self.is_hooked and is_served(job.root)):
            return []
        from ckptgate.transformers import CommitCallback

        return [CommitCallback(saved_by={"data_version": "toy"})]

    def load(self, path: Path) -> object:
        found: dict[str, object] = {}
        for name in self.files(path):
            if name.endswith(".safetensors"):
                found[name] = load_file(path / name)
            elif name.endswith((".pt", ".pth")):
                found[name] = torch.load(path / name, weights_only=False)
            elif name == "training_args.bin":
                # It names the directory.
                torch.load(path / name, weights_only=False)
            else:
                found[name] = (path / name).read_text()
        return found
