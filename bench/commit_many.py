"""Commit of a checkpoint of many small files, on a local disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench import mounts
from bench.clients import Worker, workers
from bench.commits import commit_s
from bench.metadata import FILE_BYTES
from bench.plan import Plan
from bench.report import Figure, spread

__all__ = ["run"]


def run(plan: Plan) -> Iterator[Figure]:
    """Seconds until it is published, none of it digested before."""
    values = [_one(plan) for _ in range(plan.sizes.commits)]
    title = f"{plan.disk.name}: {plan.sizes.many} files of 4 KiB"
    yield spread("commit_many", title, values, "s", at_most=10.0)


def _one(plan: Plan) -> float:
    with mounts.scratch(plan.disk.path) as base, mounts.mounted(base) as mount, workers() as one:
        return commit_s(mount, one[0], lambda: _stage(plan, mount, one[0]))


def _stage(plan: Plan, mount: mounts.Mount, client: Worker) -> Path:
    directory = mount.path / "step-1"
    directory.mkdir()
    client.seconds("create", directory=directory, count=plan.sizes.many, size=FILE_BYTES)
    return directory
