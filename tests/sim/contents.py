"""What simulated trainers write: each file says who wrote it when."""

from __future__ import annotations

import pickle
import random

__all__ = ["content", "dcp_metadata"]


def content(save: str, rank: int, file: str, version: int, rng: random.Random | None) -> bytes:
    head = f"{save}|{rank}|{file}|{version}|".encode()
    return head + bytes([65 + version]) * ((rng.choice([0, 1, 300]) if rng else 7) + version)


def dcp_metadata(shards: list[str], note: str) -> bytes:
    """A DCP `.metadata` that names these shards, put together by hand: no torch is needed."""
    storage = "torch.distributed.checkpoint.filesystem"

    def text(value: str) -> bytes:
        raw = value.encode()
        return b"X" + len(raw).to_bytes(4, "little") + raw

    def instance(module: str, name: str, state: bytes) -> bytes:
        return b"c" + f"{module}\n{name}\n".encode() + b")\x81}(" + state + b"ub"

    infos = b"".join(
        text(f"w{number}")
        + instance(
            storage,
            "_StorageInfo",
            text("relative_path") + text(shard) + text("offset") + b"K\0" + text("length") + b"K\1",
        )
        for number, shard in enumerate(shards)
    )
    state = text("state_dict_metadata") + b"}" + text("storage_data") + b"}(" + infos + b"u"
    state += text("note") + text(note)
    made = instance("torch.distributed.checkpoint.metadata", "Metadata", state)
    return b"\x80\x02" + made + pickle.STOP
