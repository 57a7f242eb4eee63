"""What file names alone tell: folders, numbered families, and which state a file holds.

Pure; any thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from ckptgate.formats.base import Part

__all__ = [
    "FAMILY_MAX",
    "PartNames",
    "below",
    "family",
    "gaps",
    "in_folders",
    "parts_of",
    "ranks_of",
]

PartNames: TypeAlias = "tuple[tuple[Part, re.Pattern[str]], ...]"
"""Which part of the training state files hold, by a pattern that their whole path matches.

Where each rank has a file of its own, a group `rank` is its number (none: there is one rank).
"""

FAMILY_MAX: Final = 65_536
"""A name that speaks of more files than this is not taken at its word."""

_ONE_OF: Final = re.compile(r"(?<=-)([0-9]+)-of-([0-9]+)")


def below(folder: str, name: str) -> str:
    """*name* in *folder*, "" being the top."""
    return f"{folder}/{name}" if folder else name


def in_folders(
    paths: Iterable[str], pattern: re.Pattern[str]
) -> dict[str, dict[str, re.Match[str]]]:
    """Folder -> name -> match, of the files whose last component matches *pattern* in full."""
    found: dict[str, dict[str, re.Match[str]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        match = pattern.fullmatch(name)
        if match is not None:
            found.setdefault(folder, {})[name] = match
    return found


def family(path: str) -> Iterator[str]:
    """All names that *path* with its `-R-of-N` speaks of, itself among them."""
    sizes = [int(match[2]) for match in _ONE_OF.finditer(path)]
    count = 1
    for size in sizes:
        count *= size
    if not sizes or not 0 < count <= FAMILY_MAX:
        yield path
        return
    parts = _ONE_OF.split(path)[::3]
    for ranks in itertools.product(*(range(size) for size in sizes)):
        numbered = (f"{rank}-of-{size}" for rank, size in zip(ranks, sizes, strict=True))
        yield "".join(text for pair in zip(parts, [*numbered, ""], strict=True) for text in pair)


def gaps(paths: Collection[str], head: str, tail: str) -> Iterator[str]:
    """The lower members of a family `head[_N]tail` whose highest member is there.

    The first of them has no number: `optimizer.bin`, `optimizer_1.bin`, ...
    """
    pattern = re.compile(f"{re.escape(head)}(?:_([0-9]{{1,4}}))?{re.escape(tail)}")
    matches = [match for path in paths if (match := pattern.fullmatch(path))]
    for number in range(max((int(match[1] or 0) for match in matches), default=-1) + 1):
        yield f"{head}_{number}{tail}" if number else f"{head}{tail}"


def parts_of(paths: Iterable[str], names: PartNames) -> Mapping[Part, tuple[str, ...]]:
    """Which part of the training state lies in which of these files."""
    found: dict[Part, list[str]] = {}
    for path in sorted(paths):
        for part, pattern in names:
            if pattern.fullmatch(path):
                found.setdefault(part, []).append(path)
                break
    return {part: tuple(held) for part, held in found.items()}


def ranks_of(paths: Iterable[str], names: PartNames) -> Mapping[Part, tuple[int, ...]]:
    """The ranks whose files these are, for the parts that each rank keeps for itself."""
    found: dict[Part, set[int]] = {}
    for path in paths:
        for part, pattern in names:
            if match := pattern.fullmatch(path):
                if "rank" in pattern.groupindex:
                    found.setdefault(part, set()).add(int(match["rank"] or 0))
                break
    return {part: tuple(sorted(ranks)) for part, ranks in found.items()}
