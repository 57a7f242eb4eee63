"""Shared by the subjects that commit: a checkpoint is staged, then published at a known moment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import mounts
from bench.clients import Worker
from bench.plan import MIB

__all__ = ["SHARDS", "commit_s", "copy_s", "digest_s", "stage_shards", "staged_shards"]

SHARDS = 8


def stage_shards(mount: mounts.Mount, client: Worker, size: int) -> Path:
    """Write *size* bytes in 8 shards of a checkpoint; its directory."""
    directory = mount.path / "step-1"
    directory.mkdir()
    for number in range(SHARDS):
        path = directory / f"shard-{number}.bin"
        client.seconds("write", path=path, call=MIB, size=size // SHARDS)
    return directory


def staged_shards(mount: mounts.Mount, size: int) -> list[Path]:
    """The spool's files of shards of *size* bytes in all; none else has as many."""
    found = (path for path in mount.spool.rglob("*") if path.is_file())
    return [path for path in found if path.stat().st_size == size // SHARDS]


def commit_s(
    mount: mounts.Mount,
    client: Worker,
    stage: Callable[[], Path],
    before: Callable[[], None] = lambda: None,
) -> float:
    """Seconds from the publisher's first look at a staged checkpoint until it is published.

    Args:
        mount: whose publisher is stopped while the checkpoint is staged.
        client: says that it is complete.
        stage: writes it, returns its directory.
        before: called when all is staged and nothing runs.
    """
    with mount.paused():
        directory = stage()
        client.seconds("commit", directory=directory)
        before()
        mount.settle(0)
        began = time.monotonic()
    mounts.until("the checkpoint is published", (mount.store / directory.name).exists)
    return time.monotonic() - began


def digest_s(paths: Iterable[Path]) -> float:
    """Seconds that b3sum takes for these files."""
    began = time.monotonic()
    subprocess.run(["b3sum", *paths], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def copy_s(paths: Iterable[Path], place: Path) -> float:
    """Seconds that cp and fsync take to copy these files to the file system of *place*."""
    with mounts.scratch(place) as target:
        began = time.monotonic()
        subprocess.run(["cp", *paths, target], check=True)
        subprocess.run(["sync", *target.iterdir(), target], check=True)
        return time.monotonic() - began
