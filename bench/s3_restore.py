"""Restore of a checkpoint that is in a bucket only.

First to files: `ckptgate export` beside other clients that copy as many bytes of the same server
to files in the same place. Then into the memory of those who want it, a process for each file, in
1 MiB calls: through a mount whose spool is empty, from the first open to the last byte; beside it,
other clients copy the files, and then they are read. The gateway compares all with the digests on
the way, the others check what they check.
"""

from __future__ import annotations

import filecmp
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bench import machine, mounts
from bench.clients import Worker, together, workers
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
            seconds = _read(clients, paths)
            used = sum(map(machine.cpu_s, mount.processes)) - before
            self._compare(paths)
            peak = max(map(machine.anonymous_mb, mount.processes))
            return Cost(seconds=seconds, cpu_s=used, peak_mb=peak)

    def by(self, side: Side, *, folder: str = "", is_read: bool = False) -> Callable[[], Cost]:
        """Copy the objects of *folder*, else the plain ones, to new files; read these where asked.

        What reading costs is the readers' own, so only its time counts.
        """
        folder = folder or f"plain-{self.count}"

        def measure() -> Cost:
            with mounts.scratch(self.base) as local, workers(self.count) as clients:
                (local / "out").mkdir()
                machine.fault_in(2 * self.count * self.size)
                files = {f"{folder}/f{n}": local / "out" / f"f{n}" for n in range(self.count)}
                cost = side.move(files)
                if is_read:
                    seconds = cost.seconds + _read(clients, list(files.values()))
                    cost = replace(cost, seconds=seconds)
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
        digests = digests_of(base / "content")
        ours = python_side("ckptgate", "ours_get", server, digests)
        others = _others(server, digests, is_tiny=plan.sizes.pairs == 1)
        limited = [side for side in others if side.name in LIMITS]
        for count in plan.sizes.in_flight:
            restore = _Restore(server, base, base / "content", count)
            restore.prepare()
            race = partial(
                Race,
                subject="s3_restore",
                total=count * plan.sizes.stream,
                limits=LIMITS,
            )
            what = f"{count} x {plan.sizes.stream // MIB} MiB"
            copies = [restore.by(ours, folder=f"{restore.prefix}/step-1")]
            copies += map(restore.by, others)
            names = [ours.name, *(side.name for side in others)]
            yield from race(what=f"{what} to files", names=names).figures(
                alternate(copies, plan.sizes.pairs)
            )
            reads = [restore.through_the_mount]
            reads += [restore.by(side, is_read=True) for side in limited]
            names = [ours.name, *(side.name for side in limited)]
            yield from race(what=f"{what} read", names=names).figures(
                alternate(reads, plan.sizes.pairs)
            )


def _read(clients: Sequence[Worker], paths: Sequence[Path]) -> float:
    """Each client reads a file of these; seconds until all are done."""
    return together(
        [
            (client, {"op": "read", "path": path, "call": MIB})
            for client, path in zip(clients, paths, strict=True)
        ]
    )


def _others(server: NullServer, digests: dict[str, Any], *, is_tiny: bool) -> list[Side]:
    """Those that there are limits to, and (not worth their start in a tiny run) more beside."""
    found = [rclone(server, is_get=True), python_side("s3fs", "s3fs_get", server, digests)]
    if not is_tiny:
        found.append(s5cmd(server, is_get=True))
        found += [python_side(n, f"{n}_get", server, digests) for n in ("boto3", "obstore")]
    return [side for side in found if side is not None]
