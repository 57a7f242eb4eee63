"""Megatron-LM and Megatron-core: `iter_<step>/` as a DCP with `metadata.json`, or `mp_rank_*/`.

Owns what of either must be there. The DCP's own metadata is no event here: `metadata.json` follows
it, and the tracker follows that, after barriers. Every event is early all the same, as a plain
close may be one of several. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar, Final

from ckptgate.formats.base import CommitEvent, FileOp, Inventory, Part, Tree
from ckptgate.formats.dcp import METADATA, TRACKER, read_metadata
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.formats.torch_pickle import number, read_torch_pickle, value_of
from ckptgate.model.closure import ExpectedSet

__all__ = ["Megatron"]

CONFIG: Final = "metadata.json"
_COMMON: Final = "common_state"
"""What new releases store as a part of the DCP, the others beside it."""
_NAME: Final = re.compile(r"iter_[0-9]{7,}")
_DCP: Final = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")
_LEGACY: Final = re.compile(
    r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?/(model_optim_rng|distrib_optim)\.pt"
)
_RANKS_MAX: Final = 100_000
_HELD: Final[tuple[tuple[str, Part], ...]] = (
    ("opt_param_scheduler", "scheduler"),
    ("rng_state", "rng"),
    ("optimizer", "optimizer"),
)


class Megatron(Layout):
    """The format as `base.Format`."""

    name = "megatron"
    parts: ClassVar[PartNames] = (
        ("optimizer", re.compile(r"mp_rank_\w+/distrib_optim\.pt")),
        ("model", re.compile(r"mp_rank_\w+/model_optim_rng\.pt")),
        ("data", re.compile(r"train_dataloader_dprank[0-9]+\.pt")),
    )

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """A DCP in a directory named `iter_*` or with `metadata.json`, or a rank's directory."""
        if any(_LEGACY.fullmatch(path) for path in paths):
            return True
        is_dcp = any(_DCP.fullmatch(path) for path in paths)
        return is_dcp and (CONFIG in paths or bool(_NAME.fullmatch(name)))

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """`metadata.json` is written: what remains is to note its name in the tracker."""
        del op, old
        return CommitEvent(name="megatron-metadata", is_early=True) if path == CONFIG else None

    def pointer_event(self, pointer: str) -> CommitEvent | None:
        """The tracker is written."""
        return CommitEvent(name="tracker", is_early=True) if pointer == TRACKER else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """`metadata.json` beside Megatron's own DCP, and every directory of model-parallel ranks.

        Raises:
            IntegrityError: the DCP's metadata is torn or hostile.
        """
        sizes = tree.files()
        files: dict[str, int] = {}
        said = read_metadata(tree.open(METADATA), METADATA) if METADATA in sizes else None
        # A plain DCP that is only called iter_* has none, and no plans of all ranks either.
        is_own = said is not None and (said.is_megatron or said.world_size is not None)
        if is_own or CONFIG in sizes:
            files[CONFIG] = 1
        if said is not None and is_own and not any(_COMMON in key for key in said.keys):
            files["common.pt"] = 1
        files.update((path, 1) for path in _legacy(tree))
        return ExpectedSet(
            format_name=self.name, files=files, source=CONFIG if CONFIG in sizes else ""
        )

    def inventory(self, tree: Tree) -> Inventory:
        """By names, and for the old layout by what rank 0's file has in it."""
        named = super().inventory(tree)
        found = dict(named.parts)
        paths = [path for path in found.get("model", ()) if _LEGACY.fullmatch(path)]
        step = None
        if paths:
            saved = read_torch_pickle(tree.open(paths[0]), paths[0])
            step = number(value_of(saved, "iteration"), 1 << 40)
            for key, part in _HELD:
                if value_of(saved, key) is not None and part not in found:
                    found[part] = tuple(paths)
        return replace(named, parts=found, step=step)


def _legacy(tree: Tree) -> list[str]:
    """Files of the old layout: one directory for each tensor, pipeline and expert rank."""
    found = [match for path in sorted(tree.files()) if (match := _LEGACY.fullmatch(path))]
    if not found:
        return []
    first = next((match[0] for match in found if match[4] == "model_optim_rng"), "")
    saved = read_torch_pickle(tree.open(first), first, _is_arguments) if first else None
    arguments = value_of(saved, "args")
    sizes: list[int | None] = [
        number(value_of(arguments, f"{kind}_model_parallel_size"), _RANKS_MAX)
        for kind in ("tensor", "pipeline", "expert")
    ]
    counts: list[int | None] = []
    for at, said in enumerate(sizes, start=1):
        seen = [int(match[at]) for match in found if match[at] is not None]
        counts.append((said or max(seen) + 1) if seen else None)
    names = [""]
    for count, width in zip(counts, (2, 3, 3), strict=True):
        if count is not None and count * len(names) <= _RANKS_MAX:
            names = [f"{head}_{rank:0{width}d}" for head in names for rank in range(count)]
    kinds = sorted({"model_optim_rng", *(match[4] for match in found)})
    return [f"mp_rank{name}/{kind}.pt" for name in names for kind in kinds]


def _is_arguments(name: str) -> bool:
    return name == "argparse.Namespace"
