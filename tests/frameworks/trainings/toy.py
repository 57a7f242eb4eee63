"""The model that all PyTorch trainings train: small, and the same whoever trains it."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["alone", "batch", "joined", "model"]

WIDTH = 16


def model() -> nn.Sequential:
    """Two layers, the same at each start."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def batch(step: int, rank: int) -> torch.Tensor:
    """What a rank learns from at that step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def joined() -> None:
    """The ranks know each other; who waits for a dead one for half a minute gives up."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))


def alone() -> None:
    """A reader that wants a group of one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
