"""Sequential writes through the mount, with passthrough, against the spool's own file system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from bench import machine, mounts
from bench.clients import Worker, together, workers
from bench.pairs import alternate, ratios
from bench.plan import GIB, MIB, Place, Plan
from bench.report import Figure, spread

__all__ = ["run", "writing"]

CASES = (
    ("1 MiB", MIB, 1, 0.95),
    ("1 MiB", MIB, 2, 0.95),
    ("64 KiB", 64 << 10, 1, 0.95),
    ("64 KiB", 64 << 10, 2, 0.95),
    ("4 KiB", 4 << 10, 1, 0.8),
    ("4 KiB", 4 << 10, 2, 0.8),
)


def run(plan: Plan) -> Iterator[Figure]:
    """Ratios of speed, and the CPU of the mount's process."""
    for place in plan.places:
        with mounts.scratch(place.path) as base, mounts.mounted(base) as mount, workers(2) as both:
            (mount.path / "step-1").mkdir()
            with mount.paused():
                yield from _cases(plan, place, mount, both)
            yield from _beside_digests(plan, place, mount, both)


def writing(
    clients: list[Worker],
    directory: Path,
    call: int,
    size: int,
    settle: Callable[[int], None],
    *,
    server: int = 0,
    used: list[float] | None = None,
) -> Callable[[], float]:
    """A side of a pair: seconds in which each client writes a new file of *size* bytes.

    Args:
        clients: who writes.
        directory: where.
        call: bytes of a call.
        size: bytes of a file.
        settle: called before each measurement with the bytes that come.
        server: process whose CPU is counted, to the RELEASE; the removal isn't.
        used: gets its CPU seconds.
    """
    numbers = count()

    def measure() -> float:
        paths = [directory / f"stream-{next(numbers)}.bin" for _ in clients]
        settle(size * len(clients))
        asked = [
            (client, {"op": "write", "path": path, "call": call, "size": size})
            for client, path in zip(clients, paths, strict=True)
        ]
        before = machine.cpu_s(server) if server else 0.0
        seconds = together(asked)
        if used is not None:
            machine.wait_idle((server,))
            used.append(machine.cpu_s(server) - before)
        for path in paths:
            path.unlink()
        return seconds

    return measure


def _cases(plan: Plan, place: Place, mount: mounts.Mount, both: list[Worker]) -> Iterator[Figure]:
    for name, call, writers, limit in CASES:
        size = plan.sizes.stream // writers
        used: list[float] = []
        chosen = both[:writers]
        native = writing(chosen, mount.spool, call, size, mount.settle)
        through = writing(
            chosen,
            mount.path / "step-1",
            call,
            size,
            mount.settle,
            server=mount.server,
            used=used,
        )
        natives, throughs = alternate([native, through], plan.sizes.pairs)
        title = f"{place.name}: {name} calls, {_writers(writers)}"
        yield spread("write", title, ratios(natives, throughs), "x", at_least=limit)
        per_gib = [seconds * GIB / (size * writers) for seconds in used[1:]]
        yield spread("write", f"{title}: CPU of the mount", per_gib, "s/GiB", at_most=0.02)


def _beside_digests(
    plan: Plan, place: Place, mount: mounts.Mount, both: list[Worker]
) -> Iterator[Figure]:
    """As a trainer sees it: shard after shard, while the publisher digests the one before."""
    size, shards = plan.sizes.stream // 4, 4
    client = both[0]
    numbers = count()

    def measure(directory: Path) -> float:
        mount.settle(size * shards)
        paths = [directory / f"shard-{next(numbers)}.bin" for _ in range(shards)]
        seconds = sum(client.seconds("write", path=path, call=MIB, size=size) for path in paths)
        mount.settle(0)
        for path in paths:
            path.unlink()
        return seconds

    before = machine.cpu_s(mount.publisher)
    sides = [lambda: measure(mount.spool), lambda: measure(mount.path / "step-1")]
    natives, throughs = alternate(sides, plan.sizes.pairs)
    used = machine.cpu_s(mount.publisher) - before
    title = f"{place.name}: 1 MiB calls, {shards} shards, publisher at work"
    note = "digests use the other core and the memory's bandwidth"
    yield spread("write", title, ratios(natives, throughs), "x", note=note)
    per_gib = used * GIB / (size * shards * (plan.sizes.pairs + 1))
    yield spread("write", f"{place.name}: CPU of the digests", [per_gib], "s/GiB")


def _writers(number: int) -> str:
    return "one writer" if number == 1 else f"{number} writers"
