"""Each framework's hook where a save fails, is repeated, or isn't one of a checkpoint: one rank.

Needs `pip install --group frameworks`. Kills are in tests/frameworks/test_matrix_hooks.py.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, cli

import ckptgate
from ckptgate.errors import UsageError

pytestmark = [
    pytest.mark.fuse,
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


class FullError(OSError):
    """The disk is full."""


def shown(one: Cluster, path: str) -> dict:
    name = Path(path)
    done = cli("show", one.store / name.parent.name / name.name, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def states(one: Cluster, run: Path) -> list[str]:
    return sorted(
        row["state"] for row in one.nodes[0].status()["attempts"] if row["run"] == run.name
    )


# Lightning


def test_lightning_s_failed_save_is_given_up_and_saved_again(one: Cluster, run: Path):
    """I4"""
    import torch
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    from ckptgate.lightning import CheckpointIO

    class Failing(TorchCheckpointIO):  # type: ignore[misc]  # untyped base
        def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
            Path(path).write_bytes(b"half")
            raise FullError(28, "the disk is full")

    path = run / "epoch=0-step=10.ckpt"
    state = {"w": torch.arange(3), "global_step": 10, "epoch": 0}
    with pytest.raises(FullError):
        CheckpointIO(Failing()).save_checkpoint(state, path)
    assert not path.exists()
    for scale in (1, 2):
        io = CheckpointIO(saved_by={"data_version": f"v{scale}"})
        io.save_checkpoint({**state, "w": torch.arange(3) * scale}, path)
        assert ckptgate.latest(run, wait_s=60) == str(path)
    assert io.load_checkpoint(path)["w"].tolist() == [0, 2, 4]
    record = shown(one, str(path))["saved_by"]["record"]
    assert (record["framework"], record["step"], record["data_version"]) == ("lightning", 10, "v2")
    # The removal of the first one's files was a revision, which went with it.
    assert states(one, run) == ["abandoned", "aborted", "committed", "replaced"]
    (run / "plain.ckpt").write_bytes((path / "checkpoint.ckpt").read_bytes())
    assert io.load_checkpoint(run / "plain.ckpt")["w"].tolist() == [0, 2, 4]
    io.remove_checkpoint(path)
    assert not path.exists()


def test_lightning_saves_in_the_background_and_links_what_is_committed(one: Cluster, run: Path):
    import lightning as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from ckptgate.lightning import CheckpointIO

    def trainer(steps: int) -> pl.Trainer:
        saves = ModelCheckpoint(dirpath=run, every_n_train_steps=2, save_top_k=-1, save_last="link")
        return pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            plugins=[AsyncCheckpointIO(CheckpointIO())],
            callbacks=[saves],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    trainer(4).fit(BoringModel())
    newest = ckptgate.latest(run, wait_s=60)
    assert newest is not None
    assert newest.endswith("step=4.ckpt")
    assert os.path.realpath(run / "last.ckpt") == os.path.realpath(newest)
    state = torch.load(f"{newest}/checkpoint.ckpt", weights_only=False)
    assert state["global_step"] == 4
    again = trainer(6)
    again.fit(BoringModel(), ckpt_path=newest, weights_only=False)
    assert again.global_step == 6
    last = ckptgate.latest(run, wait_s=60)
    assert last is not None
    assert last.endswith("step=6.ckpt")


def test_lightning_s_name_that_is_no_checkpoint_s_is_told(run: Path):
    from ckptgate.lightning import CheckpointIO

    with pytest.raises(UsageError, match="not a checkpoint on a ckptgate mount"):
        CheckpointIO().save_checkpoint({"global_step": 1}, run / "model.ckpt")


# DeepSpeed


def engine_for(inner):
    from ckptgate.deepspeed import CheckpointEngine

    return CheckpointEngine(inner, saved_by={"data_version": "v1"}, describe=lambda: {"step": 5})


def save_with(engine, run: Path, *, save_latest: bool = True) -> None:
    """As `DeepSpeedEngine.save_checkpoint`."""
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo

    info = CheckpointCommitInfo(tag="global_step5", save_dir=str(run), save_latest=save_latest)
    engine.makedirs(str(run), exist_ok=True)
    engine.create(info)
    engine.makedirs(str(run / "global_step5"), exist_ok=True)
    engine.save({"w": 1}, str(run / "global_step5" / "one.pt"))
    engine.save({"w": 2}, str(run / "global_step5" / "two.pt"))
    engine.commit(info)
    if save_latest:
        (run / "latest").write_text(info.tag)


def test_deepspeed_s_failed_save_is_given_up_and_saved_again(one: Cluster, run: Path):
    """I4, I5: `latest` is the text that DeepSpeed writes, and comes with the commit."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    class Failing(TorchCheckpointEngine):  # type: ignore[misc]  # untyped base
        def save(self, state_dict, path: str) -> None:
            super().save(state_dict, path)
            if path.endswith("two.pt"):
                raise FullError(28, "the disk is full")

    with pytest.raises(FullError):
        save_with(engine_for(Failing()), run)
    assert not (run / "global_step5").exists()
    assert not (run / "latest").exists()
    for _ in range(2):
        save_with(engine_for(TorchCheckpointEngine()), run)
        assert ckptgate.latest(run, wait_s=60) == str(run / "global_step5")
    assert one.plain(f"{run.name}/latest") == b"global_step5"
    assert not (one.store / run.name / "latest").is_symlink()
    record = shown(one, str(run / "global_step5"))["saved_by"]["record"]
    assert (record["framework"], record["step"], record["data_version"]) == ("deepspeed", 5, "v1")
    assert states(one, run) == ["aborted", "committed", "replaced"]


