"""Checkpoints as frameworks write them, with as many tensors as a model of some billions has."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.unit.formats.builders import arguments

__all__ = ["BY_TORCH", "CHECKPOINTS", "RANKS", "SHARD_TENSORS", "model_states", "optimizer_states"]

RANKS: Final = 8
TENSORS: Final = 300
"""Of a model; its optimizer keeps two more for each."""
SHARD_TENSORS: Final = 32
"""Of a large shard, so that its tensors are large too."""
_BLOCK: Final = 1 << 20


def torch_zip(path: Path, value: Any, *, tensors: int, size: int) -> None:
    """A file as torch.save writes it: a pickle, and *size* bytes in so many storages."""
    block = os.urandom(_BLOCK)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        for number in range(tensors):
            with archive.open(f"archive/data/{number}", "w") as record:
                left = size // tensors
                while left > 0:
                    record.write(block[:left])
                    left -= _BLOCK
        archive.writestr("archive/version", "3\n")


def model_states(path: Path, ranks: int = RANKS) -> None:
    """DeepSpeed's file of the first model-parallel rank, with ZeRO."""
    names = [f"model.layers.{n // 9}.part{n % 9}.weight" for n in range(TENSORS)]
    value = {
        "module": OrderedDict((name, n) for n, name in enumerate(names)),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, [4096, 4096]) for name in names)],
        "global_steps": 1,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"bf16": {"enabled": False}},
    }
    torch_zip(path, value, tensors=TENSORS, size=TENSORS * 4096)


def optimizer_states(path: Path, size: int, *, tensors: int, ranks: int = RANKS) -> None:
    """DeepSpeed's file of one partition, with ZeRO."""
    value = {"optimizer_state_dict": {"zero_stage": 2, "partition_count": ranks}}
    torch_zip(path, value, tensors=tensors, size=size)


def safetensors(path: Path, first: int, count: int) -> dict[str, str]:
    """A shard with so many tensors; tensor -> its name."""
    each = 4096
    header = {
        f"model.layers.{n}.weight": {
            "dtype": "BF16",
            "shape": [each // 2],
            "data_offsets": [at * each, (at + 1) * each],
        }
        for at, n in enumerate(range(first, first + count))
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(each * count))
    return dict.fromkeys(header, path.name)


def deepspeed(folder: Path) -> str:
    """ZeRO 2; the checkpoint's name."""
    model_states(folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        optimizer_states(folder / name, 2 << 20, tensors=2 * TENSORS)
    return "global_step1"


def dcp(folder: Path) -> str:
    """FSDP: each tensor of model and optimizer is split over all ranks; its metadata by torch."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    each = 4096
    torch_zip(folder / "item", {}, tensors=1, size=each)
    data = (folder / "item").read_bytes()
    (folder / "item").unlink()
    size = torch.Size([RANKS * 512, 4])
    properties = dcp_metadata.TensorProperties(dtype=torch.bfloat16)
    tensors: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for number in range(3 * TENSORS):
        name = f"model.layers.{number // 9}.part{number % 9}.weight"
        starts = [torch.Size([rank * 512, 0]) for rank in range(RANKS)]
        chunks = [
            dcp_metadata.ChunkStorageMetadata(offsets=start, sizes=torch.Size([512, 4]))
            for start in starts
        ]
        tensors[name] = dcp_metadata.TensorStorageMetadata(
            properties=properties, size=size, chunks=chunks
        )
        for rank, start in enumerate(starts):
            place = _StorageInfo(f"__{rank}_0.distcp", number * len(data), len(data))
            stored[dcp_metadata.MetadataIndex(name, start)] = place
    for rank in range(RANKS):
        (folder / f"__{rank}_0.distcp").write_bytes(data * (3 * TENSORS))
    saved = dcp_metadata.Metadata(state_dict_metadata=tensors, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(saved))
    return "step-1"


def trainer(folder: Path) -> str:
    """A Hugging Face Trainer's: indexed shards, the optimizer's torch file, states of ranks."""
    names: dict[str, str] = {}
    for shard in range(RANKS):
        name = f"model-{shard + 1:05d}-of-{RANKS:05d}.safetensors"
        names |= safetensors(folder / name, shard * TENSORS, TENSORS)
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch_zip(folder / "optimizer.pt", {}, tensors=2 * TENSORS, size=2 << 20)
    torch_zip(folder / "scheduler.pt", {"last_epoch": 1}, tensors=0, size=0)
    for rank in range(RANKS):
        torch_zip(folder / f"rng_state_{rank}.pth", {"cpu": 1}, tensors=1, size=5056)
    (folder / "training_args.bin").write_bytes(arguments(world_size=RANKS))
    history = [{"loss": 1.5, "step": n} for n in range(1000)]
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 1, "log_history": history})
    )
    return "checkpoint-1"


CHECKPOINTS: Final[dict[str, Callable[[Path], str]]] = {
    "DeepSpeed ZeRO 2": deepspeed,
    "DCP": dcp,
    "Hugging Face Trainer": trainer,
}
"""Each writes its files to a directory and returns how the checkpoint would be called."""
BY_TORCH: Final = frozenset({"DCP"})
"""Those that need PyTorch."""
