"""Reading and mapping files through the mount, staged ones and verified ones.

The native side reads the very file that the mount passes through to: what is compared is the path,
not how two files happen to lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bench import mounts
from bench.clients import Worker, workers
from bench.pairs import alternate, ratios
from bench.plan import MIB, Plan
from bench.report import Figure, spread

__all__ = ["run"]

CASES = (
    ("read", "read, 1 MiB calls", MIB),
    ("read", "read, 64 KiB calls", 64 << 10),
    ("map", "mmap", MIB),
)


def run(plan: Plan) -> Iterator[Figure]:
    """Ratios of speed."""
    for place in plan.places:
        with mounts.scratch(place.path) as base, mounts.mounted(base) as mount, workers() as one:
            client, size = one[0], plan.sizes.stream
            through = mount.path / "step-1" / "shard.bin"
            through.parent.mkdir()
            client.seconds("write", path=through, call=MIB, size=size)
            with mount.paused():
                staged = mount.staged(size)
                yield from _cases(plan, f"{place.name}: staged", mount, client, staged, through)
            client.seconds("commit", directory=through.parent)
            published = mount.store / "step-1" / "shard.bin"
            mounts.until("the checkpoint is published", published.exists)
            with mount.paused():
                name = f"{place.name}: verified"
                yield from _cases(plan, name, mount, client, mount.staged(size), through)


def _cases(
    plan: Plan, title: str, mount: mounts.Mount, client: Worker, native: Path, through: Path
) -> Iterator[Figure]:
    for op, name, call in CASES:
        sides = [_reading(client, mount, op, path, call) for path in (native, through)]
        plain, passed = alternate(sides, plan.sizes.pairs)
        yield spread("read", f"{title}, {name}", ratios(plain, passed), "x", at_least=0.95)


def _reading(
    client: Worker, mount: mounts.Mount, op: str, path: Path, call: int
) -> Callable[[], float]:
    def measure() -> float:
        mount.settle(0)
        return client.seconds(op, path=path, call=call)

    return measure
