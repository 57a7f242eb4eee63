"""`from ckptgate.deepspeed import attach`: `engine.save_checkpoint` commits what it saves."""

from __future__ import annotations

from ckptgate_adapters.hooks.deepspeed_engine import CheckpointEngine, attach

__all__ = ["CheckpointEngine", "attach"]
