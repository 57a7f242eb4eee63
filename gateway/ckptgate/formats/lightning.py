"""Lightning's sharded checkpoints (FSDP, ModelParallel): a directory with a DCP and `meta.pt`.

Owns the rule that `meta.pt`, which rank 0 writes last, is the commit event: the DCP's own metadata
comes before it. Checkpoints of one file are no directories and need no format. No state; any
thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar, Final

from ckptgate.formats.base import CommitEvent, FileOp, Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.model.closure import ExpectedSet

__all__ = ["Lightning"]

META: Final = "meta.pt"
_DCP: Final = re.compile(r"\.metadata|__\d+_\d+\.distcp")


class Lightning(Layout):
    """The format as `base.Format`; what the DCP in it needs, `dcp` says."""

    name = "lightning"
    parts: ClassVar[PartNames] = (
        ("model", re.compile(r"__\d+_\d+\.distcp")),
        ("trainer", re.compile(r"meta\.pt")),
    )

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """A DCP with `meta.pt`, or in a directory that is called as a Lightning file is."""
        is_called_so = name.endswith(".ckpt")
        return (META in paths or is_called_so) and any(_DCP.fullmatch(path) for path in paths)

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """`meta.pt` is written."""
        del op, old
        return CommitEvent(name="lightning-meta") if path == META else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """`meta.pt`."""
        del tree
        return ExpectedSet(format_name=self.name, files={META: 1}, source=META)
