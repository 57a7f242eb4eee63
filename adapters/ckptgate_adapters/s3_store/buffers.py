"""The memory in which parts lie while they are sent or compared: a fixed number of buffers.

They are made when they are first needed and used again and again: touching fresh memory costs
more than reading a part into it. Loop only.
"""

from __future__ import annotations

import asyncio

__all__ = ["Buffers", "Place"]


class Place:
    """One of the places for parts; until `free`, its buffer is the caller's alone."""

    def __init__(self, owner: Buffers) -> None:
        self._owner = owner
        self._buffer: bytearray | None = None

    def view(self, size: int) -> memoryview:
        """The first *size* bytes of its buffer; at most `Buffers.size`."""
        if self._buffer is None:
            self._buffer = self._owner.take_buffer()
        return memoryview(self._buffer)[:size]

    def free(self, *, may_reuse: bool) -> None:
        """Give the place to the next.

        Args:
            may_reuse: nothing can refer to the buffer any more. A connection that was given up may
                still send from it, so after a failure it is left to whoever has it.
        """
        self._owner.give_back(self._buffer if may_reuse else None)
        self._buffer = None


class Buffers:
    """All of them, for all files of a store.

    Args:
        count: places.
        size: bytes of each.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._places = asyncio.Semaphore(count)
        self._spare: list[bytearray] = []

    async def place(self) -> Place:
        """The next free place, in the order of those who ask."""
        await self._places.acquire()
        return Place(self)

    def take_buffer(self) -> bytearray:
        """For `Place`."""
        return self._spare.pop() if self._spare else bytearray(self.size)

    def give_back(self, buffer: bytearray | None) -> None:
        """For `Place`."""
        if buffer is not None:
            self._spare.append(buffer)
        self._places.release()
