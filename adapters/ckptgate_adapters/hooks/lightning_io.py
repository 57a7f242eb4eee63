"""Lightning's checkpoints, committed: a `CheckpointIO` around another one.

Protocol adapter only. Lightning writes a checkpoint as one file, by its rank 0 alone. Here that
file is put into a directory of its name, so that it is a checkpoint like any other: begun, recorded
and committed for all ranks by who writes it, given up if the writing fails. Any thread, as
`AsyncCheckpointIO` around it has one of its own.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ckptgate.errors import UsageError
from ckptgate_adapters.hooks.extras import lacks
from ckptgate_adapters.hooks.part import Part, giving_up
from ckptgate_adapters.hooks.place import place_of

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as LightningIO
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from torch import distributed as dist
except ImportError as exc:
    raise lacks("lightning", exc) from exc

__all__ = ["FILE_NAME", "CheckpointIO"]

FILE_NAME: Final = "checkpoint.ckpt"
"""Lightning's file in the checkpoint's directory."""


class CheckpointIO(LightningIO):  # type: ignore[misc]  # untyped base
    """Pass it as one of a Trainer's `plugins`, alone or as `AsyncCheckpointIO(CheckpointIO())`."""

    def __init__(
        self, checkpoint_io: Any = None, *, saved_by: Mapping[str, Any] | None = None
    ) -> None:
        """Commit what another `CheckpointIO` writes.

        Args:
            checkpoint_io: that one; Lightning's own by default.
            saved_by: what is to be recorded beside versions, world size, step and epoch.
        """
        self._io = checkpoint_io or TorchCheckpointIO()
        self._saved_by = dict(saved_by or {})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write the checkpoint as a directory of this path, and commit it."""
        part = Part(path)
        _clear(part)
        part.begin()
        with giving_up(part):
            part.record({**_known(checkpoint), **self._saved_by})
            self._io.save_checkpoint(checkpoint, f"{part.address}/{FILE_NAME}", storage_options)
            part.commit()
        part.release()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What is in the checkpoint of this path; one that is a file is read as that."""
        text = os.fspath(path)
        if place_of(text).has(FILE_NAME):
            text = f"{text.rstrip('/')}/{FILE_NAME}"
        found: dict[str, Any] = self._io.load_checkpoint(text, *args, **kwargs)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it: of a committed one the gateway keeps what is still needed."""
        place_of(path).remove()

    def teardown(self) -> None:
        """The trainer ends."""
        self._io.teardown()


def _clear(part: Part) -> None:
    """Have nothing in the place of the new checkpoint: it is saved as a whole, by one process."""
    try:
        part.state()
    except FileNotFoundError:
        return
    except UsageError:
        # Where nothing can be a checkpoint `begin` says so.
        return
    place_of(part.address).remove()


def _known(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's own state says of the saving."""
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    return {
        "framework": "lightning",
        "world_size": world_size,
        "step": checkpoint.get("global_step"),
        "epoch": checkpoint.get("epoch"),
    }
