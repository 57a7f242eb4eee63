"""FSDP2 saved by torch.distributed.checkpoint: its own files, or safetensors by its HF writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.frameworks.job import Job
from tests.frameworks.trainings import toy
from tests.frameworks.trainings.rules import DcpHfRules, DcpRules, Rules, is_served
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

__all__ = ["Dcp", "DcpHf"]


class _Fsdp(Rules):
    """The training; how it is saved and read is for those below."""

    def train(self, job: Job) -> object:
        toy.joined()
        self.model = toy.model()
        mesh = init_device_mesh("cpu", (job.world,))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        # A background save must not share its collectives' group with the training step.
        self.group = dist.new_group(backend="gloo")
        job.root.mkdir(exist_ok=True)
        # Who resumes is agreed upon.
        found = [self.newest(job.root)]
        begin = torch.tensor([0 if found[0] is None else int(found[0].name.rpartition("-")[2])])
        dist.broadcast(begin, 0)
        done = int(begin.item())
        job.began(f"step-{done}" if done else "")
        if done:
            self.restore(job.root / f"step-{done}")
        for step in range(done + 1, job.steps + 1):
            data = toy.batch(step, job.rank)
            self.optim.zero_grad()
            (self.model(data) - data).pow(2).mean().backward()
            self.optim.step()
            if job.is_due(step):
                self.settle()
                job.saving(step)
                self.save(job.root / f"step-{step}")
        self.settle()
        state = self.state()
        dist.barrier()
        dist.destroy_process_group()
        return state

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def restore(self, path: Path) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """A save in the background is over."""


class Dcp(_Fsdp, DcpRules):
    """DCP's own files: in place, or by a thread or a process in the background."""

    pending: Any = None

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def save(self, path: Path) -> None:
        if self.mode.startswith("hook") and is_served(path.parent):
            self._save_hooked(path)
            return
        if self.mode in {"sync", "hook"}:
            dcp.save(self.state(), checkpoint_id=path)
            return
        kind = AsyncCheckpointerType.THREAD
        if self.mode == "process":
            kind = AsyncCheckpointerType.PROCESS
        group = self.group if self.mode in {"thread", "hook-thread"} else None
        self.pending = dcp.async_save(
            self.state(), checkpoint_id=path, process_group=group, async_checkpointer_type=kind
        )

    def _save_hooked(self, path: Path) -> None:
        from ckptgate.torch import StorageWriter

        mesh = next(self.model.parameters()).device_mesh
        writer = StorageWriter(path, mesh=mesh, saved_by={"data_version": "toy"})
        if self.mode == "hook":
            dcp.save(self.state(), storage_writer=writer)
        else:
            self.pending = dcp.async_save(
                self.state(), storage_writer=writer, process_group=self.group
            )

    def settle(self) -> None:
        if self.pending is not None:
            self.pending.result()

    def restore(self, path: Path) -> None:
        state = self.state()
        if self.mode.startswith("hook") and is_served(path.parent):
            from ckptgate.torch import StorageReader

            dcp.load(state, storage_reader=StorageReader(path))
        else:
            dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optim,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def load(self, path: Path) -> object:
        reader = dcp.FileSystemReader(path)
        said = reader.read_metadata().state_dict_metadata
        state = {
            key: torch.empty(value.size, dtype=value.properties.dtype)
            for key, value in said.items()
            if hasattr(value, "properties")
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state


class DcpHf(_Fsdp, DcpHfRules):
    """Safetensors of each rank; consolidated with an index, or not, without any marker."""

    def state(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optim = get_state_dict(self.model, self.optim, options=options)
        # It knows tensors only.
        return {key: held for key, held in {**model, **optim}.items() if torch.is_tensor(held)}

    def save(self, path: Path) -> None:
        state = self.state()
        # Two files of each rank.
        index = {key: 1 + key.startswith("state.") for key in state}
        writer = dcp.HuggingFaceStorageWriter(
            str(path),
            fqn_to_index_mapping=index,
            save_distributed=True,
            enable_consolidation=self.is_whole,
        )
        dcp.save(state, storage_writer=writer)

    def restore(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        _, optim = get_state_dict(self.model, self.optim, options=options)
        set_state_dict(
            self.model,
            self.optim,
            model_state_dict={k: v for k, v in state.items() if k not in optim},
            optim_state_dict={**optim, **{k: v for k, v in state.items() if k in optim}},
            options=options,
        )

    def load(self, path: Path) -> object:
        names = [name for name in self.files(path) if name.endswith(".safetensors")]
        return {name: load_file(path / name) for name in names}
