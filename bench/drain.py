"""`ckptgate drain` of a staged checkpoint, against the store alone: cp + fsync, a plain upload.

Nothing is digested or sent before the drain begins: what is measured is all that a node still has
to do that is told to end right after a save. What the command takes where nothing is left, mostly
the start of Python, is taken off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from bench import machine, mounts
from bench.clients import Worker, workers
from bench.commits import SHARDS, copy_s, stage_shards, staged_shards
from bench.pairs import ratios
from bench.plan import GIB, Place, Plan
from bench.report import Figure, spread
from bench.s3_servers import BUCKET, CREDENTIALS, S3Server, content_file, null_server
from bench.s3_sides import digests_of, python_side

__all__ = ["run"]

LIMIT = 0.9
TIMEOUT_S = "600"


@dataclass
class _Race:
    """Seconds of each drain, of CPU in the mount's processes by it, and of the store alone."""

    drains: list[float] = field(default_factory=list[float])
    used: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])

    def figures(self, title: str, size: int) -> Iterator[Figure]:
        for name, times in (("drain", self.drains), ("the store alone", self.alone)):
            rates = [size / 1e6 / seconds for seconds in times]
            yield spread("drain", f"{title}: {name}", rates, "MB/s")
        per_gib = [seconds * GIB / size for seconds in self.used]
        note = "digests among it, which the store alone has not to make"
        yield spread("drain", f"{title}: CPU of the drain", per_gib, "s/GiB", note=note)
        values = ratios(self.alone, self.drains)
        yield spread("drain", f"{title}: drain over it", values, "x", at_least=LIMIT)


def run(plan: Plan) -> Iterator[Figure]:
    """Ratios of rates."""
    size = plan.sizes.commit
    title = f"{size / GIB:g} GiB from {plan.memory.name} to"
    yield from _to_disk(plan, size).figures(f"{title} {plan.disk.name}", size)
    yield from _to_bucket(plan, size).figures(f"{title} S3", size)


def _to_disk(plan: Plan, size: int) -> _Race:
    race = _Race()
    for number in range(plan.sizes.commits):
        with (
            mounts.scratch(plan.memory.path) as base,
            mounts.scratch(plan.disk.path) as store,
            mounts.mounted(base, store=store / "store") as mount,
        ):

            def alone(mount: mounts.Mount = mount, place: Place = plan.disk) -> float:
                return copy_s(staged_shards(mount, size), place.path)

            _pair(race, mount, size, alone, is_first=number % 2 == 0)
    return race


def _to_bucket(plan: Plan, size: int) -> _Race:
    race = _Race()
    with mounts.scratch(plan.memory.path) as shared:
        content = content_file(shared / "content", size // SHARDS)
        with (
            null_server(content) as server,
            mock.patch.dict(os.environ, {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}),
        ):
            alone = _uploading(server, shared, content)
            for number in range(plan.sizes.commits):
                with (
                    mounts.scratch(plan.memory.path) as base,
                    mounts.mounted(base, store=f"s3://{BUCKET}/drained-{number}") as mount,
                ):
                    _pair(race, mount, size, alone, is_first=number % 2 == 0)
    return race


def _uploading(server: S3Server, base: Path, content: Path) -> Callable[[], float]:
    """Seconds of an upload of as many files by the gateway's client alone."""
    side = python_side("ckptgate", "ours_put", server, digests_of(content))

    def measure() -> float:
        with mounts.scratch(base) as local:
            files = {f"alone/{local.name}/f{n}": local / f"f{n}" for n in range(SHARDS)}
            for path in files.values():
                os.link(content, path)
            return side.move(files).seconds

    return measure


def _pair(
    race: _Race, mount: mounts.Mount, size: int, alone: Callable[[], float], *, is_first: bool
) -> None:
    """One drain, and the store alone before or after it."""

    def before() -> None:
        if is_first:
            race.alone.append(alone())
        machine.settle(size)

    with workers() as one:
        seconds, used = _drain(mount, one[0], size, before)
    race.drains.append(seconds)
    race.used.append(used)
    if not is_first:
        mount.settle(size)
        race.alone.append(alone())


def _drain(
    mount: mounts.Mount, client: Worker, size: int, before: Callable[[], None]
) -> tuple[float, float]:
    """Seconds from the publisher's first look at a staged checkpoint to the end of the drain.

    And the CPU seconds of the mount's processes meanwhile.
    """
    nothing_s = _command_s(mount)
    with mount.paused():
        directory = stage_shards(mount, client, size)
        client.seconds("commit", directory=directory)
        before()
        used_s = sum(map(machine.cpu_s, mount.processes))
    seconds = max(_command_s(mount) - nothing_s, 1e-3)
    return seconds, sum(map(machine.cpu_s, mount.processes)) - used_s


def _command_s(mount: mounts.Mount) -> float:
    began = time.monotonic()
    words = ["drain", str(mount.path), "--timeout", TIMEOUT_S]
    command = [sys.executable, "-m", "ckptgate.app.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"ckptgate drain ended with {done.returncode}: {done.stderr.strip()}"
        raise RuntimeError(msg)
    return time.monotonic() - began
