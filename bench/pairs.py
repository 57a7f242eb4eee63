"""Sides measured back to back in alternating order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["alternate", "ratios"]

_T = TypeVar("_T")


def alternate(sides: Sequence[Callable[[], _T]], rounds: int) -> list[list[_T]]:
    """Measure all *sides* in each round, each round in another order; the first round warms up.

    Returns:
        One list of *rounds* values a side.
    """
    values: list[list[_T]] = [[] for _ in sides]
    for number in range(rounds + 1):
        order = list(range(len(sides)))
        if number % 2:
            order.reverse()
        measured = {index: sides[index]() for index in order}
        if number:
            for index, value in measured.items():
                values[index].append(value)
    return values


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """*over* / *under*, pair by pair."""
    return [a / b for a, b in zip(over, under, strict=True)]
