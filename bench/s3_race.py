"""Figures of clients that moved the same bytes: rates, CPU, the first one's over the others'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.pairs import ratios
from bench.plan import GIB
from bench.report import Figure, spread
from bench.s3_sides import Cost

__all__ = ["Limit", "Race"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What is asked of the first side beside another one.

    Attributes:
        rate: at least so many times the other's.
        cpu: at most so many times the other's; None where it isn't limited.
    """

    rate: float
    cpu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What was moved, and by whom.

    Attributes:
        subject: of the figures.
        what: how their names begin.
        total: bytes that each side moved each time.
        names: of the sides; the first is the gateway's.
        limits: by the name of the other side.
    """

    subject: str
    what: str
    total: int
    names: Sequence[str]
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])

    def figures(self, costs: Sequence[Sequence[Cost]]) -> Iterator[Figure]:
        """*costs*: of each side, in the order of rounds."""
        for name, each in zip(self.names, costs, strict=True):
            rates = [self.total / 1e6 / cost.seconds for cost in each]
            yield spread(self.subject, f"{self.what}: {name}", rates, "MB/s")
            used = [cost.cpu_s * GIB / self.total for cost in each]
            yield spread(self.subject, f"{self.what}: {name}, CPU", used, "s/GiB")
        first = costs[0]
        for name, each in zip(self.names[1:], costs[1:], strict=True):
            limit = self.limits.get(name)
            times = ratios([cost.seconds for cost in each], [cost.seconds for cost in first])
            yield spread(
                self.subject, f"{self.what}: rate over {name}'s", times, "x",
                at_least=limit.rate if limit else None,
            )  # fmt: skip
            shares = ratios([cost.cpu_s for cost in first], [cost.cpu_s for cost in each])
            yield spread(
                self.subject, f"{self.what}: CPU over {name}'s", shares, "times",
                at_most=limit.cpu if limit else None,
            )  # fmt: skip
