"""What frameworks' hooks do where a user gives them a `ckpt://` URL: one rank.

Lightning writes by fsspec. The others take any name for the path of a local file: their hooks say
so before anything is written. Needs `pip install --group frameworks`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from tests.ckpt.places import Place

import ckptgate
from ckptgate.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # theirs
]


@pytest.fixture(autouse=True)
def frameworks_are_there(require, monkeypatch) -> None:
    names = ("deepspeed", "lightning", "transformers", "accelerate")
    missing = [name for name in names if not find_spec(name)]
    require(not missing, f"not installed: {', '.join(missing)}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """The working directory, in which nobody may make a directory named `ckpt:`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Place, request, monkeypatch) -> str:
    """The URL of this test's own run."""
    monkeypatch.setitem(fsspec.config.conf, "ckpt", place.options)
    return f"ckpt://{request.node.name.partition('[')[0]}"


def is_refused(caught: pytest.ExceptionInfo[BaseException], framework: str) -> bool:
    error = caught.value
    assert isinstance(error, UsageError)
    return f"{framework} writes its files by paths" in str(error) and "ckptgate mount" in error.hint


def test_lightning_saves_to_and_resumes_from_a_url(place: Place, run: str):
    """I4: each checkpoint is committed as one, and recorded."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    from ckptgate.lightning import CheckpointIO

    def trainer(steps: int) -> pl.Trainer:
        saves = ModelCheckpoint(dirpath=run, every_n_train_steps=2, save_top_k=1, monitor=None)
        return pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            plugins=[CheckpointIO(saved_by={"data_version": "v1"})],
            callbacks=[saves],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    trainer(4).fit(BoringModel())
    newest = ckptgate.latest(run, wait_s=60)
    assert newest == f"{run}/epoch=0-step=4.ckpt"
    again = trainer(6)
    again.fit(BoringModel(), ckpt_path=newest, weights_only=False)
    assert again.global_step == 6
    assert ckptgate.latest(run, wait_s=60) == f"{run}/epoch=0-step=6.ckpt"
    path = run.removeprefix("ckpt://")
    assert place.fs().isfile(f"{path}/epoch=0-step=6.ckpt/checkpoint.ckpt")


def test_deepspeed_s_hook_refuses_a_url(run: str, here: Path):
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

    from ckptgate.deepspeed import CheckpointEngine

    engine = CheckpointEngine(TorchCheckpointEngine())
    # As `save_checkpoint` on rank 0, and on others.
    with pytest.raises(UsageError) as caught:
        engine.makedirs(run, exist_ok=True)
    assert is_refused(caught, "DeepSpeed")
    with pytest.raises(UsageError) as caught:
        engine.create(CheckpointCommitInfo(tag="global_step5", save_dir=run, save_latest=True))
    assert is_refused(caught, "DeepSpeed")
    assert os.listdir(here) == []


def test_accelerate_s_hook_refuses_a_url(run: str, here: Path):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from ckptgate.accelerate import attach

    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    with pytest.raises(UsageError) as caught:
        accelerator.save_state(f"{run}/checkpoint_7")
    assert is_refused(caught, "accelerate")
    project = ProjectConfiguration(project_dir=run, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    attach(accelerator)
    with pytest.raises(UsageError) as caught:
        accelerator.save_state()
    assert is_refused(caught, "accelerate")
    assert os.listdir(here) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_the_trainer_s_hook_refuses_a_url(run: str, here: Path, is_late: bool):
    """Before the first step, also where it is added to a Trainer that is there."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ckptgate.transformers import CommitCallback

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
    rows = [torch.arange(n, n + 8) % 16 for n in range(4)]
    arguments = TrainingArguments(
        output_dir=run, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )

    def train() -> None:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[] if is_late else [CommitCallback()],
        )
        assert is_late
        trainer.add_callback(CommitCallback())
        trainer.train()

    with pytest.raises(UsageError) as caught:
        train()
    assert is_refused(caught, "the Trainer")
    # The Trainer makes its directory before it asks anybody; nothing is in it.
    assert [files for _, _, files in os.walk(here) if files] == []
