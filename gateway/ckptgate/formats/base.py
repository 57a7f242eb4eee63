"""The small port through which formats see files, and the contract of a format.

Owns the rule that a format reads a bounded number of bytes at places it names, and that short or
hostile input becomes an IntegrityError that says what and where. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from ckptgate.errors import IntegrityError
from ckptgate.model.closure import ExpectedSet

__all__ = [
    "BytesView",
    "CommitEvent",
    "FileOp",
    "FileView",
    "Format",
    "Inventory",
    "Part",
    "Tree",
    "damaged",
    "read_exact",
]

FileOp = Literal["close", "rename"]
"""What happened to a path: its writer closed it, or it got this name."""
Part = Literal["model", "optimizer", "scheduler", "scaler", "rng", "data", "trainer"]
"""Training state of a kind; `data` is the place in the data, `trainer` the counters."""


class FileView(Protocol):
    """A file's bytes; the size does not change while it is looked at."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*, short only at the end."""
        ...


class Tree(Protocol):
    """A checkpoint's files by relative path."""

    def files(self) -> Mapping[str, int]:
        """Path to size in bytes; regular files only."""
        ...

    def open(self, path: str) -> FileView:
        """The file's bytes. Raises MissingError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEvent:
    """An operation by which a framework says that it is done with a checkpoint.

    Attributes:
        name: stable; stands in the log and in manifests.
        is_early: it says so of the rank that does it only: others may not even have begun. What
            follows it counts once the expected set is covered.
    """

    name: str
    is_early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Which training state a checkpoint holds.

    Attributes:
        parts: what is there -> the files that hold it, sorted.
        ranks: of what each rank keeps in a file of its own -> the ranks whose is there, sorted.
        step: of the training, None where nothing says it.
    """

    parts: Mapping[Part, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    ranks: Mapping[Part, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    step: int | None = None


class Format(Protocol):
    """A framework's way to lay out a checkpoint. Everything but the trees' bytes is in names."""

    @property
    def name(self) -> str:
        """Stable; stands in manifests."""
        ...

    @property
    def allows_latest(self) -> bool:
        """Whether the framework bears a name of somebody else's beside its checkpoints."""
        ...

    def recognise(self, paths: Collection[str], name: str) -> bool:
        """Whether a checkpoint *name* with files of these relative paths is of this format."""
        ...

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """The event if this operation says that no more writes come, else None.

        Args:
            op: what happened.
            path: relative to the checkpoint (after a rename: the new name).
            old: the name before a rename, else "".
        """
        ...

    def pointer_event(self, pointer: str) -> CommitEvent | None:
        """The event if a pointer of that name, set to the checkpoint, says so, else None."""
        ...

    def expected(self, tree: Tree) -> ExpectedSet:
        """Which files must exist, and their minimal sizes.

        Raises:
            IntegrityError: what says so is torn or hostile; names the file.
        """
        ...

    def inventory(self, tree: Tree) -> Inventory:
        """Which training state is there, without loading any of it.

        Raises:
            IntegrityError: as `expected`.
        """
        ...


@dataclass(frozen=True, slots=True)
class BytesView:
    """Bytes in memory as a `FileView`."""

    data: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        """As the port says."""
        return self.data[offset : offset + length]


def damaged(message: str) -> IntegrityError:
    """The error for bytes that contradict their own structure."""
    return IntegrityError(message)


def read_exact(view: FileView, offset: int, length: int, what: str) -> bytes:
    """Exactly *length* bytes at *offset*.

    Raises:
        IntegrityError: they are not all inside the file; names *what* was to be read.
    """
    if offset < 0 or length < 0 or offset + length > view.size:
        msg = f"{what} at byte {offset} needs {length} bytes, the file has {view.size}"
        raise damaged(msg)
    data = view.read(offset, length)
    if len(data) != length:
        msg = f"{what} at byte {offset} gave {len(data)} of {length} bytes"
        raise damaged(msg)
    return data
