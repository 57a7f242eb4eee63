"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "add_json",
    "finishing_words",
    "human_bytes",
    "human_seconds",
    "print_json",
    "print_rows",
    "printable",
]


def add_json(parser: Any) -> None:
    """The option that every reading command has."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(value: Any) -> None:
    """One JSON document, indented."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, sort_keys=False, default=str)
    sys.stdout.write("\n")


def print_rows(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table whose columns line up."""
    table = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def human_bytes(size: float) -> str:
    """A size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError(size)


def human_seconds(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def finishing_words(report: dict[str, Any]) -> str:
    """That a daemon finishes what is under way, and what it has left for that; "" if it doesn't."""
    found = report.get("finishing")
    if not found:
        return ""
    what = {"drain": "draining", "stop": "stopping", "end": "ending"}.get(
        found["why"], found["why"]
    )
    left = f"{human_seconds(found['left_s'])} left for what is under way"
    refused = ", no new checkpoints are taken" if found["refuses_new"] else ""
    return f"{what}: {left}{refused}"


def printable(text: str) -> str:
    """Text that others wrote, on one line and without what would move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
