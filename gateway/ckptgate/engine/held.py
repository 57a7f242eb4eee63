"""Which training state a committed checkpoint holds, for people who choose one to go on from.

It owns the rule that this is information and proves nothing: formats read a few names and headers
of the stored bytes, and what they can't read is said, and keeps nobody from the rest. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptgate.engine.judge import StoreTree
from ckptgate.errors import IntegrityError, MissingError
from ckptgate.formats import registry
from ckptgate.formats.base import Inventory, Part
from ckptgate.model.documents import Manifest
from ckptgate.ports.store import Store

__all__ = ["HeldPart", "HeldState", "held_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """One part of the training state.

    Attributes:
        files: that hold it, or say where it is.
        ranks: whose files these are, where each rank has its own; else empty.
    """

    files: tuple[str, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The training state of a checkpoint.

    Attributes:
        parts: what is there, by name.
        step: of the training, None where no file says it.
        world_size: how many ranks there are, None where unknown.
        problem: why it can't be told, "" if it can.
    """

    parts: Mapping[Part, HeldPart] = field(default_factory=lambda: MappingProxyType({}))
    step: int | None = None
    world_size: int | None = None
    problem: str = ""


def held_state(store: Store, run: str, manifest: Manifest) -> HeldState:
    """Which training state it holds; reads a few places of a few files.

    Args:
        store: where it is.
        run: the run's path in the store.
        manifest: what it consists of.

    Raises:
        TransientStoreError: the store did not answer.
    """
    tree = StoreTree(store, run, manifest.entries)
    try:
        known = registry.by_name(manifest.format_name) if manifest.format_name else None
        found = registry.inventory(known, tree)
    except (IntegrityError, MissingError) as exc:
        return HeldState(world_size=manifest.world_size, problem=exc.message)
    return HeldState(parts=_parts(found), step=found.step, world_size=manifest.world_size)


def _parts(found: Inventory) -> dict[Part, HeldPart]:
    return {
        part: HeldPart(files=files, ranks=found.ranks.get(part, ()))
        for part, files in sorted(found.parts.items())
    }
