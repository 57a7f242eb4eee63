"""Restore of a checkpoint that is in a bucket only, through a mount whose spool is empty.

What is timed is from the first open until the last byte was read, in 1 MiB calls, by a process for
each file; every chunk is compared with its digest on the way. Beside it, other clients copy as many
bytes of the same server to files in the same place, and check what they check.
"""

from __future__ import annotations

import filecmp
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bench import machine, mounts
from bench.clients import together, workers
from bench.pairs import alternate
from bench.plan import MIB, Plan
from bench.report import Figure
from bench.s3_race import Limit, Race
from bench.s3_servers import BUCKET, CREDENTIALS, NullServer, content_file, null_server
from bench.s3_sides import Cost, Side, digests_of, python_side, rclone, s5cmd

__all__ = ["run"]

LIMITS = {name: Limit(rate=1.0) for name in ("rclone", "s3fs")}
MANIFEST = "step-1/.ckptgate/manifest.json"


@dataclass
class _Restore:
    """*count* files of the same bytes: a checkpoint in the bucket, and plain objects beside it."""

    server: NullServer
    base: Path
    content: Path
    count: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def prefix(self) -> str:
        return f"restore-{self.count}"

    @property
    def size(self) -> int:
        return self.content.stat().st_size

    def prepare(self) -> None:
        """Save the checkpoint through a mount, and upload the plain objects."""
        with mounts.scratch(self.base) as local, self._mounted(local) as mount:
            step = mount.path / "step-1"
            step.mkdir()
            for number in range(self.count):
                shutil.copyfile(self.content, step / f"f{number}")
            os.setxattr(step, "user.ckptgate.commit", b"all")
            key = f"{self.prefix}/{MANIFEST}"
            mounts.until("the checkpoint is published", lambda: self.server.size(key) >= 0)
        with mounts.scratch(self.base) as local:
            files = {f"plain-{self.count}/f{n}": local / f"f{n}" for n in range(self.count)}
            for path in files.values():
                os.link(self.content, path)
            side = python_side("boto3", "boto3_put", self.server, digests_of(self.content))
            side.move(files)

    def through_the_mount(self) -> Cost:
        """Mount with an empty spool and read all of it."""
        with (
            mounts.scratch(self.base) as local,
            self._mounted(local) as mount,
            workers(self.count) as clients,
        ):
            machine.fault_in(2 * self.count * self.size)
            paths = [mount.path / "step-1" / f"f{n}" for n in range(self.count)]
            assert all(path.stat().st_size == self.size for path in paths)
            before = sum(map(machine.cpu_s, mount.processes))
            requests = [
                (client, {"op": "read", "path": path, "call": MIB})
                for client, path in zip(clients, paths, strict=True)
            ]
            seconds = together(requests)
            used = sum(map(machine.cpu_s, mount.processes)) - before
            self._compare(paths)
            peak = max(map(machine.anonymous_mb, mount.processes))
            return Cost(seconds=seconds, cpu_s=used, peak_mb=peak)

    def by(self, side: Side) -> Callable[[], Cost]:
        """Copy the plain objects to new files."""

        def measure() -> Cost:
            with mounts.scratch(self.base) as local:
                machine.fault_in(2 * self.count * self.size)
                files = {f"plain-{self.count}/f{n}": local / f"f{n}" for n in range(self.count)}
                cost = side.move(files)
                self._compare(list(files.values()))
                return cost

        return measure

    def _compare(self, paths: list[Path]) -> None:
        """No figure of who read something else."""
        for path in paths:
            if not filecmp.cmp(path, self.content, shallow=False):
                msg = f"{path.name} has other bytes than were stored"
                raise RuntimeError(msg)

    def _mounted(self, local: Path) -> AbstractContextManager[mounts.Mount]:
        return mounts.mounted(local, store=f"s3://{BUCKET}/{self.prefix}")


def run(plan: Plan) -> Iterator[Figure]:
    """Rates and CPU by the number of files that are read at once."""
    with (
        mounts.scratch(plan.memory.path) as base,
        null_server(content_file(base / "content", plan.sizes.stream)) as server,
        mock.patch.dict(os.environ, {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}),
    ):
        others = _others(server, digests_of(base / "content"), is_tiny=plan.sizes.pairs == 1)
        names = ["ckptgate", *(side.name for side in others)]
        for count in plan.sizes.in_flight:
            restore = _Restore(server, base, base / "content", count)
            restore.prepare()
            measured = [restore.through_the_mount, *map(restore.by, others)]
            costs = alternate(measured, plan.sizes.pairs)
            what = f"{count} x {plan.sizes.stream // MIB} MiB"
            total = count * plan.sizes.stream
            yield from Race(
                subject="s3_restore", what=what, total=total, names=names, limits=LIMITS
            ).figures(costs)


def _others(server: NullServer, digests: dict[str, Any], *, is_tiny: bool) -> list[Side]:
    """Those that there are limits to, and (not worth their start in a tiny run) more beside."""
    found = [rclone(server, is_get=True), python_side("s3fs", "s3fs_get", server, digests)]
    if not is_tiny:
        found.append(s5cmd(server, is_get=True))
        found += [python_side(n, f"{n}_get", server, digests) for n in ("boto3", "obstore")]
    return [side for side in found if side is not None]
