"""Figures, their limits, and how they are shown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Figure", "as_json", "header", "line", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure.

    Attributes:
        subject: module that measured it.
        name: what was measured, where.
        value: the median where there were several measurements.
        low, high: the extremes; equal to `value` where there was one measurement.
        unit: `x` is a ratio of speeds, more is faster.
        limit: what is asked for; None where the figure only stands beside another one.
        is_floor: the limit is the least that is allowed, else it is the most.
        note: what belongs to the figure.
    """

    subject: str
    name: str
    value: float
    low: float
    high: float
    unit: str
    limit: float | None = None
    is_floor: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.is_floor else self.value <= self.limit


def spread(
    subject: str,
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Figure:
    """The figure of several measurements: their median and extremes."""
    return Figure(
        subject=subject,
        name=name,
        value=statistics.median(values),
        low=min(values),
        high=max(values),
        unit=unit,
        limit=at_most if at_least is None else at_least,
        is_floor=at_least is not None,
        note=note,
    )


def header() -> str:
    """The table's head."""
    head = f"{'subject':<13} {'figure':<44} {'median':>9} {'min..max':>19} {'unit':<6}"
    return f"{head} {'limit':>9}  result"


def line(figure: Figure) -> str:
    """One row of the table."""
    several = f"{_number(figure.low)}..{_number(figure.high)}" if figure.low < figure.high else ""
    limit = ""
    if figure.limit is not None:
        limit = f"{'>=' if figure.is_floor else '<='} {_number(figure.limit)}"
    verdict = {True: "met", False: "NOT MET", None: ""}[figure.is_met]
    row = f"{figure.subject:<13} {figure.name:<44} {_number(figure.value):>9} {several:>19}"
    tail = " ".join(word for word in (verdict, figure.note and f"({figure.note})") if word)
    return f"{row} {figure.unit:<6} {limit:>9}  {tail}".rstrip()


def as_json(figures: Sequence[Figure], **about: Any) -> str:
    """All figures, and what is known of the machine, as one JSON document."""
    rows = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
    return json.dumps({**about, "figures": rows}, indent=1)


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"
