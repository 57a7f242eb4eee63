"""Orbax: OCDBT stores in items below a step, written under temporary names or behind a commit file.

Owns what an item and its step must have. On a file system a rename of the step is the event, as of
any format; in the mode for object stores it is `commit_success.txt`. Which of OCDBT's data files
there must be is said by its binary manifests, which nobody here reads: Orbax checks each chunk's
CRC-32C when it restores. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar, Final

from ckptgate.formats.base import CommitEvent, FileOp, Inventory, Part, Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames, below
from ckptgate.formats.texts import read_text
from ckptgate.model.closure import ExpectedSet

__all__ = ["Orbax"]

_STEP: Final = "_CHECKPOINT_METADATA"
_ITEM: Final = "_METADATA"
_MANIFEST: Final = "manifest.ocdbt"
_COMMIT: Final = "commit_success.txt"
_TEMPORARY: Final = ".orbax-checkpoint-tmp"
_OWN: Final = re.compile(
    r"_CHECKPOINT_METADATA|(?:[^/]+/)?(?:_METADATA|manifest\.ocdbt|ocdbt\.process_[0-9]+/.+)"
    r"|.*\.orbax-checkpoint-tmp.*"
)
_DATA: Final = re.compile(r"((?:[^/]+/)?)(?:ocdbt\.process_[0-9]+/)?d/[0-9a-f]+")


class Orbax(Layout):
    """The format as `base.Format`."""

    name = "orbax"
    own: ClassVar[re.Pattern[str]] = _OWN
    parts: ClassVar[PartNames] = (
        ("optimizer", re.compile(r"opt\w*/.*")),
        ("rng", re.compile(r"\w*rng\w*/.*")),
        ("data", re.compile(r"(?:dataset|iterator|loader)\w*/.*")),
        ("trainer", re.compile(r"(?:metrics|custom_metadata)/.*")),
        ("model", re.compile(r"(?:[^/]+/)?(?:_METADATA|d/.*|ocdbt\.process_.*)")),
    )

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """The commit file at the top; an item's own is none."""
        del op, old
        return CommitEvent(name="orbax-commit") if path == _COMMIT else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """Metadata of the step and each item, manifests; nothing under a temporary name."""
        sizes = tree.files()
        files: dict[str, int] = {}
        for folder in _items(sizes):
            files[below(folder, _ITEM)] = 1
            files[below(folder, _MANIFEST)] = 1
        tops = {path.split("/", 1)[0] for path in sizes if "/" in path}
        if _STEP in sizes or (_ITEM not in sizes and tops):
            files[_STEP] = 1
        return ExpectedSet(
            format_name=self.name,
            files=files,
            in_progress=frozenset(path for path in sizes if _TEMPORARY in path),
            source=_STEP if _STEP in sizes else _ITEM,
        )

    def inventory(self, tree: Tree) -> Inventory:
        """By the items' names, and by the names in their trees."""
        found: dict[Part, set[str]] = {
            part: set(paths) for part, paths in super().inventory(tree).parts.items()
        }
        for path in tree.files():
            if path.rpartition("/")[2] == _ITEM:
                words = read_text(tree.open(path), path)
                if re.search(rb"'(?:opt_state|optimizer\w*)'", words):
                    found.setdefault("optimizer", set()).add(path)
        return Inventory(parts={part: tuple(sorted(paths)) for part, paths in found.items()})


def _items(paths: Collection[str]) -> set[str]:
    """Folders ("" the top) of items that hold arrays."""
    found: set[str] = set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name in {_ITEM, _MANIFEST} and "/" not in folder:
            found.add(folder)
        elif match := _DATA.fullmatch(path):
            found.add(match[1].rstrip("/"))
    # The stores of single processes are merged into their item's.
    return {folder for folder in found if not folder.startswith("ocdbt.process_")}
