"""What simulated trainers did, as the checker has to know it. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Part", "Save"]


@dataclass
class Part:
    """What one rank wrote in one save: path -> digests of its versions, in order."""

    versions: dict[str, list[str]] = field(default_factory=dict)
    required: dict[str, int] = field(default_factory=dict)
    """Path -> number of the version that the rank had closed when it said that it is done."""
    is_done: bool = False
    attempt: str = ""
    """Which attempt it is part of, where only that one promises anything."""


@dataclass
class Save:
    """One save of a checkpoint by one incarnation."""

    id: str
    job: str
    name: str
    kind: str
    world: int
    base: str = ""
    """Attempt that it revises."""
    has_shared: bool = False
    """Each rank writes one path that all others write, too."""
    is_contradicting: bool = False
    """Its ranks write different bytes under one path: it must never be committed."""
    parts: dict[int, Part] = field(default_factory=dict)

    def part(self, rank: int) -> Part:
        return self.parts.setdefault(rank, Part())
