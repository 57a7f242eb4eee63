"""`from ckptgate.transformers import CommitCallback`: one of a Trainer's `callbacks`."""

from __future__ import annotations

from ckptgate_adapters.hooks.hf_trainer import CommitCallback

__all__ = ["CommitCallback"]
