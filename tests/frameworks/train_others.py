"""Tiny unmodified trainings with the Hugging Face Trainer, accelerate and Lightning; see the tests.

    train_others.py hf|accelerate|lightning DIRECTORY OUT [--late SECONDS] [--kill STEP]

Nothing here knows of ckptgate. Rank 1 may be late, or die by SIGKILL, where it writes its own file
of a checkpoint: the frameworks' code is wrapped there, and only there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch

STEPS, EVERY = 6, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["hf", "accelerate", "lightning"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--kill", type=int, default=0)
    words = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = {"hf": hf, "accelerate": accelerated, "lightning": lightning}[words.framework](words)
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(state[key].detach().contiguous().numpy().tobytes())
    (words.out / f"final-{rank()}").write_text(digest.hexdigest())


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def disturbed(words: argparse.Namespace, save, count: list[int]):
    """*save*, with rank 1 late or killed before it."""

    def wrapped(*args, **kwargs):
        count[0] += 1
        if rank() == 1:
            time.sleep(words.late)
            if count[0] == words.kill:
                os.kill(os.getpid(), signal.SIGKILL)
        return save(*args, **kwargs)

    return wrapped


def hf(words: argparse.Namespace) -> dict[str, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    Trainer._save_rng_state = disturbed(words, Trainer._save_rng_state, [0])
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
    rows = [torch.arange(n, n + 8) % 16 for n in range(16)]
    arguments = TrainingArguments(
        output_dir=str(words.directory),
        max_steps=STEPS,
        save_steps=EVERY,
        save_total_limit=2,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    model = GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row} for row in rows]
    last = get_last_checkpoint(str(words.directory)) if words.directory.is_dir() else None
    (words.out / f"began-{rank()}").write_text(last or "")
    Trainer(model=model, args=arguments, train_dataset=data).train(resume_from_checkpoint=last)
    return model.state_dict()


def accelerated(words: argparse.Namespace) -> dict[str, torch.Tensor]:
    from accelerate import Accelerator
    from accelerate import accelerator as module
    from accelerate.utils import ProjectConfiguration

    # Its last step: every rank's random state.
    module.save_accelerator_state = disturbed(words, module.save_accelerator_state, [0])
    project = ProjectConfiguration(
        project_dir=str(words.directory), automatic_checkpoint_naming=True
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    net, optimizer = accelerator.prepare(net, optimizer)
    for step in range(1, STEPS + 1):
        accelerator.backward(net(torch.full((2, 8), float(step))).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == EVERY:
            accelerator.save_state()
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(net).state_dict()


def lightning(words: argparse.Namespace) -> dict[str, torch.Tensor]:
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(pl.LightningModule):  # type: ignore[misc]  # untyped base
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def training_step(self, batch, index):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    saves = ModelCheckpoint(
        dirpath=words.directory, every_n_train_steps=EVERY, save_top_k=-1, save_last="link"
    )
    last = words.directory / "last.ckpt"
    path = str(last) if last.exists() else None
    (words.out / "began-0").write_text(path or "")
    model = Model()
    pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=1), ckpt_path=path)
    return model.state_dict()


if __name__ == "__main__":
    main()
