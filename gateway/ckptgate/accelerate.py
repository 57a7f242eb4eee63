"""`from ckptgate.accelerate import attach`: `accelerator.save_state` commits what it saves."""

from __future__ import annotations

from ckptgate_adapters.hooks.accelerate_state import attach

__all__ = ["attach"]
