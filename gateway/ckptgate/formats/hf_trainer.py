"""The Hugging Face Trainer: `checkpoint-<step>/` with `trainer_state.json`.

Owns the rule that `trainer_state.json` says nothing of other ranks: rank 0 writes it last of its
own, without waiting for theirs. So every rank's random state must be there, besides what the
arguments (`training_args.bin`) say was to be saved. DeepSpeed's, FSDP's and sharded weights in it
are their formats' matter. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import msgspec

from ckptgate.formats.base import CommitEvent, FileOp, Inventory, Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.formats.texts import read_json
from ckptgate.formats.torch_pickle import number, read_torch_pickle, value_of
from ckptgate.model.closure import ExpectedSet

__all__ = ["HfTrainer"]

STATE: Final = "trainer_state.json"
_STATES: Final = frozenset({"optimizer.pt", "optimizer.bin", "scheduler.pt"})
_ARGUMENTS: Final = "training_args.bin"
_UNFINISHED: Final = "checkpoint-is-incomplete.txt"
_ELSEWHERE: Final = re.compile(r"optimizer\.bin|rank[0-9]+-of-[0-9]+-optimizer\.pt")
_NAME: Final = re.compile(r"checkpoint-[0-9]+")
_RANDOM: Final = re.compile(r"rng_state(?:_(?P<rank>[0-9]+))?\.pth")
_WEIGHTS: Final = re.compile(
    r"(?:model|adapter_model|pytorch_model|tf_model|flax_model)\S*\.(?:safetensors|bin|h5|msgpack)"
)
# Whatever else there is may hold weights under a name of the user's own.
_BESIDE: Final = re.compile(
    r"trainer_state\.json|training_args\.bin|checkpoint-is-incomplete\.txt|(?:optimizer|scheduler|"
    r"scaler)\.(?:pt|bin)|rng_state\S*\.pth|[\w.-]*\.(?:json|txt|jinja|model|md|py|yaml|tiktoken)"
)


class _State(msgspec.Struct, frozen=True):
    global_step: int = -1


class HfTrainer(Layout):
    """The format as `base.Format`."""

    name = "hf-trainer"
    parts: ClassVar[PartNames] = (
        ("optimizer", re.compile(r"optimizer(?:\.pt|\.bin|_[0-9]+/.*)")),
        ("scheduler", re.compile(r"scheduler\.pt")),
        ("scaler", re.compile(r"scaler\.pt")),
        ("rng", _RANDOM),
        ("trainer", re.compile(r"trainer_state\.json")),
        ("model", re.compile(rf"{_WEIGHTS.pattern}|pytorch_model_fsdp_[0-9]+/.*")),
    )

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """Its state, or what other ranks and it write before in a directory of its naming."""
        if STATE in paths:
            return True
        is_called_so = bool(_NAME.fullmatch(name))
        return is_called_so and any(path == _ARGUMENTS or _RANDOM.fullmatch(path) for path in paths)

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """`trainer_state.json` is written."""
        del op, old
        return CommitEvent(name="hf-trainer-state", is_early=True) if path == STATE else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """The state, weights of some kind, and what the arguments say is saved beside them."""
        sizes = tree.files()
        files = {STATE: 1}
        files.update((path, 1) for path in sizes if _RANDOM.fullmatch(path))
        if not any("/" in path or not _BESIDE.fullmatch(path) for path in sizes):
            files["model.safetensors"] = 1
        files.update((path, 1) for path in sizes if _WEIGHTS.fullmatch(path))
        arguments = _arguments(tree)
        ranks = [int(match[1] or -1) for path in sizes if (match := _RANDOM.fullmatch(path))]
        is_numbered = max(ranks, default=-1) >= 0
        if arguments.has_state:
            # DeepSpeed keeps the scheduler too.
            is_deepspeed = any(path.startswith("global_step") for path in sizes)
            files["latest" if is_deepspeed else "scheduler.pt"] = 1
            if not _has_own_optimizer(sizes):
                files["optimizer.pt"] = 1
            is_numbered = is_numbered or (not ranks and (arguments.world_size or 1) > 1)
            if not ranks and not is_numbered:
                files["rng_state.pth"] = 1
        return ExpectedSet(
            format_name=self.name,
            files=files,
            world_size=arguments.world_size,
            rank_files=("rng_state_{rank}.pth",) if is_numbered else (),
            in_progress=frozenset({_UNFINISHED}),
            edited=frozenset({STATE}),
            source=STATE,
        )

    def inventory(self, tree: Tree) -> Inventory:
        """By names, and the step from the state."""
        named = super().inventory(tree)
        step = None
        if STATE in tree.files():
            found = read_json(tree.open(STATE), STATE, _State).global_step
            step = found if found >= 0 else None
        return replace(named, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """What the training's arguments say of the save.

    Attributes:
        has_state: optimizer, scheduler and random state were to be saved too.
        world_size: how many ranks there are, None where unknown.
    """

    has_state: bool
    world_size: int | None


def _arguments(tree: Tree) -> _Arguments:
    sizes = tree.files()
    saved = None
    if _ARGUMENTS in sizes:
        saved = read_torch_pickle(tree.open(_ARGUMENTS), _ARGUMENTS, _is_arguments)
    is_model_only = value_of(saved, "save_only_model")
    has_some = any(path in _STATES or _RANDOM.fullmatch(path) for path in sizes)
    return _Arguments(
        has_state=not is_model_only if isinstance(is_model_only, bool) else has_some,
        world_size=number(value_of(value_of(saved, "distributed_state"), "num_processes")),
    )


def _has_own_optimizer(paths: Collection[str]) -> bool:
    """Whether DeepSpeed, FSDP or XLA keep the optimizer elsewhere."""
    return any("/" in path or _ELSEWHERE.fullmatch(path) for path in paths)


def _is_arguments(name: str) -> bool:
    return name.endswith(("Arguments", "Config", "PartialState"))
