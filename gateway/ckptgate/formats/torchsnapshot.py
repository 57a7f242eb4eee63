"""torchsnapshot: `.snapshot_metadata`, which rank 0 writes after a barrier, and what it names.

Owns the reading of that YAML, or JSON, by its lines: only locations, byte ranges and the world
size are looked for, and no YAML is loaded. No state; any thread.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar, Final

from ckptgate.errors import IntegrityError
from ckptgate.formats.base import CommitEvent, FileOp, FileView, Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames
from ckptgate.formats.texts import checked_path, read_text
from ckptgate.model.closure import ExpectedSet

__all__ = ["MARKER", "TorchSnapshot"]

MARKER: Final = ".snapshot_metadata"
_FIELD: Final = re.compile(r'[\s-]*"?(\w+)"?:(.*)')
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_ITEM: Final = re.compile(r"\s*(?:-\s*)?([0-9]{1,18}),?\s*\]?,?")
_LISTS: Final = frozenset({"shape", "byte_range"})
_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4,
    "float32": 4, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Of one element; of other types only the byte ranges tell."""


class TorchSnapshot(Layout):
    """The format as `base.Format`."""

    name = "torchsnapshot"
    own: ClassVar[re.Pattern[str]] = re.compile(r"\.snapshot_metadata")
    parts: ClassVar[PartNames] = (
        ("rng", re.compile(r"(?P<rank>[0-9]+)/(?:.*/)?rng_state.*")),
        ("optimizer", re.compile(r"[^/]+/optim\w*/.*")),
        ("model", re.compile(r"[^/]+/(?:model|app)\w*/.*")),
    )

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """The metadata is written: every rank was done before."""
        del op, old
        return CommitEvent(name="torchsnapshot-metadata") if path == MARKER else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """Every location, as long as its byte ranges need.

        Raises:
            IntegrityError: the metadata is torn or hostile.
        """
        files, world_size = _read(tree.open(MARKER))
        files[MARKER] = tree.files()[MARKER]
        return ExpectedSet(format_name=self.name, files=files, world_size=world_size, source=MARKER)


@dataclass(slots=True)
class _Entry:
    """A stored piece, as far as its lines were read."""

    location: str
    texts: dict[str, str] = field(default_factory=dict[str, str])
    lists: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def take(self, key: str, text: str, numbers: list[int]) -> None:
        """One of its fields; more numbers may come to the list."""
        if key in _LISTS:
            self.lists.setdefault(key, numbers)
        else:
            self.texts.setdefault(key, text)

    def end(self) -> int:
        """The bytes that its file must have at least."""
        if ends := self.lists.get("byte_range"):
            return ends[-1]
        if self.texts.get("serializer") == "buffer_protocol" and "shape" in self.lists:
            each = _BYTES.get(self.texts.get("dtype", "").removeprefix("torch."), 0)
            return each * math.prod(self.lists["shape"])
        return int(self.texts.get("serializer") == "torch_save")


def _read(view: FileView) -> tuple[dict[str, int], int | None]:
    """Files with their minimal sizes, and the world size."""
    try:
        lines = read_text(view, MARKER).decode("utf-8").splitlines()
    except UnicodeDecodeError as exc:
        msg = f"{MARKER} is not UTF-8: {exc}"
        raise IntegrityError(msg, subject=MARKER) from exc
    world_size: int | None = None
    entries: list[_Entry] = []
    numbers: list[int] = []
    for line in lines:
        if item := _ITEM.fullmatch(line):
            numbers.append(int(item[1]))
        elif found := _FIELD.fullmatch(line):
            key, text = found[1], found[2].strip().rstrip(",").strip("\"'")
            numbers = [int(n) for n in _NUMBER.findall(text)] if key in _LISTS else []
            if key == "world_size" and world_size is None:
                world_size = _number(text)
            elif key == "location":
                entries.append(_Entry(checked_path(text, MARKER)))
            elif entries:
                entries[-1].take(key, text, numbers)
    if world_size is None:
        msg = f"{MARKER} has no world_size"
        raise IntegrityError(msg, subject=MARKER)
    files: dict[str, int] = {}
    for entry in entries:
        files[entry.location] = max(files.get(entry.location, 0), entry.end())
    return files, world_size


def _number(text: str) -> int | None:
    """The number that *text* is, None if it is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) else None
