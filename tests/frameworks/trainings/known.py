"""The trainings by name; a framework is imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Final

from tests.frameworks.trainings import rules
from tests.frameworks.trainings.rules import Framework

__all__ = ["TITLES", "get", "needs", "rules_of"]

_HERE: Final = "tests.frameworks.trainings"

_KNOWN: Final[dict[str, tuple[str, tuple[object, ...], str]]] = {
    "dcp": ("dcp.Dcp", ("sync",), "torch"),
    "dcp-thread": ("dcp.Dcp", ("thread",), "torch"),
    "dcp-process": ("dcp.Dcp", ("process",), "torch"),
    "dcp-hook": ("dcp.Dcp", ("hook",), "torch"),
    "dcp-hook-thread": ("dcp.Dcp", ("hook-thread",), "torch"),
    "dcp-hf": ("dcp.DcpHf", (True,), "torch"),
    "dcp-hf-shards": ("dcp.DcpHf", (False,), "torch"),
    "zero1": ("zero.Zero", (1,), "deepspeed"),
    "zero2": ("zero.Zero", (2,), "deepspeed"),
    "zero3": ("zero.Zero", (3,), "deepspeed"),
    "zero2-hook": ("zero.Zero", (2, True), "deepspeed"),
    "trainer": ("trainer.Trainer", (), "transformers"),
    "trainer-hook": ("trainer.Trainer", (True,), "transformers"),
    "lightning": ("lit.Lit", ("file",), "lightning"),
    "lightning-link": ("lit.Lit", ("link",), "lightning"),
    "lightning-async": ("lit.Lit", ("async",), "lightning"),
    "lightning-hook": ("lit.Lit", ("hook",), "lightning"),
    "accelerate-hook": ("accelerated.Accelerated", (True,), "accelerate"),
    "accelerate": ("accelerated.Accelerated", (), "accelerate"),
    "orbax": ("orbax_steps.Orbax", (False,), "orbax.checkpoint"),
    "orbax-file": ("orbax_steps.Orbax", (True,), "orbax.checkpoint"),
    "megatron": ("megatron_dist.Megatron", (), "megatron.core"),
    "torchsnapshot": ("snapshots.Snapshot", (), "torchsnapshot"),
}
"""Name -> class, its arguments, and the package that it needs; the rules of `X` are `XRules`."""

TITLES: Final = {
    "dcp": "torch DCP, sync",
    "dcp-thread": "torch DCP, async in a thread",
    "dcp-process": "torch DCP, async in a process",
    "dcp-hook": "torch DCP, with the hook",
    "dcp-hook-thread": "torch DCP, async in a thread, with the hook",
    "dcp-hf": "torch DCP, HF writer, consolidated",
    "dcp-hf-shards": "torch DCP, HF writer, shards of each rank",
    "zero1": "DeepSpeed ZeRO 1",
    "zero2": "DeepSpeed ZeRO 2",
    "zero3": "DeepSpeed ZeRO 3",
    "zero2-hook": "DeepSpeed ZeRO 2, with the hook",
    "trainer": "Hugging Face Trainer, DDP",
    "trainer-hook": "Hugging Face Trainer, DDP, with the hook",
    "lightning": "Lightning, files",
    "lightning-link": 'Lightning, `save_last="link"`',
    "lightning-async": "Lightning, AsyncCheckpointIO",
    "lightning-hook": "Lightning, with the hook",
    "accelerate": "accelerate `save_state`",
    "accelerate-hook": "accelerate `save_state`, with the hook",
    "orbax": "Orbax, rename",
    "orbax-file": "Orbax, commit file",
    "megatron": "Megatron-core dist_checkpointing",
    "torchsnapshot": "torchsnapshot",
}
"""As people call them, in the table's order."""


def get(name: str) -> Framework:
    """The training with a framework, which is imported by this."""
    path, words, _ = _KNOWN[name]
    module, _, kind = path.partition(".")
    made: Framework = getattr(importlib.import_module(f"{_HERE}.{module}"), kind)(*words)
    return made


def rules_of(name: str) -> rules.Rules:
    """Its rules alone."""
    path, words, _ = _KNOWN[name]
    made: rules.Rules = getattr(rules, path.partition(".")[2] + "Rules")(*words)
    return made


def needs(name: str) -> str:
    """The package that it needs."""
    return _KNOWN[name][2]
