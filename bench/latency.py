"""What a trainer waits for while much is being digested and uploaded: single stats and creates."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench import mounts
from bench.clients import Worker, workers
from bench.commits import stage_shards
from bench.plan import GIB, Place, Plan
from bench.report import Figure

__all__ = ["run"]

INTERVAL_S = 0.001
FILES_MIN = 2_000
"""One stat every `INTERVAL_S`: when its turn comes again, what the kernel knew has expired."""


def run(plan: Plan) -> Iterator[Figure]:
    """The 99th percentiles, each way between memory and disk."""
    for spool, store in ((plan.disk, plan.memory), (plan.memory, plan.disk)):
        with workers(2) as (client, watcher):
            yield from _one(plan, spool, store, client, watcher)


def _one(
    plan: Plan, spool: Place, store: Place, client: Worker, watcher: Worker
) -> Iterator[Figure]:
    files = max(FILES_MIN, plan.sizes.files) if plan.sizes.files >= 100 else plan.sizes.files
    with (
        mounts.scratch(spool.path) as base,
        mounts.scratch(store.path) as other,
        mounts.mounted(base, store=other / "store") as mount,
    ):
        watched = mount.path / "step-0"
        watched.mkdir()
        client.seconds("create", directory=watched, count=files, size=0)
        mount.settle(0)
        with mount.paused():
            directory = stage_shards(mount, client, plan.sizes.upload)
            client.seconds("commit", directory=directory)
            mount.settle(plan.sizes.upload)
            watcher.begin("sample", directory=watched, count=files, interval_s=INTERVAL_S)
            began = time.monotonic()
        mounts.until("the checkpoint is published", (mount.store / "step-1").exists)
        took = time.monotonic() - began
        watcher.tell("")
        samples = watcher.end()["result"]
    way = f"{plan.sizes.upload / GIB:g} GiB, {spool.name} to {store.name}"
    note = f"{len(samples['stats'])} in {took:.1f} s"
    yield _tail("stat", way, samples["stats"], 5.0, note)
    yield _tail("create", way, samples["creates"], None, f"{len(samples['creates'])} samples")


def _tail(call: str, way: str, seconds: list[float], limit: float | None, note: str) -> Figure:
    """The 99th percentile with median and maximum as extremes."""
    ordered = sorted(seconds) or [0.0]
    middle, late = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return Figure(
        subject="latency",
        name=f"p99 of {call} (median..max), {way}",
        value=late * 1e3,
        low=middle * 1e3,
        high=ordered[-1] * 1e3,
        unit="ms",
        limit=limit,
        note=note,
    )
