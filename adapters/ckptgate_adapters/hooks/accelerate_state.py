"""accelerate's `save_state`, committed by each rank: its pre-hook, and what commits at the end.

Protocol adapter only. accelerate has hooks before it writes and none after: so `save_state` of the
accelerator is wrapped, which knows when this rank's last file is written. Who names the directory
begins and records before the save; where accelerate names it the pre-hook does, which is told the
name (accelerate insists that it isn't there before). The caller's thread.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ckptgate_adapters.hooks.extras import lacks
from ckptgate_adapters.hooks.part import Part, giving_up
from ckptgate_adapters.hooks.place import paths_only, step_of

try:
    from accelerate.utils import DistributedType
except ImportError as exc:
    raise lacks("accelerate", exc) from exc

__all__ = ["attach"]

_SIZES: Final = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def attach(accelerator: Any, *, saved_by: Mapping[str, Any] | None = None) -> None:
    """Have `accelerator.save_state` commit what it saves.

    Args:
        accelerator: call it on every rank, before the first save.
        saved_by: what is to be recorded beside versions, world size, step and layout.
    """
    saver = _Saver(accelerator, dict(saved_by or {}))
    accelerator.register_save_state_pre_hook(saver.told)
    accelerator.save_state = saver.save_state


class _Saver:
    """One accelerator's saves, one after the other."""

    def __init__(self, accelerator: Any, saved_by: Mapping[str, Any]) -> None:
        self._accelerator = accelerator
        self._save = accelerator.save_state
        self._saved_by = saved_by
        self._part: Part | None = None

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's own."""
        is_ours = not self._accelerator.project_configuration.automatic_checkpoint_naming
        # It makes a local directory of that name first.
        paths_only((output_dir if is_ours else self._accelerator.project_dir) or "", "accelerate")
        if is_ours and output_dir is not None:
            # The models of some strategies are written before the pre-hook.
            self._begin(output_dir)
        try:
            found = self._save(output_dir, *args, **kwargs)
            if self._part is not None:
                self._part.commit()
        except BaseException:
            # An interrupt or exit leaves the part as unfinished as an error does.
            with giving_up(self._part):
                raise
        finally:
            part, self._part = self._part, None
            if part is not None:
                part.release()
        return found

    def told(self, models: Any, weights: Any, output_dir: Any) -> None:
        """The pre-hook."""
        del models, weights
        if self._part is None:
            self._begin(output_dir)

    def _begin(self, output_dir: Any) -> None:
        accelerator = self._accelerator
        part = Part(
            output_dir, rank=accelerator.process_index, world_size=accelerator.num_processes
        )
        part.begin()
        self._part = part
        with giving_up(part):
            part.record({
                "framework": "accelerate",
                "step": step_of(part.address),
                "layout": _layout(accelerator),
                **self._saved_by,
            })  # fmt: skip


def _layout(accelerator: Any) -> dict[str, Any]:
    kind = accelerator.distributed_type
    found: dict[str, Any] = {"type": kind.value if isinstance(kind, DistributedType) else str(kind)}
    config = getattr(accelerator, "parallelism_config", None)
    for name in _SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int):
            found[name.removesuffix("_size")] = size
    return found
