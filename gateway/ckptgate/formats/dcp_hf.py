"""DCP's Hugging Face writer without consolidation: `shard-<rank>-model-<i>-of-<n>.safetensors`.

Owns the rule that nothing in such a checkpoint says when it is whole: every rank's word, or its
files and silence, has to. A rank writes its files one after the other, so one that has the first of
them may have died before the next. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar, Final

from ckptgate.formats.base import Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.model.closure import ExpectedSet

__all__ = ["DcpHf"]

_SHARD: Final = re.compile(
    r"((?:sharded/)?)shard-([0-9]{5})-model-([0-9]{5})-of-([0-9]{5})\.safetensors"
)
_FILES_MAX: Final = 100_000


class DcpHf(Layout):
    """The format as `base.Format`; ranks are counted from 1 in its names."""

    name = "dcp-hf"
    parts: ClassVar[PartNames] = (("model", _SHARD),)

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """Shards without an index: with one, that is what counts."""
        del name
        has_index = any(path.endswith("model.safetensors.index.json") for path in paths)
        return not has_index and any(_SHARD.fullmatch(path) for path in paths)

    def expected(self, tree: Tree) -> ExpectedSet:
        """Something of every rank; of those that are known by a file, all that the names speak of.

        A rank may have no tensor for one of its files: then only an explicit commit is believed.
        """
        found = [match for path in tree.files() if (match := _SHARD.fullmatch(path))]
        files = {match[0]: 1 for match in found}
        ranks = max((int(match[2]) for match in found), default=0)
        for head, count in sorted({(match[1], match[4]) for match in found}):
            if ranks * int(count) <= _FILES_MAX:
                files.update(
                    (f"{head}shard-{rank:05d}-model-{n:05d}-of-{count}.safetensors", 1)
                    for rank in range(1, ranks + 1)
                    for n in range(1, int(count) + 1)
                )
        return ExpectedSet(
            format_name=self.name, files=files, every_rank=True, source="the shards' numbers"
        )
