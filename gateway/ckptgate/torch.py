"""`from ckptgate.torch import StorageWriter, StorageReader`: for `torch.distributed.checkpoint`."""

from __future__ import annotations

from ckptgate_adapters.hooks.torch_dcp import StorageReader, StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
