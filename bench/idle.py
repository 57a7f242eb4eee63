"""CPU of all processes of a mount with nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench import machine, mounts
from bench.clients import workers
from bench.plan import Plan
from bench.report import Figure, spread

__all__ = ["run"]

DEFAULTS = "[room]\nfree_min_share = 0.0\n"


def run(plan: Plan) -> Iterator[Figure]:
    """Percent of one core: just mounted, and with a committed and an open checkpoint."""
    with (
        mounts.scratch(plan.disk.path) as base,
        mounts.mounted(base, config=DEFAULTS) as mount,
        workers() as one,
    ):
        yield _figure(plan, mount, "just mounted")
        for name in ("step-1", "step-2"):
            (mount.path / name).mkdir()
            one[0].seconds("create", directory=mount.path / name, count=10, size=4096)
        one[0].seconds("commit", directory=mount.path / "step-1")
        mounts.until("the checkpoint is published", (mount.store / "step-1").exists)
        yield _figure(plan, mount, "one checkpoint committed, one open")


def _figure(plan: Plan, mount: mounts.Mount, state: str) -> Figure:
    machine.wait_idle(mount.processes)
    # What follows a change (a look at the disk, a checkpoint of the database) isn't idleness.
    time.sleep(min(3.0, plan.sizes.idle_s))
    processes = mount.processes
    before = sum(map(machine.cpu_s, processes))
    time.sleep(plan.sizes.idle_s)
    used = sum(map(machine.cpu_s, processes)) - before
    title = f"{plan.disk.name}: {state}"
    return spread("idle", title, [used / plan.sizes.idle_s * 100], "%", at_most=0.5)
