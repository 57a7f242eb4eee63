"""Lightning's checkpoints of one file, on two ranks: plain, with a link, or in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tests.frameworks.job import Job
from tests.frameworks.trainings import toy
from tests.frameworks.trainings.rules import LitRules, is_served

__all__ = ["Lit"]


class _Model(pl.LightningModule):  # type: ignore[misc]  # untyped base
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = toy.model()
        self.of_rank = rank

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        data = toy.batch(self.trainer.global_step + 1, self.of_rank)
        return (self.net(data) - data).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class _Marks(Callback):  # type: ignore[misc]  # untyped base
    """Comes before those that save."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
        if self.job.is_due(trainer.global_step):
            self.job.saving(trainer.global_step)


class Lit(LitRules):
    """A way to save."""

    def train(self, job: Job) -> object:
        job.root.mkdir(exist_ok=True)
        saves = ModelCheckpoint(
            dirpath=job.root,
            every_n_train_steps=job.every,
            save_top_k=1 if self.mode == "link" and job.keep else -1,
            save_last=None if self.mode in {"file", "hook"} else "link",
            enable_version_counter=False,
        )
        found = self.newest(job.root)
        job.began(found and found.name)
        model = _Model(job.rank)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=job.world,
            strategy="ddp",
            max_steps=job.steps,
            callbacks=[_Marks(job), saves],
            plugins=self._plugins(job),
            logger=False,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows = torch.utils.data.DataLoader(torch.zeros(64, 1), batch_size=1)
        trainer.fit(
            model, rows, ckpt_path=None if found is None else str(found), weights_only=False
        )
        return {"model": model.state_dict(), "optim": trainer.optimizers[0].state_dict()["state"]}

    def _plugins(self, job: Job) -> list[Any] | None:
        if self.mode == "hook" and is_served(job.root):
            from ckptgate.lightning import CheckpointIO

            return [CheckpointIO(saved_by={"data_version": "toy"})]
        return [AsyncCheckpointIO()] if self.mode == "async" else None

    def load(self, path: Path) -> object:
        inner = path / "checkpoint.ckpt"
        state = torch.load(inner if inner.exists() else path, weights_only=False)
        # Paths of the start that wrote it.
        state.pop("callbacks", None)
        return state
