"""Checkpoints of every known framework, whole: names as the real ones write them on two ranks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.formats.builders import (
    SNAPSHOT,
    dcp,
    deepspeed,
    hf_trainer,
    index_file,
    megatron_legacy,
    nanotron,
    orbax_item,
    safetensors_file,
    torch_file,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint.

    Attributes:
        format: what it must be recognised as.
        name: of its directory.
        files: all of them.
        optional: what may be missing, as a pattern of whole paths.
        extras: what may be there besides.
        world_size: of the job that wrote it, None where nobody knows.
        is_partial: the format doesn't speak of all of it.
    """

    format: str
    name: str
    files: dict[str, bytes]
    optional: str = "(?!)"
    extras: tuple[str, ...] = ()
    world_size: int | None = 2
    is_partial: bool = False
    required: list[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "required", sorted(p for p in self.files if not re.fullmatch(self.optional, p))
        )


_HF_OPTIONAL = r"config\.json|generation_config\.json|training_args\.bin"
_HF_EXTRAS = (
    "tokenizer.json",
    "special_tokens_map.json",
    "scaler.pt",
    "README.md",
    "eval_results.json",
    "added/by/a/callback.txt",
)
_EMPTY_SHARD = r"(?:.*/)?__2_0\.distcp"
_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
_INDEXED = {name: safetensors_file() for name in _SHARDS} | {
    "model.safetensors.index.json": index_file([*_SHARDS, _SHARDS[0]])
}
_NO_SINGLE = {k: v for k, v in hf_trainer().items() if k != "model.safetensors"}
_DS_HF = {k: v for k, v in hf_trainer().items() if k not in {"optimizer.pt", "scheduler.pt"}}
_ACCELERATE = {
    "model.safetensors": safetensors_file(),
    "model_1.safetensors": safetensors_file(),
    "optimizer.bin": torch_file({}),
    "optimizer_1.bin": torch_file({}),
    "scheduler.bin": torch_file({}),
    "sampler.bin": torch_file({}),
    "random_states_0.pkl": pickle.dumps({"step": 1}),
    "random_states_1.pkl": pickle.dumps({"step": 1}),
    "custom_checkpoint_0.pkl": pickle.dumps(1),
    "custom_checkpoint_1.pkl": pickle.dumps(1),
}
_EXPERTS = {
    f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt": torch_file({})
    for layer in range(2)
    for expert in range(4)
} | {f"expp_rank_{rank}_mp_rank_00_optim_states.pt": torch_file({}) for rank in range(2)}
_PIPELINE = {f"layer_{layer:02d}-model_00-model_states.pt": torch_file({}) for layer in (0, 2)}


