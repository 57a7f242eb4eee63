"""What an attempt consists of, by its keys. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptgate.errors import RefusedError
from ckptgate.model.ids import check_attempt_id
from ckptgate.model.layout import attempt_prefix, attempts_prefix, join_key
from ckptgate.model.reclaim import Part, PartKind

__all__ = ["check_own", "parts_of"]

_KINDS: Final = {
    "data": PartKind.DATA,
    "chunks": PartKind.CHUNKS,
    "names": PartKind.NAME_OP,
    "movers": PartKind.NAME_OP,
    "votes": PartKind.VOTE,
    "members": PartKind.MEMBER,
    "manifest": PartKind.MANIFEST,
}


def parts_of(files: Mapping[str, int], run: str, attempt: str) -> list[Part]:
    """All of an attempt but its intent.

    Args:
        files: key -> size of every file of the store.
        run: the run's path.
        attempt: which attempt.
    """
    prefix = attempt_prefix(run, check_attempt_id(attempt)) + "/"
    below = attempt_prefix("", attempt)
    trees: dict[str, int] = {}
    parts: list[Part] = []
    for key, size in files.items():
        first, _, rest = key[len(prefix) :].partition("/")
        if not key.startswith(prefix) or first == "intent.json":
            continue
        if first.startswith(("replaced-", "retired-")):
            trees[first] = trees.get(first, 0) + size
        elif (kind := _KINDS.get(first if rest else first.partition("-")[0])) is not None:
            parts.append(Part(key=join_key(below, first, rest), kind=kind, size=size))
    for name, size in trees.items():
        parts.append(Part(key=join_key(below, name), kind=PartKind.TREE, size=size))
    return parts


def check_own(part: Part) -> None:
    """Refuse what `parts_of` never gives."""
    parts = part.key.split("/")
    is_attempts = parts[:2] == attempts_prefix("").split("/") and len(parts) > 3
    if not is_attempts or part.kind is PartKind.UNFINISHED:
        msg = f"{part.key!r} is not the gateway's to remove"
        raise RefusedError(msg, subject=part.key)
