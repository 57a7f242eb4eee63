"""Saving and loading by `torch.distributed.checkpoint`: its own writer and reader, and the gateway.

Protocol adapter only. Each rank begins and records before DCP plans anything. The coordinator
commits for all once its metadata is written, which DCP does after every rank's results are in; a
rank whose writing fails gives the attempt up for all. Without collectives each rank commits its
own part. One save at a time; the thread is DCP's (in `async_save` one of its own, or a process).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptgate.errors import RefusedError
from ckptgate_adapters.hooks.extras import lacks
from ckptgate_adapters.hooks.part import Part, giving_up
from ckptgate_adapters.hooks.place import is_url, step_of

try:
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import (
        FileSystem,
        FileSystemReader,
        FileSystemWriter,
    )
except ImportError as exc:
    raise lacks("torch", exc) from exc

__all__ = ["StorageReader", "StorageWriter"]


def layout_of(mesh: Any) -> dict[str, int] | None:
    """Dimension -> size of a device mesh; None without one."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or [f"dim{at}" for at in range(mesh.ndim)]
    return {name: int(mesh.size(at)) for at, name in enumerate(names)}


def _opened(address: str | os.PathLike[str]) -> tuple[Any, Any]:
    """DCP's file system for an address, and the address as that has it."""
    fs: Any = FileSystem()
    if is_url(os.fspath(address)):
        # It needs fsspec, which paths don't.
        from torch.distributed.checkpoint import _fsspec_filesystem as urls  # noqa: PLC0415

        fs = urls.FileSystem()
    return fs, fs.init_path(address)


class StorageWriter(FileSystemWriter):  # type: ignore[misc]  # untyped base
    """DCP's writer of files that commits what it wrote.

    Pass it as `storage_writer` to `dcp.save` or `dcp.async_save`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        saved_by: Mapping[str, Any] | None = None,
        mesh: Any = None,
        **options: Any,
    ) -> None:
        """Write to *path*.

        Args:
            path: the checkpoint's directory, on a mount or as a `ckpt://` URL.
            saved_by: what is to be recorded beside versions, world size and step.
            mesh: the device mesh whose dimensions are the parallel layout.
            options: of DCP's `FileSystemWriter`.
        """
        # A stream that isn't a local file would be flushed by a sync of the whole machine.
        options.setdefault("sync_files", not is_url(os.fspath(path)))
        super().__init__("." if is_url(os.fspath(path)) else path, **options)
        self._saved_by = {"framework": "torch-dcp", "layout": layout_of(mesh), **(saved_by or {})}
        self._part: Part | None = None
        self.fs, self.path = _opened(path)

    def __getstate__(self) -> dict[str, Any]:
        # Where it goes on in another process that has begun nothing yet.
        return {**self.__dict__, "_part": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another save, perhaps to another directory, begins."""
        super().reset()
        if checkpoint_id:
            self.fs, self.path = _opened(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        """This rank begins."""
        rank, world_size = self.rank, None
        if dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
        if rank is None or world_size is None or rank >= world_size:
            rank = world_size = None
        part = Part(os.fspath(self.path), rank=rank, world_size=world_size)
        part.begin()
        self._part = part
        with giving_up(part):
            part.record({"step": step_of(part.address), **self._saved_by})
            return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """This rank writes its files."""
        with giving_up(self._part):
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        """All ranks' files are there (without collectives: this rank's): metadata, commit."""
        part = self._part
        with giving_up(part):
            super().finish(metadata, results)
            if part is not None:
                # DCP gathered the results of all ranks before this.
                part.commit(is_for_all=self.use_collectives)
        if part is not None:
            part.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL that the gateway serves."""
        if is_url(os.fspath(checkpoint_id)):
            return True
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))


class StorageReader(FileSystemReader):  # type: ignore[misc]  # untyped base
    """DCP's reader of files, of committed checkpoints only.

    Pass it as `storage_reader` to `dcp.load`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, wait_s: float = 60.0, **options: Any
    ) -> None:
        """Read from *path*.

        Args:
            path: the checkpoint's directory, on a mount or as a `ckpt://` URL.
            wait_s: how long to wait for one that is just being committed.
            options: of DCP's `FileSystemReader`.
        """
        super().__init__("." if is_url(os.fspath(path)) else path, **options)
        self._wait_s = wait_s
        self.fs, self.path = _opened(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another load, perhaps from another directory, begins."""
        super().reset()
        if checkpoint_id:
            self.fs, self.path = _opened(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Its metadata; RefusedError if it isn't committed, PendingError if not yet."""
        address = os.fspath(self.path)
        found = Part(address).state()
        if found["state"] == "open":
            msg = f"{address} is not committed: it is still being written"
            raise RefusedError(msg, subject=address, hint="ckptgate.latest(RUN) is the newest one")
        Part(address).wait(self._wait_s)
        return super().read_metadata(*args, **kwargs)