def _layouts() -> dict[str, Callable[[], Layout]]:
    def hf(files: dict[str, bytes], **more: Any) -> Callable[[], Layout]:
        more = {"optional": _HF_OPTIONAL, **more}
        return lambda: Layout(
            format="hf-trainer", name="checkpoint-4", files=files, extras=_HF_EXTRAS, **more
        )

    def ds(files: dict[str, bytes], **more: Any) -> Callable[[], Layout]:
        return lambda: Layout(
            format="deepspeed",
            name="global_step7",
            files=files,
            extras=("zero_to_fp32.py", "ema.pt", "offloaded_tensors/rank0/x.swp"),
            **more,
        )

    def of(format_: str, name: str, files: dict[str, bytes], **more: Any) -> Callable[[], Layout]:
        return lambda: Layout(format=format_, name=name, files=files, **more)

    return {
        "hf trainer, one rank": hf(hf_trainer(ranks=1), world_size=None),
        "hf trainer": hf(hf_trainer(), world_size=None),
        "hf trainer, model only": hf(hf_trainer(is_model_only=True)),
        "hf trainer, sharded weights": hf(_NO_SINGLE | _INDEXED),
        "hf trainer with deepspeed": hf(
            _DS_HF | deepspeed("global_step4", stage=2) | {"latest": b"global_step4"},
            # With ZeRO-3 the weights may be in DeepSpeed's files alone.
            optional=rf"{_HF_OPTIONAL}|model\.safetensors",
        ),
        "hf trainer with fsdp": lambda: Layout(
            format="hf-trainer",
            name="checkpoint-4",
            files={k: v for k, v in _NO_SINGLE.items() if k != "optimizer.pt"}
            | dcp("pytorch_model_fsdp_0")
            | dcp("optimizer_0"),
            optional=f"{_HF_OPTIONAL}|{_EMPTY_SHARD}",
        ),
        "deepspeed 0": ds(deepspeed(stage=0)),
        "deepspeed 1": ds(deepspeed(stage=1)),
        "deepspeed 2, bf16": ds(deepspeed(stage=2, prefix="bf16_")),
        "deepspeed 3": ds(deepspeed(stage=3)),
        "deepspeed 2, two model ranks": ds(deepspeed(stage=2, mp=2), world_size=4),
        "deepspeed 1, one rank": ds(deepspeed(stage=1, dp=1), world_size=1),
        "deepspeed, experts": ds(
            deepspeed(stage=1, num_experts=[4, 4]) | _EXPERTS,
            # How many ranks share the experts no file says.
            optional=r"expp_rank_1_.*",
        ),
        "deepspeed, pipeline": ds(deepspeed(stage=1, dp=1, mp=2) | _PIPELINE),
        "accelerate": of(
            "accelerate",
            "checkpoint_0",
            _ACCELERATE,
            extras=("notes.txt", "scaler.pt"),
            # Of these only the last of each row can go unnoticed: no file says how many there are.
            optional=r"model_1\.safetensors|optimizer_1\.bin|scheduler\.bin|sampler\.bin"
            r"|custom_checkpoint_1\.pkl",
        ),
        "accelerate with fsdp": of(
            "accelerate",
            "checkpoint_0",
            {k: v for k, v in _ACCELERATE.items() if k.startswith("random")}
            | dcp("pytorch_model_fsdp_0")
            | dcp("optimizer_0"),
            optional=_EMPTY_SHARD,
        ),
        "accelerate, sharded weights": of(
            "accelerate",
            "checkpoint_0",
            {k: v for k, v in _ACCELERATE.items() if k.startswith("random")} | _INDEXED,
        ),
        "lightning, sharded": of(
            "lightning",
            "epoch=0-step=2.ckpt",
            dcp() | {"meta.pt": torch_file({})},
            optional=_EMPTY_SHARD,
            extras=("hparams.yaml",),
        ),
        "dcp": of("dcp", "step-4", dcp(), optional=_EMPTY_SHARD, extras=("__7_0.distcp", "x.txt")),
        "torchtitan": of(
            "dcp",
            "step-4",
            dcp(
                keys=(
                    "tok_embeddings.weight",
                    "optimizer.state.x",
                    "train_state",
                    "dataloader.dp_rank_0",
                    "lr_scheduler.last_epoch",
                )
            ),
            optional=_EMPTY_SHARD,
        ),
        "bytecheckpoint": of(
            "dcp",
            "global_step_4",
            dcp("model") | dcp("optimizer") | {"extra_state/r0.pt": b"x"},
            optional=f"{_EMPTY_SHARD}|extra_state/.*",
        ),
        "composer, sharded": of("dcp", "ep0-ba4", dcp(), optional=_EMPTY_SHARD),
        "composer": of(
            "composer",
            "checkpoint_4",
            {f"ep0-ba4-rank{n}.pt": torch_file({}) for n in range(2)},
            # Unsharded training writes rank 0's alone.
            optional=r"ep0-ba4-rank1\.pt",
        ),
        "dcp hf, distributed": of(
            "dcp-hf",
            "step-4",
            {f"shard-0000{n}-model-00001-of-00001.safetensors": safetensors_file() for n in (1, 2)},
            # Without any word of the ranks nobody knows that the last one is missing.
            optional="shard-00002-.*",
        ),
        "dcp hf, consolidated": of("weights", "step-4", _INDEXED, is_partial=True),
        "megatron": of(
            "megatron",
            "iter_0012000",
            dcp(
                plans=2,
                name="megatron.core.dist_checkpointing.strategies.state_dict_saver\nMCoreMetadata",
                keys=("model.w", "common_state/shard_0_1"),
            )
            | {"metadata.json": b'{"sharded_backend": "x"}'},
            optional=_EMPTY_SHARD,
            extras=("integrity.json", "train_dataloader_dprank000.pt"),
        ),
        "megatron-core 0.16": of(
            "megatron",
            "iter_0000010",
            dcp(plans=2) | {"metadata.json": b"{}", "common.pt": torch_file({})},
            optional=_EMPTY_SHARD,
            extras=("integrity.json",),
        ),
        "megatron, fsdp_dtensor": of("megatron", "iter_0012000", dcp(), optional=_EMPTY_SHARD),
        "megatron, old layout": of("megatron", "iter_0012000", megatron_legacy(), world_size=4),
        "orbax": of(
            "orbax",
            "7",
            {"_CHECKPOINT_METADATA": b"{}", "meta/metadata": b"{}"} | orbax_item("state"),
            # Their names are in binary manifests only.
            optional=r"meta/.*|state/(?:d/.*|ocdbt\..*|array_metadatas/.*|_sharding)",
            extras=("commit_success.txt", "metrics/metrics", "state/_strings.json"),
        ),
        "torchsnapshot": of(
            "torchsnapshot",
            "step-1",
            {
                ".snapshot_metadata": SNAPSHOT.encode(),
                "replicated/model/weight": bytes(32),
                "0/progress/r": bytes(16),
                "1/progress/r": bytes(12),
            },
        ),
        "nanotron": of("nanotron", "10", nanotron(), world_size=4),
        "olmo": of(
            "olmo",
            "step100-tmp",
            dcp("model_and_optim") | {f"train/rank{n}.pt": torch_file({}) for n in range(2)},
            optional=_EMPTY_SHARD,
            extras=(".metadata.json", "config.json", "data_paths.txt"),
        ),
        "fairseq2": of(
            "fairseq2",
            "step_7.tmp",
            {f"trainer/rank_{n:02d}.pt": torch_file({}) for n in range(2)}
            | {
                f"{kind}/pp_00/tp_00/sdp_{n:02d}.pt": torch_file({})
                for n in range(2)
                for kind in ("model", "optimizer")
            }
            | {f"data_reader/dp_{n:02d}.pt": torch_file({}) for n in range(2)},
            optional=r"data_reader/.*",
        ),
        "nvrx": of(
            "nvrx",
            "epoch0",
            {f"{n}/iter_0000010_{n}_local.pt": torch_file({}) for n in range(2)},
            extras=("0/iter_0000005_0_local.pt",),
        ),
        "hf weights": of(
            "weights",
            "step-4",
            _INDEXED | {"config.json": b"{}"},
            optional="config.json",
            is_partial=True,
            extras=("tokenizer.json",),
        ),
    }


LAYOUTS = _layouts()
