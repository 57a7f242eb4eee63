"""Where a checkpoint can be exported to besides a local directory: names in an object store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptgate.model.documents import FileEntry, Manifest
from ckptgate.ports.store import DataObjects, DigestedFile

__all__ = ["ExportTarget", "Exported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What is in the place now.

    Attributes:
        files, size_bytes: how much.
        kept: files of these that an earlier try had brought.
    """

    files: int
    size_bytes: int
    kept: int


class ExportTarget(Protocol):
    """A place that gets a checkpoint's entries under their plain names. Any thread."""

    @property
    def url(self) -> str:
        """How a user names it, without secrets."""
        ...

    def begin(self, manifest: Manifest, *, may_replace: bool) -> None:
        """Look at the place, and empty it of what isn't the checkpoint's if that was asked for.

        What an earlier try to export the same checkpoint has brought may be there, and stays.

        Raises:
            RefusedError: something else is there, and nobody said that it may be replaced.
            TransientStoreError, UnusableError: the place failed.
        """
        ...

    def has(self, manifest: Manifest, entry: FileEntry) -> bool:
        """Whether an earlier try has brought exactly this; proved."""
        ...

    def copy(self, store: DataObjects, key: str, manifest: Manifest, entry: FileEntry) -> bool:
        """Have the services copy a file's bytes among themselves; False where they can't.

        The copy is proved on return.

        Raises:
            MissingError, IntegrityError: the stored bytes are not there, or not what *entry* says.
            TransientStoreError, UnusableError: the place failed.
        """
        ...

    def put(self, source: DigestedFile, manifest: Manifest, entry: FileEntry) -> None:
        """Send a local file, and prove that it arrived.

        Raises:
            IntegrityError: it arrived as something else.
            FullError, TransientStoreError, UnusableError: the place failed.
        """
        ...

    def make(self, manifest: Manifest, entry: FileEntry) -> None:
        """Make a directory or a symlink."""
        ...
