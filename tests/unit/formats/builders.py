"""Files and checkpoints of the frameworks, built in memory as the real ones have them.

The bytes are as small as a container allows. Nothing here needs a framework.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ckptgate.formats.base import BytesView


class MemoryTree:
    """Files in memory (`Tree`)."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.data = dict(files)

    def files(self) -> Mapping[str, int]:
        return {path: len(data) for path, data in self.data.items()}

    def open(self, path: str) -> BytesView:
        return BytesView(self.data[path])


def torch_file(value: Any = None) -> bytes:
    """As torch.save writes a value without tensors; the same bytes whatever the time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps(value, protocol=2))
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
    return out.getvalue()


def safetensors_file(value: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([value] * 8)


def index_file(shards: list[str]) -> bytes:
    names = {f"layer.{n}.weight": shard for n, shard in enumerate(shards)}
    return json.dumps({"metadata": {"total_size": 8}, "weight_map": names}).encode()


def dcp_metadata(
    files: Mapping[str, int],
    *,
    keys: tuple[str, ...] = ("model.w",),
    plans: int = 0,
    name: str = "torch.distributed.checkpoint.metadata\nMetadata",
) -> bytes:
    """A DCP's metadata as a pickle that torch would read, made without torch."""

    def plain(value: object) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    def pairs(items: list[tuple[bytes, bytes]]) -> bytes:
        return b"}(" + b"".join(key + value for key, value in items) + b"u"

    storage = [
        (
            plain(f"key{n}"),
            b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81"
            + plain({"relative_path": path, "offset": 0, "length": size})
            + b"b",
        )
        for n, (path, size) in enumerate(files.items())
    ]
    fields = [
        (plain("state_dict_metadata"), pairs([(plain(key), plain(None)) for key in keys])),
        (plain("storage_data"), pairs(storage)),
    ]
    if plans:
        fields.append((plain("all_local_plans"), plain([{"rank": n} for n in range(plans)])))
    return b"\x80\x02c" + name.encode() + b"\n)\x81" + pairs(fields) + b"b."


def dcp(folder: str = "", *, ranks: int = 2, **more: Any) -> dict[str, bytes]:
    """A DCP of some ranks; the last one had nothing to write."""
    shards = {f"__{rank}_0.distcp": b"x" * 40 for rank in range(ranks)}
    files = shards | {f"__{ranks}_0.distcp": b""}
    files[".metadata"] = dcp_metadata({name: len(data) for name, data in shards.items()}, **more)
    return {f"{folder}/{name}" if folder else name: data for name, data in files.items()}


class Arguments:
    """Stands for any object in a torch file: it is pickled by name and state."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def arguments(*, save_only_model: bool = False, world_size: int = 2) -> bytes:
    """`training_args.bin`."""
    state = Arguments(num_processes=world_size, backend="gloo")
    value = Arguments(save_only_model=save_only_model, distributed_state=state, save_steps=500)
    return torch_file(value)


def hf_trainer(*, ranks: int = 2, is_model_only: bool = False) -> dict[str, bytes]:
    files = {
        "config.json": b"{}",
        "generation_config.json": b"{}",
        "model.safetensors": safetensors_file(),
        "trainer_state.json": json.dumps({"global_step": 4, "epoch": 1.0}).encode(),
        "training_args.bin": arguments(save_only_model=is_model_only, world_size=ranks),
    }
    if is_model_only:
        return files
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{n}.pth" for n in range(ranks)]
    names += ["optimizer.pt", "scheduler.pt"]
    return files | {name: torch_file({}) for name in names}


def deepspeed(
    folder: str = "", *, stage: int = 1, dp: int = 2, mp: int = 1, prefix: str = "", **more: Any
) -> dict[str, bytes]:
    """A tag's directory as DeepSpeed 0.19.8 writes it."""
    state = {
        "module": {},
        "optimizer": None if stage else {},
        "param_shapes": [OrderedDict([("0.weight", 1), ("2.weight", 1)])] if stage else None,
        "lr_scheduler": None,
        "global_steps": 7,
        "dp_world_size": dp,
        "mp_world_size": mp,
        "ds_config": {"bf16": {"enabled": bool(prefix)}},
        **more,
    }
    saved = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": dp}}
    names: dict[str, bytes] = {}
    for rank in range(mp):
        for part in range(dp):
            if stage:
                name = f"{prefix}zero_pp_rank_{part}_mp_rank_{rank:02d}_optim_states.pt"
                names[name] = torch_file(saved)
            if stage == 3:
                names[f"zero_pp_rank_{part}_mp_rank_{rank:02d}_model_states.pt"] = torch_file(state)
        if stage < 3:
            names[f"mp_rank_{rank:02d}_model_states.pt"] = torch_file(state)
    return {f"{folder}/{name}" if folder else name: data for name, data in names.items()}


def megatron_legacy(*, tp: int = 2, pp: int = 2) -> dict[str, bytes]:
    value = {
        "args": argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
        "iteration": 12000,
        "opt_param_scheduler": {},
        "rng_state": [],
    }
    names = [
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") for t in range(tp) for p in range(pp)
    ]
    kinds = ("model_optim_rng.pt", "distrib_optim.pt")
    return {f"{name}/{kind}": torch_file(value) for name in names for kind in kinds}


SNAPSHOT = """version: 0.1.0
world_size: 2
manifest:
  0/model:
    type: OrderedDict
    keys:
    - weight
  0/model/weight:
    type: Tensor
    location: replicated/model/weight
    serializer: buffer_protocol
    dtype: torch.float32
    shape:
    - 8
    replicated: true
    byte_range: null
  0/progress/r:
    type: Tensor
    location: 0/progress/r
    serializer: buffer_protocol
    dtype: torch.float32
    shape:
    - 3
    replicated: false
    byte_range:
    - 4
    - 16
  1/progress/r:
    type: object
    location: 1/progress/r
    serializer: torch_save
    obj_type: x
    replicated: false
  0/progress/step:
    type: int
    serialized_value: '3'
    replicated: false
    readable: null
"""


def nanotron(*, tp: int = 2, dp: int = 2) -> dict[str, bytes]:
    files = {
        "checkpoint_metadata.json": b"{}",
        "config.yaml": b"a: 1\n",
        "model_config.json": b"{}",
        "optimizer/optimizer_config.json": b"{}",
        "lr_scheduler/lr_scheduler.pt": torch_file({}),
    }
    for t in range(tp):
        name = f"model/model/h/0/model_weight_pp-rank-0-of-1_tp-rank-{t}-of-{tp}.safetensors"
        files[name] = safetensors_file()
        for d in range(dp):
            ranks = f"pp-0-of-1_dp-{d}-of-{dp}_tp-{t}-of-{tp}_exp-0-of-1"
            files[f"optimizer/optimizer_{ranks}.pt"] = torch_file({})
            files[f"random/tp-{t}-of-{tp}_dp-{d}-of-{dp}_pp-0-of-1.pt"] = torch_file({})
    return files


def orbax_item(folder: str) -> dict[str, bytes]:
    names = {
        "_METADATA": b"{\"tree_metadata\": {\"('opt_state', 'm')\": {}}}",
        "manifest.ocdbt": b"ocdbt",
        "d/0123abcd": b"data",
        "ocdbt.process_0/manifest.ocdbt": b"ocdbt",
        "ocdbt.process_0/d/4567cdef": b"data",
        "array_metadatas/process_0": b"{}",
        "_sharding": b"{}",
    }
    return {f"{folder}/{name}" if folder else name: data for name, data in names.items()}
