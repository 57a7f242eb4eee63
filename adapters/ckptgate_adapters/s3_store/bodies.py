"""Bodies of requests that tell when they move, so that a transfer that stalls is given up.

Loop only.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from typing import Final, cast

__all__ = ["FlowBody", "Moving", "ViewBody"]

_PIECE_BYTES: Final = 1024 * 1024


class Moving:
    """A body that is watched."""

    on_move: Callable[[], None] | None = None
    """Called whenever more of it is taken."""

    def moved(self) -> None:
        """More of it was taken."""
        if self.on_move is not None:
            self.on_move()


class ViewBody(Moving, io.BytesIO):
    """A buffer as a file: the client sends from a `BytesIO` without a copy of the whole.

    Each try of a request needs one of its own. What it hands out refers to the buffer.
    """

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """What follows, in pieces of the size that suits the sockets, whatever was asked for."""
        del size
        self.moved()
        piece = self._view[self._at : self._at + _PIECE_BYTES]
        self._at += len(piece)
        return cast("bytes", piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As of any file; the client asks for the size in this way."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Where it is."""
        return self._at

    def getbuffer(self) -> memoryview:
        """All of it."""
        return self._view[:]


class FlowBody(Moving):
    """A body that comes in pieces from elsewhere.

    Args:
        pieces: where it comes from.
        size: bytes, which the request says beforehand.
    """

    def __init__(self, pieces: AsyncIterator[bytes], size: int) -> None:
        self._pieces = pieces
        self._size = size
        self._at = 0

    def read(self) -> bytes:
        """The client takes what looks like a file, and reads it as what it is."""
        raise io.UnsupportedOperation("it is read as an asynchronous iterator")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """The client asks for the size in this way."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        """Where it is, while the size is asked for."""
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            self.moved()
            yield piece
