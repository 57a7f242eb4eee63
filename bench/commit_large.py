"""Digest, move or copy, and commit of a large checkpoint, against b3sum and cp + fsync alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench import machine, mounts
from bench.clients import workers
from bench.commits import commit_s, copy_s, digest_s, stage_shards, staged_shards
from bench.plan import GIB, Place, Plan
from bench.report import Figure, spread

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    spool: Place
    store: Place
    verify: str
    limit: float | None


def run(plan: Plan) -> Iterator[Figure]:
    """How many times as long as the longer of the two it takes."""
    memory, disk = plan.memory, plan.disk
    cases = (
        _Case(f"moved on {disk.name}", disk, disk, "size", 1.3),
        _Case(f"copied from {memory.name} to {disk.name}", memory, disk, "size", 1.3),
        _Case(f"copied from {memory.name} to {disk.name}", memory, disk, "readback", None),
    )
    for case in cases:
        rounds = [_one(plan, case, number) for number in range(plan.sizes.commits)]
        times = [took / max(digest, copy) for took, digest, copy in rounds]
        middle = sorted(rounds)[len(rounds) // 2]
        note = "{:.2f} s, b3sum {:.2f} s, cp + fsync {:.2f} s".format(*middle)
        title = f"{plan.sizes.commit / GIB:g} GiB {case.name}, verify = {case.verify}"
        yield spread("commit_large", title, times, "times", at_most=case.limit, note=note)


def _one(plan: Plan, case: _Case, number: int) -> tuple[float, float, float]:
    """Seconds of the commit, of b3sum, and of cp + fsync."""
    size = plan.sizes.commit
    alone: list[float] = []
    with (
        mounts.scratch(case.spool.path) as base,
        mounts.scratch(case.store.path) as store,
        mounts.mounted(
            base, store=store / "store", config=f'verify = "{case.verify}"\n{mounts.CONFIG}'
        ) as mount,
        workers() as one,
    ):

        def measure_alone() -> None:
            paths = staged_shards(mount, size)
            alone.append(digest_s(paths))
            machine.settle(size)
            alone.append(copy_s(paths, case.store.path))
            machine.settle(size)

        is_first = number % 2 == 0
        took = commit_s(
            mount,
            one[0],
            lambda: stage_shards(mount, one[0], size),
            before=measure_alone if is_first else lambda: machine.settle(size),
        )
        if not is_first:
            mount.settle(size)
            measure_alone()
    return took, alone[0], alone[1]
