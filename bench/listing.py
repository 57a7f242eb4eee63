"""A large directory: its names, and its names with attributes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench import mounts
from bench.clients import workers
from bench.metadata import EXPIRY_S
from bench.plan import Plan
from bench.report import Figure, spread

__all__ = ["run"]


def run(plan: Plan) -> Iterator[Figure]:
    """Seconds of a listing, each after the kernel's cache expired."""
    place, entries = plan.disk, plan.sizes.entries
    with (
        mounts.scratch(place.path) as base,
        mounts.mounted(base) as mount,
        workers() as one,
        mount.paused(),
    ):
        directory = mount.path / "step-1" / "large"
        directory.mkdir(parents=True)
        made = one[0].seconds("create", directory=directory, count=entries, size=0)
        names: list[float] = []
        long: list[float] = []
        for _ in range(plan.sizes.pairs):
            mount.settle(0)
            time.sleep(EXPIRY_S)
            names.append(one[0].seconds("list", directory=directory))
            time.sleep(EXPIRY_S)
            long.append(one[0].seconds("list_long", directory=directory))
        title = f"{place.name}: {entries} entries"
        note = f"made in {made:.1f} s"
        yield spread("listing", f"{title}, names", names, "s", at_most=2.0, note=note)
        yield spread("listing", f"{title}, with attributes", long, "s")
