"""Composer's checkpoints of one file a rank, `ep<E>-ba<B>-rank<R>.pt`, gathered in a directory.

Owns when several ranks' files are one checkpoint. Composer's sharded ones are DCPs, and its plain
ones lie beside each other outside of checkpoints, where each is a whole file of its own. No state;
any thread.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ckptgate.formats.base import Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.model.closure import ExpectedSet

__all__ = ["Composer"]

_FILE: Final = re.compile(r"(ep[0-9]+-ba[0-9]+-rank)(?P<rank>[0-9]+)\.pt")


class Composer(Layout):
    """The format as `base.Format`."""

    name = "composer"
    own: ClassVar[re.Pattern[str]] = _FILE
    parts: ClassVar[PartNames] = (("model", _FILE),)

    def expected(self, tree: Tree) -> ExpectedSet:
        """What is there; if more than rank 0 wrote, every rank's."""
        found = [match for path in tree.files() if (match := _FILE.fullmatch(path))]
        many = sorted({match[1] for match in found if int(match[2])})
        return ExpectedSet(
            format_name=self.name,
            files={match[0]: 1 for match in found},
            rank_files=tuple(f"{head}{{rank}}.pt" for head in many),
            source="the ranks' files",
        )
