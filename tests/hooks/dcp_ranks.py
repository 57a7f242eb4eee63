"""One rank of a save by the DCP hook: `python dcp_ranks.py RUN WAY RANK PORT`.

The way says how it is saved, and what becomes of rank 1: `sync`, `process` (async in a process),
`fails` and `fails-late` (in the writing of its files, in the coordinator's `finish`).
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptgate
from ckptgate.torch import StorageReader, StorageWriter


def state(scale: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return {"w": distribute_tensor(torch.arange(64.0) * scale, mesh, [Shard(0)])}


class Failing(StorageWriter):
    """A rank whose disk is full."""

    def _write_data(self, *words: object) -> object:
        if dist.get_rank() == 1:
            super()._write_data(*words)
            raise OSError(28, "the disk is full")
        return super()._write_data(*words)


class FailingLate(StorageWriter):
    """A coordinator that can't write the metadata."""

    def _get_metadata_path(self, rank: int | None = None) -> Path:
        if sys._getframe(1).f_code.co_name == "finish":
            raise OSError(28, "the disk is full")
        return super()._get_metadata_path(rank)


def main() -> None:
    run, way, rank, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    path = f"{run}/step-1"
    kind = {"fails": Failing, "fails-late": FailingLate}.get(way, StorageWriter)
    before = state(1.0)
    mesh = before["w"].device_mesh
    writer = kind(path, mesh=mesh, saved_by={"data_version": "v1"})
    try:
        if way == "process":
            dcp.async_save(
                before, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            ).result()
        else:
            dcp.save(before, storage_writer=writer)
    except CheckpointException:
        assert way.startswith("fails")
        dist.barrier()
        assert ckptgate.latest(run, wait_s=5) is None
        # The same step again, whole.
        dcp.save(before, storage_writer=StorageWriter(path, mesh=mesh))
    else:
        assert not way.startswith("fails")
    dist.barrier()
    newest = ckptgate.latest(run, wait_s=60)
    assert newest == path, newest
    after = state(0.0)
    dcp.load(after, storage_reader=StorageReader(newest))
    assert torch.equal(after["w"].full_tensor(), torch.arange(64.0))
    dist.barrier()
    dist.destroy_process_group()
    print("saved and loaded")


if __name__ == "__main__":
    main()
