"""DeepSpeed: a tag's directory, such as `global_step10`, and `latest` beside it.

Owns the rule that `latest` says nothing of other ranks (rank 0 writes it before they are done), and
what the ranks' files say there must be: for every model-parallel rank a file of the model, with
ZeRO one of the optimizer for every partition, with ZeRO-3 of the model too; experts and pipeline
layers. A tag's directory is also found inside of other checkpoints. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, cast

from ckptgate.formats.base import CommitEvent, Inventory, Tree
from ckptgate.formats.inert import Inert, Pairs
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames, below, in_folders
from ckptgate.formats.texts import read_text
from ckptgate.formats.torch_pickle import number, read_torch_pickle, value_of
from ckptgate.model.closure import ExpectedSet

__all__ = ["DeepSpeed"]

_MODEL: Final = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]{2,})_model_states\.pt")
_OPTIMIZER: Final = re.compile(
    r"((?:bf16_)?zero_pp|expp)_rank_([0-9]+)_mp_rank_([0-9]{2,})_optim_states\.pt"
)
_EXPERT: Final = re.compile(r"layer_([0-9]+)_expert_([0-9]+)_mp_rank_([0-9]{2,})_model_states\.pt")
_LAYER: Final = re.compile(r"layer_([0-9]{2,})(?:-model_([0-9]{2,}))?-model_states\.pt")
_OWN: Final = re.compile(
    "|".join(re.sub(r"\((?!\?)", "(?:", p.pattern) for p in (_MODEL, _OPTIMIZER, _EXPERT, _LAYER))
)
_LATEST: Final = re.compile(r"latest")
_LAYER_OF: Final = re.compile(r"([0-9]+)\..+")
_TAG_BYTES_MAX: Final = 4096
_RANKS_MAX: Final = 100_000


class DeepSpeed(Layout):
    """The format as `base.Format`."""

    name = "deepspeed"
    own: ClassVar[re.Pattern[str]] = _OWN
    parts: ClassVar[PartNames] = (
        ("optimizer", re.compile(rf"(?:.*/)?(?:{_OPTIMIZER.pattern})")),
        ("model", re.compile(rf"(?:.*/)?(?:{_OWN.pattern})")),
    )

    def pointer_event(self, pointer: str) -> CommitEvent | None:
        """`latest` is written, by rank 0."""
        return CommitEvent(name="deepspeed-latest", is_early=True) if pointer == "latest" else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """What every tag's directory must have, and the one that a `latest` in here names.

        Raises:
            IntegrityError: a `latest` is damaged.
        """
        sizes = tree.files()
        files: dict[str, int] = {}
        sources: list[str] = []
        folders = in_folders(sizes, _OWN)
        for folder, names in folders.items():
            tag = _Tag(tree=tree, folder=folder, names=frozenset(names))
            files.update((below(folder, name), 1) for name in tag.expected())
            sources += [below(folder, name) for name in tag.model_files()[:1]]
        for folder in in_folders(sizes, _LATEST):
            path = below(folder, "latest")
            tag_name = _tag_name(tree, path)
            if tag_name and below(folder, tag_name) not in folders:
                files[below(below(folder, tag_name), "mp_rank_00_model_states.pt")] = 1
                sources.append(path)
        return ExpectedSet(format_name=self.name, files=files, source=", ".join(sources[:3]))

    def inventory(self, tree: Tree) -> Inventory:
        """By names, and by what the first rank's model file has in it."""
        named = super().inventory(tree)
        found = dict(named.parts)
        step = None
        for folder, names in in_folders(tree.files(), _OWN).items():
            tag = _Tag(tree=tree, folder=folder, names=frozenset(names))
            path = next(iter(tag.model_files()), "")
            saved = tag.read(path) if path else None
            step = number(value_of(saved, "global_steps"), 1 << 40) or step
            if value_of(saved, "lr_scheduler") is not None:
                found["scheduler"] = (below(folder, path),)
            if value_of(saved, "optimizer") is not None:
                found.setdefault("optimizer", (below(folder, path),))
        return replace(named, parts=found, step=step)


