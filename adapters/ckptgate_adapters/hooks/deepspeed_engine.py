"""DeepSpeed's checkpoints, committed by each rank: a `CheckpointEngine` around the engine's own.

Protocol adapter only. DeepSpeed calls `create` on every rank before it saves, and `commit` on every
rank after its last file: there each begins, and commits. Rank 0 writes `latest` first, which
DeepSpeed writes again right after: so the commit never comes without its pointer. A rank whose
writing fails gives the attempt up for all. DeepSpeed's thread.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ckptgate.errors import UsageError
from ckptgate_adapters.hooks.extras import lacks
from ckptgate_adapters.hooks.part import Part, giving_up
from ckptgate_adapters.hooks.place import paths_only

try:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointEngine as DeepSpeedCheckpointEngine,
    )
    from torch import distributed as dist
except ImportError as exc:
    raise lacks("deepspeed", exc) from exc

__all__ = ["CheckpointEngine", "attach"]

_LATEST: Final = "latest"


class CheckpointEngine(DeepSpeedCheckpointEngine):  # type: ignore[misc]  # untyped base
    """Has another checkpoint engine write, and says to the gateway what becomes of it."""

    def __init__(
        self,
        inner: Any,
        *,
        saved_by: Mapping[str, Any] | None = None,
        describe: Any = None,
    ) -> None:
        """Commit what *inner* writes.

        Args:
            inner: DeepSpeed's engine that writes; not a decoupled one.
            saved_by: what is to be recorded beside versions and world size.
            describe: called without arguments at each save, for more fields of the record.
        """
        if inner.is_decoupled():
            msg = "a decoupled checkpoint engine commits in the background, out of the hook's sight"
            raise UsageError(msg, hint="leave checkpoint.writer out of DeepSpeed's configuration")
        super().__init__()
        self._inner = inner
        self._saved_by = dict(saved_by or {})
        self._describe = describe or dict
        self._part: Part | None = None
        self._tag_dir = ""

    def create(self, info: Any) -> None:
        """A save begins; whether it is of a checkpoint tells the directory that is made next."""
        self._end()
        paths_only(info.save_dir, "DeepSpeed")
        self._tag_dir = os.path.join(info.save_dir, str(info.tag))
        self._inner.create(info)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory: with the checkpoint's own, every rank begins."""
        if self._part is None and path == self._tag_dir:
            try:
                self._begin(path)
            except OSError as exc:
                # DeepSpeed logs those of makedirs and goes on.
                msg = f"ckptgate: {exc}"
                raise RuntimeError(msg) from exc
            return
        # The first that a save does: a local directory named as a URL would be made.
        paths_only(path, "DeepSpeed")
        self._inner.makedirs(path, exist_ok=exist_ok)

    def _begin(self, path: str) -> None:
        rank = world_size = None
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        part = Part(path, rank=rank, world_size=world_size)
        part.begin()
        self._part = part
        with giving_up(part):
            part.record({"framework": "deepspeed", **self._describe(), **self._saved_by})

    def save(self, state_dict: Any, path: str) -> Any:
        """One file of the save."""
        with giving_up(self._part):
            return self._inner.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """One file of a checkpoint."""
        return self._inner.load(path, map_location=map_location)

    def commit(self, info: Any) -> Any:
        """All of this rank's files are written."""
        part = self._part
        with giving_up(part):
            result = self._inner.commit(info)
            if part is not None:
                if info.save_latest and part.rank in {None, 0}:
                    _point(info.save_dir, str(info.tag))
                part.commit()
        self._end()
        return result

    def _end(self) -> None:
        part, self._part = self._part, None
        self._tag_dir = ""
        if part is not None:
            part.release()

    def is_data_parallel_writer(self, dp_rank: int) -> Any:
        """Which ranks write the model's files."""
        return self._inner.is_data_parallel_writer(dp_rank)

    def preserves_storage_sharing(self) -> Any:
        """Whether tensors are to be copied before they are written."""
        return self._inner.preserves_storage_sharing()

    def cleanup(self) -> None:
        """The trainer ends."""
        self._end()
        self._inner.cleanup()


def attach(engine: Any, *, saved_by: Mapping[str, Any] | None = None) -> CheckpointEngine:
    """Have `engine.save_checkpoint` commit what it saves.

    Args:
        engine: what `deepspeed.initialize` gave; call it on every rank, before the first save.
        saved_by: what is to be recorded beside versions, world size, step and layout.
    """

    def describe() -> dict[str, Any]:
        return {"step": int(engine.global_steps), "layout": _layout(engine)}

    made = CheckpointEngine(engine.checkpoint_engine, saved_by=saved_by, describe=describe)
    engine.checkpoint_engine = made
    return made


def _layout(engine: Any) -> dict[str, int]:
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "data": int(engine.dp_world_size),
        "model": int(engine.mp_world_size),
    }


def _point(save_dir: str, tag: str) -> None:
    """Write `latest`, by a rename: where the gateway made it, it is a link to a directory."""
    temporary = os.path.join(save_dir, f".{_LATEST}-{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(tag)
    os.replace(temporary, os.path.join(save_dir, _LATEST))