def test_deepspeed_s_export_of_weights_is_no_checkpoint(run: Path):
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

    engine = engine_for(TorchCheckpointEngine())
    info = CheckpointCommitInfo(tag="global_step5", save_dir=str(run), save_latest=False)
    engine.create(info)
    engine.makedirs(str(run), exist_ok=True)
    engine.save({"w": 1}, str(run / "weights.pt"))
    engine.commit(info)
    assert sorted(os.listdir(run)) == ["weights.pt"]
    assert ckptgate.latest(run) is None


def test_deepspeed_s_decoupled_engines_are_refused():
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    class Decoupled(TorchCheckpointEngine):  # type: ignore[misc]  # untyped base
        def is_decoupled(self) -> bool:
            return True

    with pytest.raises(UsageError, match="decoupled"):
        engine_for(Decoupled())


def test_deepspeed_is_told_of_a_place_that_no_gateway_serves(tmp_path: Path):
    """It logs OSErrors of makedirs and goes on."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    with pytest.raises(RuntimeError, match="not a checkpoint on a ckptgate mount"):
        save_with(engine_for(TorchCheckpointEngine()), tmp_path)


# accelerate


def test_accelerate_s_failed_save_is_given_up_and_saved_again(one: Cluster, run: Path):
    """I4"""
    import torch
    from accelerate import Accelerator

    from ckptgate.accelerate import attach

    class Count:
        fails = True

        def state_dict(self) -> dict[str, int]:
            if self.fails:
                raise FullError(28, "the disk is full")
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            assert state == {"n": 1}

    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(torch.nn.Linear(2, 2))
    count = Count()
    accelerator.register_for_checkpointing(count)
    attach(accelerator, saved_by={"data_version": "v1"})
    path = run / "checkpoint_7"
    with pytest.raises(FullError):
        accelerator.save_state(str(path))
    assert not path.exists()
    count.fails = False
    accelerator.save_state(str(path))
    assert ckptgate.latest(run, wait_s=60) == str(path)
    record = shown(one, str(path))["saved_by"]["record"]
    assert (record["framework"], record["step"]) == ("accelerate", 7)
    assert states(one, run) == ["aborted", "committed"]
    want = [value.clone() for value in net.parameters()]
    torch.nn.init.zeros_(net.weight)
    accelerator.load_state(str(path))
    assert all(torch.equal(a, b) for a, b in zip(want, net.parameters(), strict=True))


# The Trainer


def test_the_trainer_s_saves_are_committed_and_one_of_a_best_model_too(one: Cluster, run: Path):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ckptgate.transformers import CommitCallback

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
    rows = [torch.arange(n, n + 8) % 16 for n in range(16)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def train(strategy: str, steps: int, last: str | None = None) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(run),
            max_steps=steps,
            save_steps=2,
            eval_steps=2,
            save_strategy=strategy,
            eval_strategy="steps",
            metric_for_best_model="loss",
            per_device_train_batch_size=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=data,
            eval_dataset=data[:2],
            callbacks=[CommitCallback(saved_by={"data_version": "v1"})],
        )
        trainer.train(resume_from_checkpoint=last)
        return trainer

    train("steps", 4)
    newest = ckptgate.latest(run, wait_s=60)
    assert newest == str(run / "checkpoint-4")
    record = shown(one, newest)["saved_by"]["record"]
    assert (record["framework"], record["step"]) == ("transformers-trainer", 4)
    assert train("best", 6, newest).state.global_step == 6
    newest = ckptgate.latest(run, wait_s=60)
    assert newest is not None
    assert newest.startswith(str(run / "checkpoint-"))
    assert set(states(one, run)) == {"committed"}
