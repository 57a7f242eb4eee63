"""`from ckptgate.lightning import CheckpointIO`: one of a Trainer's `plugins`."""

from __future__ import annotations

from ckptgate_adapters.hooks.lightning_io import CheckpointIO

__all__ = ["CheckpointIO"]
