"""The formats that are known, in order of priority.

Owns which one a set of names belongs to. A new framework is a module with a `Format` and a line
here. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ckptgate.errors import MissingError
from ckptgate.formats.base import FileOp, Format
from ckptgate.formats.dcp import Dcp

__all__ = ["FORMATS", "by_name", "commit_event", "recognise"]

FORMATS: Final[tuple[Format, ...]] = (Dcp(),)


def recognise(paths: Collection[str]) -> Format | None:
    """The format of a checkpoint with files of these relative paths, None for unknown content."""
    return next((known for known in FORMATS if known.recognise(paths)), None)


def commit_event(
    paths: Collection[str], op: FileOp, path: str, old: str
) -> tuple[Format, str] | None:
    """The format and the event's name if this operation says that no more writes come.

    Args:
        paths: the checkpoint's files now.
        op: what happened.
        path: relative to the checkpoint (after a rename: the new name).
        old: the name before a rename, else "".
    """
    for known in FORMATS:
        # The event first: it is cheap, and almost every operation is none.
        event = known.commit_event(op, path, old)
        if event and known.recognise([*paths, path]):
            return known, event
    return None


def by_name(name: str) -> Format:
    """The format of that name.

    Raises:
        MissingError: none is known, as in a manifest of a newer version.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    msg = f"no such format: {name!r}"
    raise MissingError(msg, subject=name)
