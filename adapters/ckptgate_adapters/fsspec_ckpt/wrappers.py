"""Text and compression around the file objects of `ckpt://`: what an exception means goes through.

A file is one thread's at a time, as any.
"""

from __future__ import annotations

import contextlib
import io
from typing import IO, Any, Final

from ckptgate_adapters.fsspec_ckpt.writers import Discardable, is_cut_short

__all__ = ["CkptText", "Compressed"]

_BUFFER_BYTES: Final = 128 << 10


class CkptText(Discardable, io.TextIOWrapper):
    """A text file: an exception in its `with` block discards what was written, as in any file."""

    def __init__(self, inner: Any, **options: Any) -> None:
        super().__init__(inner, **options)
        self._inner = inner
        self._is_discarded = False

    @property
    def path(self) -> str:
        """Its name in the store."""
        return str(self._inner.path)

    def commit(self) -> None:
        """In a transaction: what was written counts from now on, what is still in here too."""
        if not self._is_discarded:
            self.close()
            self._inner.commit()

    def discard(self) -> None:
        """Nothing of what was written is wanted."""
        if not isinstance(self._inner, Discardable):
            # It is read.
            self.close()
            return
        self._is_discarded = True
        self._inner.discard()
        with contextlib.suppress(ValueError):
            self.detach()


class Compressed(Discardable, io.BufferedIOBase):
    """A compressed file: its end is the end of the file that it is in."""

    def __init__(self, coded: IO[bytes], inner: Any) -> None:
        self._coded = coded
        self._inner = inner

    @property
    def path(self) -> str:
        """Its name in the store."""
        return str(self._inner.path)

    def readable(self) -> bool:
        """Whether it is read."""
        return bool(self._coded.readable())

    def writable(self) -> bool:
        """Whether it is written."""
        return bool(self._coded.writable())

    def seekable(self) -> bool:
        """Whether it can be read out of order."""
        return bool(self._coded.seekable())

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes."""
        return self._coded.read(-1 if size is None else size)

    def read1(self, size: int = -1) -> bytes:
        """Read bytes."""
        return self.read(_BUFFER_BYTES if size < 0 else size)

    def write(self, data: Any) -> int:
        """Write bytes."""
        return self._coded.write(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position."""
        return self._coded.seek(offset, whence)

    def tell(self) -> int:
        """The position."""
        return self._coded.tell()

    def flush(self) -> None:
        """Give what can be given."""
        if not self._coded.closed and self._coded.writable():
            self._coded.flush()

    def commit(self) -> None:
        """In a transaction: what was written counts from now on, with the end of the stream."""
        self.close()
        self._inner.commit()

    def discard(self) -> None:
        """Nothing of what was written is wanted."""
        if isinstance(self._inner, Discardable):
            self._inner.discard()
        if self.closed:
            return
        # The end of a compressed stream has nowhere to go any more.
        with contextlib.suppress(ValueError, OSError):
            self._coded.close()
        super().close()

    def close(self) -> None:
        """The file is written, or read."""
        if self.closed:
            return
        if is_cut_short():
            self.discard()
            return
        try:
            self._coded.close()
            self._inner.close()
        finally:
            super().close()

    def __del__(self) -> None:
        # The inner file knows what to do.
        return
