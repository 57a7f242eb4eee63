"""DCP's Hugging Face writer without consolidation: `shard-<rank>-model-<i>-of-<n>.safetensors`.

Owns the rule that nothing in such a checkpoint says when it is whole: every rank's word, or its
files and silence, has to. A rank without any tensor writes nothing, but those below one that wrote
did. No state; any thread.
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
_RANKS_MAX: Final = 10_000


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
        """Something of every rank, and at least of those below the highest that is there."""
        found = [match for path in tree.files() if (match := _SHARD.fullmatch(path))]
        written = {int(match[2]) for match in found}
        files = {match[0]: 1 for match in found}
        if found and max(written) <= _RANKS_MAX:
            head, tail = found[0][1], found[0][0][-len("-model-00001-of-00001.safetensors") :]
            absent = set(range(1, max(written) + 1)) - written
            files.update((f"{head}shard-{rank:05d}{tail}", 1) for rank in absent)
        return ExpectedSet(
            format_name=self.name, files=files, every_rank=True, source="the shards' numbers"
        )