def _tag_name(tree: Tree, path: str) -> str:
    """The tag that a `latest` names, "" where it is something else."""
    view = tree.open(path)
    if view.size > _TAG_BYTES_MAX:
        return ""
    text = read_text(view, path).decode("utf-8", "replace").strip()
    return text if re.fullmatch(r"global_step[0-9]+", text) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tag:
    """The directory of a tag."""

    tree: Tree
    folder: str
    names: frozenset[str]

    def read(self, name: str) -> object:
        """What is in one of its files beside the tensors."""
        path = below(self.folder, name)
        return read_torch_pickle(self.tree.open(path), path, _is_dict)

    def model_files(self) -> list[str]:
        """Of the model-parallel ranks, those that are there."""
        return sorted(name for name in self.names if _MODEL.fullmatch(name))

    def expected(self) -> Iterator[str]:
        """Names that must be there."""
        models = self.model_files()
        saved = self.read(models[0]) if models else None
        ranks = [int(match[1]) for name in self.names if (match := _MP.search(name))]
        mp_size = number(value_of(saved, "mp_world_size"), _RANKS_MAX) or max(ranks, default=0) + 1
        dp_size = number(value_of(saved, "dp_world_size"), _RANKS_MAX)
        prefix, partitions = self._partitions(saved, dp_size)
        is_split = any(name.startswith("zero_pp_rank_") for name in models)
        for mp_rank in range(mp_size):
            if is_split:
                for dp_rank in range(partitions):
                    yield f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt"
            else:
                yield f"mp_rank_{mp_rank:02d}_model_states.pt"
            if prefix:
                for dp_rank in range(partitions):
                    yield f"{prefix}_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
        yield from self._experts(saved, mp_size)
        yield from self._layers(models)

    def _partitions(self, saved: object, dp_size: int | None) -> tuple[str, int]:
        """Prefix of the partitions' names ("" for none), and how many they are."""
        found = sorted(
            (int(match[2]), match[1], name)
            for name in self.names
            if (match := _OPTIMIZER.fullmatch(name)) and match[1] != "expp"
        )
        if not found:
            # Only with ZeRO are the shapes of the parameters saved.
            has_some = value_of(saved, "param_shapes") is not None
            config = value_of(value_of(saved, "ds_config"), "bf16")
            prefix = "bf16_zero_pp" if value_of(config, "enabled") is True else "zero_pp"
            return (prefix, dp_size or 1) if has_some else ("", dp_size or 1)
        state = value_of(self.read(found[0][2]), "optimizer_state_dict")
        said = value_of(state, "partition_count")
        counts = cast("list[object]", said) if isinstance(said, list) else [said]
        numbers = [count for count in (number(item, _RANKS_MAX) for item in counts) if count]
        return found[0][1], max(numbers, default=0) or dp_size or found[-1][0] + 1

    def _experts(self, saved: object, mp_size: int) -> Iterator[str]:
        """Each layer's experts, and their optimizers."""
        found = [match for name in self.names if (match := _EXPERT.fullmatch(name))]
        said = value_of(saved, "num_experts")
        counts = cast("list[object]", said) if isinstance(said, list) else []
        layers = range(len(counts)) if found else ()
        for layer in sorted({*layers, *(int(match[1]) for match in found)}):
            seen = max((int(m[2]) for m in found if int(m[1]) == layer), default=-1) + 1
            known = number(counts[layer], _RANKS_MAX) if layer < len(counts) else None
            for expert in range(known or seen):
                for mp_rank in range(mp_size):
                    yield f"layer_{layer}_expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt"
        optimizers = [match for name in self.names if (match := _OPTIMIZER.fullmatch(name))]
        seen = max((int(m[2]) for m in optimizers if m[1] == "expp"), default=-1) + 1
        for rank in range(seen):
            for mp_rank in range(mp_size):
                yield f"expp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt"

    def _layers(self, models: list[str]) -> Iterator[str]:
        """A pipeline's layers: one without parameters has no file."""
        found = [match for name in self.names if (match := _LAYER.fullmatch(name))]
        if not found:
            return
        layers = {int(match[1]) for match in found}
        for name in models:
            layers.update(_layers_with_parameters(value_of(self.read(name), "param_shapes")))
        slices = [int(match[2]) for match in found if match[2] is not None]
        for layer in sorted(layers):
            if not slices:
                yield f"layer_{layer:02d}-model_states.pt"
            for rank in range(max(slices, default=-1) + 1):
                yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


_MP: Final = re.compile(r"mp_rank_([0-9]{2,})_")


def _layers_with_parameters(shapes: object) -> Iterator[int]:
    groups = cast("list[object]", shapes) if isinstance(shapes, list) else [shapes]
    for group in groups:
        held = group.items if isinstance(group, Inert) else group
        for key, _ in held if isinstance(held, Pairs) else ():
            if isinstance(key, str) and (match := _LAYER_OF.fullmatch(key)):
                yield int(match[1])


def _is_dict(name: str) -> bool:
    return name == "collections.OrderedDict"
