"""The matrix's results as the README shows them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.frameworks.matrix import BEHIND, Result
from tests.frameworks.trainings.known import TITLES

__all__ = ["cell", "markdown"]

_GROUPS = {
    "no fault": "none",
    "a rank 3 s late": "late",
    "one killed": "kill-",
    "all killed": "kill-all",
}


def markdown(results: Sequence[Result]) -> str:
    """One row a framework, one column a fault and place."""
    newest = {(r.framework, r.place, r.fault): r for r in results}
    lines = [
        "| framework | " + " | ".join(f"{title}: raw | ckptgate" for title in _GROUPS) + " |",
        "|---|" + "---|---|" * len(_GROUPS),
    ]
    for name, title in TITLES.items():
        cells = [
            cell(
                [
                    r
                    for (f, p, fault), r in newest.items()
                    if (f, p) == (name, place) and _is_of(fault, kind)
                ]
            )
            for kind in _GROUPS.values()
            for place in ("raw", "ckptgate")
        ]
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _is_of(fault: str, kind: str) -> bool:
    return fault == kind or (kind == "kill-" and fault.startswith(kind) and fault != "kill-all")


def cell(results: Sequence[Result]) -> str:
    """What came of the cases of a kind."""
    if not results:
        return ""
    counts = {
        "broken one found": sum(bool(r.misled) for r in results),
        "last one not found": sum(r.error.startswith(BEHIND) for r in results),
        "resume fails": sum(bool(r.error) and not r.error.startswith(BEHIND) for r in results),
        "other result": sum(not r.error and not r.is_equal for r in results),
        "from scratch": sum(r.resumed == "" and not r.error for r in results),
    }
    total = len(results)
    bad = [f"{what} {n}/{total}" if total > 1 else what for what, n in counts.items() if n]
    if total > 1 and not bad:
        return f"ok {total}/{total}"
    return ", ".join(bad) or "ok"
