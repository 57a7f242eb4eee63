"""Who calls, as the visibility rules see it. A value only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Who"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """A caller as the visibility rules see it.

    Attributes:
        key: job key as text.
        is_shared: all nodes of the job have that key.
        pid, start: process, 0 where unknown.
        rank, world_size: None where unknown.
    """

    key: str
    is_shared: bool
    pid: int
    start: int
    rank: int | None
    world_size: int | None
