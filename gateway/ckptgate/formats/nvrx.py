"""nvidia-resiliency-ext's local checkpoints: `<rank>/iter_<step>_<rank>_local.pt`.

Owns what makes an iteration whole: one file of each rank, under whatever rank's directory it lies
(a replica is as good). Such checkpoints are kept on each node's own disk; gated here is only a copy
of them that is made as a checkpoint. No state; any thread.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ckptgate.formats.base import Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.model.closure import ExpectedSet

__all__ = ["Nvrx"]

_LOCAL: Final = re.compile(r"(?:.*/)?(iter_[0-9]{7})_(?P<rank>[0-9]+)_local\.pt")
_DIRTY: Final = re.compile(r"(?:.*/)?iter_[0-9]{7}_[0-9]+_local\.dirty\.pt")
_OWN: Final = re.compile(r"(?:.*/)?iter_[0-9]{7}_[0-9]+_local(?:\.dirty)?\.pt")


class Nvrx(Layout):
    """The format as `base.Format`."""

    name = "nvrx"
    own: ClassVar[re.Pattern[str]] = _OWN
    parts: ClassVar[PartNames] = (("model", _LOCAL),)

    def expected(self, tree: Tree) -> ExpectedSet:
        """Of the newest iteration one file of each rank; no file that is still being written."""
        sizes = tree.files()
        found = [match for path in sizes if (match := _LOCAL.fullmatch(path))]
        newest = max((match[1] for match in found), default="")
        files = {match[0]: 1 for match in found if match[1] == newest}
        return ExpectedSet(
            format_name=self.name,
            files=files,
            rank_files=(f"*/{newest}_{{rank}}_local.pt",) if newest else (),
            in_progress=frozenset(path for path in sizes if _DIRTY.fullmatch(path)),
            source="the ranks' files",
        )
