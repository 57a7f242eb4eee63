"""The Hugging Face Trainer's checkpoints, committed by each rank: a `TrainerCallback`.

Protocol adapter only. Before the Trainer saves, each rank begins and records; `on_save` comes on
each rank after its last file (its RNG state; on rank 0 `trainer_state.json` and the removal of old
checkpoints), and commits. The Trainer's thread.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from typing import Any

from ckptgate_adapters.hooks.extras import lacks
from ckptgate_adapters.hooks.part import Part
from ckptgate_adapters.hooks.place import paths_only

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as exc:
    raise lacks("transformers", exc) from exc

__all__ = ["CommitCallback"]

_log = logging.getLogger(__name__)


class CommitCallback(TrainerCallback):  # type: ignore[misc]  # untyped base
    """Add it as the last of a Trainer's callbacks; `output_dir` is a directory on a mount."""

    def __init__(self, *, saved_by: Mapping[str, Any] | None = None) -> None:
        """Commit the Trainer's checkpoints.

        Args:
            saved_by: what is to be recorded beside versions, world size, step and layout.
        """
        self._saved_by = dict(saved_by or {})
        self._part: Part | None = None

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Refuse a URL before anything is trained."""
        paths_only(args.output_dir, "the Trainer")

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """The same, of a callback that was added later."""
        paths_only(args.output_dir, "the Trainer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin, if a save follows."""
        if control.should_save:
            self._begin(args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The same."""
        if control.should_save:
            self._begin(args, state)

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """This rank has written all of its files: commit them."""
        part = self._part
        if part is None or part.address != _path(args, state):
            # A save that nobody announced, as of the best model after an evaluation.
            part = Part(_path(args, state), rank=args.process_index, world_size=args.world_size)
            _record_late(part, self._record(args, state))
        self._part = None
        part.commit()
        part.release()

    def _begin(self, args: Any, state: Any) -> None:
        if self._part is not None:
            self._part.release()
        part = Part(_path(args, state), rank=args.process_index, world_size=args.world_size)
        part.begin()
        part.record(self._record(args, state))
        self._part = part

    def _record(self, args: Any, state: Any) -> dict[str, Any]:
        return {
            "framework": "transformers-trainer",
            "step": state.global_step,
            "epoch": state.epoch,
            "layout": {
                "mode": str(getattr(args.parallel_mode, "value", args.parallel_mode)),
                "data": args.world_size,
            },
            **self._saved_by,
        }


def _path(args: Any, state: Any) -> str:
    folder = os.path.abspath(args.output_dir)
    return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _record_late(part: Part, record: Mapping[str, Any]) -> None:
    """Record what a save that has ended was; too late only if it is decided already."""
    try:
        part.record(record)
    except OSError as exc:
        if exc.errno not in {errno.EPERM, errno.EBUSY}:
            raise
        _log.warning("saved-by-too-late path=%s error=%s", part.address, exc)
