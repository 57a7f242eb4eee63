"""Anonymous memory of the two processes while a large checkpoint is written and digested."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from bench import machine, mounts
from bench.clients import workers
from bench.plan import GIB, MIB, Plan
from bench.report import Figure, spread

__all__ = ["run"]

SHARDS = 20
INTERVAL_S = 0.1
RESERVE_BYTES = 4 * GIB


def run(plan: Plan) -> Iterator[Figure]:
    """The most that mount and publisher had at any moment, together."""
    size = max(min(plan.sizes.open, machine.free_bytes(plan.disk.path) - RESERVE_BYTES), SHARDS)
    shard = size // SHARDS // MIB * MIB or MIB
    with (
        mounts.scratch(plan.disk.path) as base,
        mounts.mounted(base) as mount,
        workers() as one,
    ):
        samples: list[tuple[float, float]] = []
        is_over = threading.Event()

        def watch() -> None:
            while True:
                pair = (mount.server, mount.publisher)
                samples.append((machine.anonymous_mb(pair[0]), machine.anonymous_mb(pair[1])))
                if is_over.wait(INTERVAL_S):
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            (mount.path / "step-1").mkdir()
            for number in range(SHARDS):
                path = mount.path / "step-1" / f"shard-{number}.bin"
                one[0].seconds("write", path=path, call=MIB, size=shard)
            machine.wait_idle((mount.server, mount.publisher), for_s=0.5, timeout_s=300)
        finally:
            is_over.set()
            watcher.join()
        sums = [a + b for a, b in samples]
        most = max(sums)
        server, publisher = samples[sums.index(most)]
    title = f"{plan.disk.name}: {shard * SHARDS / GIB:.1f} GiB open, peak"
    note = f"mount {server:.0f}, publisher {publisher:.0f}"
    yield spread("memory", title, [most], "MB", at_most=150, note=note)
