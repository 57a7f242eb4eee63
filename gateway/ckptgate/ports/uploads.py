"""Uploads that a store keeps until they are completed or aborted: only object stores have them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

__all__ = ["UnfinishedUpload", "Uploads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """A multipart upload that was begun and not completed.

    Attributes:
        path: below the store's root, of the object that it would become.
        upload_id: the store's name of it.
        started_at: by the store's clock.
        parts: that the store has.
        size: bytes of these.
    """

    path: str
    upload_id: str
    started_at: datetime
    parts: int
    size: int


@runtime_checkable
class Uploads(Protocol):
    """A store that has such uploads. Only those below its own root are ever seen or touched."""

    def uploads(self, *, older_than_s: float = 0.0) -> list[UnfinishedUpload]:
        """Those that were begun so long ago, by key.

        Raises:
            TransientStoreError, UnusableError: the store failed.
        """
        ...

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort it and make sure that its parts are gone; one that isn't there is success.

        Raises:
            TransientStoreError: nothing is known, or a part still came in; call again.
        """
        ...
