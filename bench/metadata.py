"""Small files inside an open checkpoint: create + write + close, and stats beyond the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from bench import mounts
from bench.clients import Worker, workers
from bench.pairs import alternate
from bench.plan import Place, Plan
from bench.report import Figure, spread

__all__ = ["run"]

FILE_BYTES = 4096
EXPIRY_S = 1.2
"""After it the kernel asks again for what it has cached."""


def run(plan: Plan) -> Iterator[Figure]:
    """Microseconds a file, with the publisher stopped and with it at work."""
    for place in plan.places:
        for is_paused in (True, False):
            with (
                mounts.scratch(place.path) as base,
                mounts.mounted(base) as mount,
                workers() as one,
                mount.paused(is_paused=is_paused),
            ):
                (mount.path / "step-1").mkdir()
                name = f"{place.name}, publisher {'stopped' if is_paused else 'at work'}"
                yield from _creates(plan, place, name, mount, one[0])
                yield from _stats(plan, name, mount, one[0])


def _creates(
    plan: Plan, place: Place, name: str, mount: mounts.Mount, client: Worker
) -> Iterator[Figure]:
    files, numbers = plan.sizes.files, count()
    with mounts.scratch(place.path) as plain:

        def measure(parent: Path) -> float:
            directory = parent / f"d{next(numbers)}"
            directory.mkdir()
            mount.settle(files * FILE_BYTES)
            return client.seconds("create", directory=directory, count=files, size=FILE_BYTES)

        sides = [lambda: measure(plain), lambda: measure(mount.path / "step-1")]
        natives, throughs = alternate(sides, plan.sizes.pairs)
    beyond = [(b - a) / files * 1e6 for a, b in zip(natives, throughs, strict=True)]
    note = f"native {sum(natives) / len(natives) / files * 1e6:.0f} us"
    title = f"create + 4 KiB + close, {name}"
    yield spread("metadata", title, beyond, "us", at_most=200, note=note)


def _stats(plan: Plan, name: str, mount: mounts.Mount, client: Worker) -> Iterator[Figure]:
    files = plan.sizes.files
    directory = mount.path / "step-1" / "looked-at"
    directory.mkdir()
    client.seconds("create", directory=directory, count=files, size=FILE_BYTES)
    cold: list[float] = []
    hot: list[float] = []
    for _ in range(plan.sizes.pairs):
        mount.settle(0)
        time.sleep(EXPIRY_S)
        cold.append(client.seconds("stat", directory=directory, count=files) / files * 1e6)
        hot.append(client.seconds("stat", directory=directory, count=files) / files * 1e6)
    yield spread("metadata", f"cold stat, {name}", cold, "us", at_most=30)
    yield spread("metadata", f"hot stat, {name}", hot, "us")
