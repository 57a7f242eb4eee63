"""What most formats have in common: no event of their own, and state that is told by names.

Owns nothing but these defaults: a format says only where it differs. No state; any thread.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from ckptgate.formats.base import CommitEvent, FileOp, Inventory, Tree
from ckptgate.formats.naming import PartNames, parts_of, ranks_of
from ckptgate.model.closure import ExpectedSet

__all__ = ["Layout"]


class Layout(ABC):
    """A format without surprises (`base.Format`)."""

    name: str
    """Stable; stands in manifests."""
    allows_latest: bool = True
    """Whether the framework bears a name of somebody else's beside its checkpoints."""
    own: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    """Paths that only this format has."""
    parts: ClassVar[PartNames] = ()
    """Which state lies in which of its files."""

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """Any file of its own shows it."""
        del name
        return any(self.own.fullmatch(path) for path in paths)

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """No file of it says that it is whole."""
        del op, path, old
        return None

    def pointer_event(self, pointer: str) -> CommitEvent | None:
        """No pointer says so."""
        del pointer
        return None

    @abstractmethod
    def expected(self, tree: Tree) -> ExpectedSet:
        """As the port says."""

    def inventory(self, tree: Tree) -> Inventory:
        """By names."""
        paths = tree.files()
        return Inventory(parts=parts_of(paths, self.parts), ranks=ranks_of(paths, self.parts))
