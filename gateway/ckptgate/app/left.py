"""What is left when a gateway ends before everything is in the store: written, read, put in words.

The publisher writes it at its end, for whoever ended it. Any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any, Final

__all__ = ["LEFT_FILE", "forget_left", "named", "read_left", "told", "write_left"]

_log = logging.getLogger(__name__)

LEFT_FILE: Final = "left.json"
"""Its name in the spool."""
_LINES_SHOWN: Final = 8
_BECAUSE: Final = {
    "open": "nobody committed it",
    "sealed": "not decided yet",
    "pending": "not in the store yet",
    "unknown": "see the log",
}


def write_left(spool: str, left: list[dict[str, Any]]) -> None:
    """Keep it, and log a line for each; never fails."""
    path = os.path.join(spool, LEFT_FILE)
    try:
        with open(path + ".new", "w", encoding="utf-8") as stream:
            json.dump(left, stream)
        os.replace(path + ".new", path)
    except OSError as exc:
        _log.warning("left-not-written path=%s error=%s", path, exc)
    for row in left:
        for missing in row["missing"] or [row.get("reason") or _BECAUSE.get(str(row["state"]), "")]:
            _log.warning("left name=%s state=%s missing=%r", named(row), row["state"], missing)
    _log.info("drained left=%d", len(left))


def forget_left(spool: str) -> None:
    """Drop what an earlier end left there: what is read after the next one is its own."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(spool, LEFT_FILE))


def read_left(spool: str) -> list[dict[str, Any]]:
    """What was kept.

    Raises:
        FileNotFoundError: nothing was.
    """
    with open(os.path.join(spool, LEFT_FILE), encoding="utf-8") as stream:
        left: list[dict[str, Any]] = json.load(stream)
    return left


def named(row: dict[str, Any]) -> str:
    """Its path below the mount point."""
    return os.path.join(str(row.get("run", "")), str(row["name"]))


def told(row: dict[str, Any]) -> str:
    """One line: which, how far, and what it waits for (the ranks that owe it among that)."""
    lines: list[str] = row["missing"]
    why = "; ".join(lines[:_LINES_SHOWN]) or row.get("reason") or _BECAUSE[str(row["state"])]
    if len(lines) > _LINES_SHOWN:
        why += f"; and {len(lines) - _LINES_SHOWN} more"
    return f"{named(row)} ({row['state']}): {why}"
