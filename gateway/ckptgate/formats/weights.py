"""Sharded weights as the Hugging Face libraries lay them out: shards and an `*.index.json`.

Owns what an index, or the `-00001-of-00003` in the names, says must exist. It is found in any
folder of any checkpoint. Alone it is only a part: an optimizer's state may lie beside it under any
name, so neither the index nor silence says that all is there. No state; any thread.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

import msgspec

from ckptgate.formats.base import Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames, below, in_folders
from ckptgate.formats.texts import checked_path, read_json
from ckptgate.model.closure import ExpectedSet

__all__ = ["Weights"]

_INDEX: Final = re.compile(r"([\w.-]+?)\.(safetensors|bin)\.index(?:\.[\w-]+)?\.json")
# Of weights only: files of a data set have such numbers too, from 0 on.
_SHARD: Final = re.compile(r"((?:\w+_)?model)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")
_SHARDS_MAX: Final = 10_000


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}


class Weights(Layout):
    """The format as `base.Format`."""

    name = "weights"
    own: ClassVar[re.Pattern[str]] = re.compile(rf"(?:.*/)?(?:{_INDEX.pattern}|{_SHARD.pattern})")
    parts: ClassVar[PartNames] = (
        (
            "model",
            re.compile(r"(?:.*/)?(?:\w*_)?model(?:[-.][\w.-]+)?\.(?:safetensors|bin)"),
        ),
    )

    def expected(self, tree: Tree) -> ExpectedSet:
        """What each index refers to; without one, all shards that the names speak of, and it.

        Raises:
            IntegrityError: an index is torn or hostile.
        """
        sizes = tree.files()
        files: dict[str, int] = {}
        indexed: set[tuple[str, str, str]] = set()
        sources: list[str] = []
        for folder, names in in_folders(sizes, _INDEX).items():
            for name, match in sorted(names.items()):
                path = below(folder, name)
                shards = set(read_json(tree.open(path), path, _Index).weight_map.values())
                files[path] = 1
                files.update((checked_path(below(folder, shard), path), 1) for shard in shards)
                indexed.add((folder, match[1], match[2]))
                sources.append(path)
        for folder, names in in_folders(sizes, _SHARD).items():
            for match in names.values():
                stem, count, kind = match[1], int(match[3]), match[4]
                if (folder, stem, kind) in indexed or not 0 < count <= _SHARDS_MAX:
                    continue
                shards = {f"{stem}-{n + 1:05d}-of-{count:05d}.{kind}" for n in range(count)}
                files.update((below(folder, shard), 1) for shard in shards)
                files[below(folder, f"{stem}.{kind}.index.json")] = 1
        return ExpectedSet(
            format_name=self.name, files=files, source=", ".join(sources[:3]), is_partial=True
        )
