"""OLMo-core and fairseq2: a temporary directory that rank 0 renames when all ranks are done.

Owns what every rank leaves in them. The rename itself is the commit event of any format. No state;
any thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar, Final

from ckptgate.formats.base import Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.model.closure import ExpectedSet

__all__ = ["Fairseq2", "Olmo"]

_TRAIN: Final = re.compile(r"train/rank(?P<rank>[0-9]+)\.pt")
_TRAINER: Final = re.compile(r"trainer/rank_(?P<rank>[0-9]{2,})\.pt")
_SHARDED: Final = re.compile(r"(model|optimizer)/pp_([0-9]{2,})/tp_([0-9]{2,})/sdp_([0-9]{2,})\.pt")
_COUNT_MAX: Final = 100_000


class Olmo(Layout):
    """OLMo-core's `train/rank<r>.pt` beside the DCP in `model_and_optim`."""

    name = "olmo"
    parts: ClassVar[PartNames] = (
        ("trainer", _TRAIN),
        ("model", re.compile(r"model_and_optim/.*\.distcp")),
    )

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """A rank's train state and the DCP."""
        del name
        return any(_TRAIN.fullmatch(path) for path in paths) and any(
            path.startswith("model_and_optim/") for path in paths
        )

    def expected(self, tree: Tree) -> ExpectedSet:
        """Every rank's train state, and the DCP's metadata."""
        files = {path: 1 for path in tree.files() if _TRAIN.fullmatch(path)}
        files["model_and_optim/.metadata"] = 1
        return ExpectedSet(
            format_name=self.name,
            files=files,
            rank_files=("train/rank{rank}.pt",),
            source="train states of the ranks",
        )


class Fairseq2(Layout):
    """fairseq2's `model`, `optimizer`, `trainer` and `data_reader` directories."""

    name = "fairseq2"
    own: ClassVar[re.Pattern[str]] = re.compile(
        r"trainer/rank_[0-9]{2,}\.pt|(?:model|optimizer)/pp_[0-9]{2,}/tp_[0-9]{2,}/sdp_[0-9]{2,}\.pt"
    )
    parts: ClassVar[PartNames] = (
        ("trainer", _TRAINER),
        ("model", re.compile(r"model/.*\.pt")),
        ("optimizer", re.compile(r"optimizer/.*\.pt")),
        ("data", re.compile(r"data_reader/.*\.pt")),
    )

    def expected(self, tree: Tree) -> ExpectedSet:
        """Every rank's trainer state, and no gap in the parallel ranks' shards."""
        sizes = tree.files()
        files = {path: 1 for path in sizes if _TRAINER.fullmatch(path)}
        found = [match for path in sizes if (match := _SHARDED.fullmatch(path))]
        counts = [max((int(m[at]) for m in found), default=-1) + 1 for at in (2, 3, 4)]
        kinds = sorted({match[1] for match in found})
        if len(kinds) * counts[0] * counts[1] * counts[2] <= _COUNT_MAX:
            files.update(
                (f"{kind}/pp_{pp:02d}/tp_{tp:02d}/sdp_{sdp:02d}.pt", 1)
                for kind in kinds
                for pp in range(counts[0])
                for tp in range(counts[1])
                for sdp in range(counts[2])
            )
        is_model_only = not any(not path.startswith("model/") for path in sizes)
        return ExpectedSet(
            format_name=self.name,
            files=files,
            rank_files=() if is_model_only else ("trainer/rank_{rank:02d}.pt",),
            source="trainer states of the ranks",
        )
