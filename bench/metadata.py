"""Small files inside an open checkpoint: create + write + close, and stats beyond the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from bench import bare, mounts
from bench.clients import Worker, workers
from bench.pairs import alternate
from bench.plan import Place, Plan
from bench.report import Figure, spread

__all__ = ["run"]

FILE_BYTES = 4096
EXPIRY_S = 1.2
"""After it the kernel asks again for what it has cached."""


def run(plan: Plan) -> Iterator[Figure]:
    """Microseconds a file, with the publisher stopped and with it at work.

    Beside them two peers: one made with mfusepy, and one that shows what the protocol itself takes
    in Python.
    """
    for place in plan.places:
        for is_paused in (True, False):
            with (
                mounts.scratch(place.path) as base,
                mounts.mounted(base) as mount,
                mounts.peer_mounted(base, bare) as least,
                mounts.peer_mounted(base) as other,
                workers() as one,
                mount.paused(is_paused=is_paused),
            ):
                (mount.path / "step-1").mkdir()
                name = f"{place.name}, publisher {'stopped' if is_paused else 'at work'}"
                sides = [mount.path / "step-1"]
                if is_paused:
                    sides += [least.path, other.path]
                yield from _creates(plan, place, name, mount, sides, one[0])
                yield from _stats(plan, name, mount, sides, one[0])


PEERS = ("", "bare loop: ", "mfusepy: ")
"""The sides in the order of `run`; only the gateway's own figure has a limit."""


def _creates(
    plan: Plan, place: Place, name: str, mount: mounts.Mount, sides: list[Path], client: Worker
) -> Iterator[Figure]:
    files, numbers = plan.sizes.files, count()
    with mounts.scratch(place.path) as plain:

        def measure(parent: Path) -> float:
            directory = parent / f"d{next(numbers)}"
            directory.mkdir()
            mount.settle(files * FILE_BYTES)
            return client.seconds("create", directory=directory, count=files, size=FILE_BYTES)

        natives, *throughs = alternate(
            [partial(measure, parent) for parent in (plain, *sides)], plan.sizes.pairs
        )
    note = f"native {sum(natives) / len(natives) / files * 1e6:.0f} us"
    title = f"create + 4 KiB + close, {name}"
    for peer, through in zip(PEERS, throughs, strict=False):
        beyond = [(b - a) / files * 1e6 for a, b in zip(natives, through, strict=True)]
        limit = None if peer else 200
        yield spread("metadata", f"{peer}{title}", beyond, "us", at_most=limit, note=note)


def _stats(
    plan: Plan, name: str, mount: mounts.Mount, sides: list[Path], client: Worker
) -> Iterator[Figure]:
    files = plan.sizes.files
    directories = [side / "looked-at" for side in sides]
    for directory in directories:
        directory.mkdir()
        client.seconds("create", directory=directory, count=files, size=FILE_BYTES)
    hot: list[float] = []

    def measure(directory: Path) -> float:
        mount.settle(0)
        time.sleep(EXPIRY_S)
        cold_s = client.seconds("stat", directory=directory, count=files)
        if directory == directories[0]:
            hot.append(client.seconds("stat", directory=directory, count=files) / files * 1e6)
        return cold_s / files * 1e6

    colds = alternate([partial(measure, directory) for directory in directories], plan.sizes.pairs)
    for peer, cold in zip(PEERS, colds, strict=False):
        limit = None if peer else 30
        yield spread("metadata", f"{peer}cold stat, {name}", cold, "us", at_most=limit)
    yield spread("metadata", f"hot stat, {name}", hot, "us")
