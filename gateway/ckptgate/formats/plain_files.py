"""Files of no known framework: what a torch.save or safetensors file holds, by its own words.

Owns what the top-level keys of a saved dict, or a file's name, say of the training state. Of files
that differ by numbers only (one of each rank) the first speaks for all. Nothing is loaded or
executed; a file that can't be read so says nothing. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from ckptgate.formats.base import Inventory, Part, Tree
from ckptgate.formats.inert import Inert, Pairs
from ckptgate.formats.torch_pickle import number, read_torch_pickle, value_of

__all__ = ["inventory"]

FAMILIES_MAX: Final = 64
"""More kinds of files are not looked into."""

_TORCH: Final = (".pt", ".pth", ".ckpt", ".bin")
_NUMBER: Final = re.compile(r"[0-9]+")
_RANK: Final = re.compile(r"(?:.*[^a-z])?rank[-_]?([0-9]{1,7})(?:[^0-9].*)?")
# The first that fits.
_WORDS: Final[tuple[tuple[Part, re.Pattern[str]], ...]] = (
    ("optimizer", re.compile(r".*optim.*|param_groups")),
    ("scheduler", re.compile(r".*sched.*")),
    ("scaler", re.compile(r".*scaler.*")),
    ("rng", re.compile(r"(?:.*_)?(?:rng|random)(?:_.*)?")),
    ("data", re.compile(r".*(?:data_?loader|sampler|dataset).*")),
    ("trainer", re.compile(r"(?:global_)?steps?|epoch|iteration|loops|train(?:er)?_.*")),
    ("model", re.compile(r".*(?:model|module|state_dict|weight|bias).*")),
)
_STEPS: Final = ("global_step", "step", "iteration")
_STEP_MAX: Final = 1 << 40


def inventory(tree: Tree) -> Inventory:
    """What the files say that they hold, and whose they are by their names."""
    found: dict[Part, set[str]] = {}
    step: int | None = None
    families: dict[str, list[str]] = {}
    for path in sorted(tree.files()):
        families.setdefault(_NUMBER.sub("0", path), []).append(path)
    for paths in list(families.values())[:FAMILIES_MAX]:
        parts, said = _of_file(tree, paths[0])
        step = said if step is None else step
        for part in parts:
            found.setdefault(part, set()).update(paths)
    return Inventory(
        parts={part: tuple(sorted(paths)) for part, paths in found.items()},
        ranks={part: ranks for part, paths in found.items() if (ranks := _ranks(paths))},
        step=step,
    )


def _of_file(tree: Tree, path: str) -> tuple[set[Part], int | None]:
    """The parts that a file holds, and the step."""
    name = path.rpartition("/")[2].lower()
    saved: object = None
    if name.endswith(_TORCH):
        saved = read_torch_pickle(tree.open(path), path, _is_dict)
    parts: set[Part] = _parts(_keys(saved))
    if not parts and name.endswith((*_TORCH, ".safetensors")):
        parts = _parts([name.partition(".")[0]])
        if not parts and name.endswith(".safetensors"):
            parts = {"model"}
    steps = (number(value_of(saved, key), _STEP_MAX) for key in _STEPS)
    return parts, next((step for step in steps if step is not None), None)


def _keys(saved: object) -> Iterator[str]:
    held = saved.items if isinstance(saved, Inert) else saved
    for key, _ in held if isinstance(held, Pairs) else ():
        if isinstance(key, str):
            yield key.lower()


def _parts(words: Iterable[str]) -> set[Part]:
    found: set[Part] = set()
    for word in words:
        for part, fits in _WORDS:
            if fits.fullmatch(word):
                found.add(part)
                break
    return found


def _ranks(paths: Iterable[str]) -> tuple[int, ...]:
    """Whose files these are; () if not each names a rank."""
    matches = [_RANK.fullmatch(path.lower()) for path in paths]
    return tuple(sorted({int(match[1]) for match in matches if match})) if all(matches) else ()


def _is_dict(name: str) -> bool:
    return name == "collections.OrderedDict"
