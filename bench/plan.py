"""What a run does: where, how much, how often."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import machine

__all__ = ["FULL", "GIB", "MIB", "QUICK", "TINY", "Place", "Plan", "Sizes", "places"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        pairs: pairs of which the median is taken.
        stream: bytes of a large sequential file.
        small_stream: bytes of one that is written without passthrough.
        files: small files that are created and looked at.
        entries: of the directory that is listed.
        upload: bytes under digest and upload while latencies are sampled.
        commit: bytes of a large checkpoint, in 8 shards.
        commits: pairs of its commit.
        many: files of a checkpoint of small files.
        members: most members of a simulated checkpoint.
        open: bytes of the checkpoint whose memory is watched.
        idle_s: seconds without anything to do.
        in_flight: files that are moved to or from S3 at once.
    """

    pairs: int
    stream: int
    small_stream: int
    files: int
    entries: int
    upload: int
    commit: int
    commits: int
    many: int
    members: int
    open: int
    idle_s: float
    in_flight: tuple[int, ...]


FULL: Final = Sizes(
    pairs=5,
    stream=1 * GIB,
    small_stream=128 * MIB,
    files=5_000,
    entries=100_000,
    upload=8 * GIB,
    commit=4 * GIB,
    commits=5,
    many=10_000,
    members=4_096,
    open=20 * GIB,
    idle_s=30.0,
    in_flight=(1, 4),
)
QUICK: Final = Sizes(
    pairs=3,
    stream=256 * MIB,
    small_stream=32 * MIB,
    files=500,
    entries=5_000,
    upload=1 * GIB,
    commit=512 * MIB,
    commits=1,
    many=1_000,
    members=64,
    open=1 * GIB,
    idle_s=5.0,
    in_flight=(1, 4),
)
TINY: Final = Sizes(
    pairs=1,
    stream=2 * MIB,
    small_stream=1 * MIB,
    files=10,
    entries=20,
    upload=16 * MIB,
    commit=16 * MIB,
    commits=1,
    many=10,
    members=2,
    open=16 * MIB,
    idle_s=0.2,
    in_flight=(2,),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A file system to measure on: `tmpfs`, or the disk's."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """What subjects are given.

    Attributes:
        sizes: how much.
        places: file systems that the spool is put on.
    """

    sizes: Sizes
    places: tuple[Place, ...]

    @property
    def memory(self) -> Place:
        """The tmpfs, or what stands for it."""
        return self.places[0]

    @property
    def disk(self) -> Place:
        """The disk, or what stands for it."""
        return self.places[-1]


def places(tmpfs: Path, disk: Path | None) -> tuple[Place, ...]:
    """The places, named by what they are; one, if both are the same.

    Args:
        tmpfs: a directory on a tmpfs.
        disk: a directory on a disk; None looks for one.
    """
    chosen = dict.fromkeys((tmpfs, disk or _some_disk()))
    return tuple(Place(machine.file_system(path), path) for path in chosen)


def _some_disk() -> Path:
    """A directory that isn't on a tmpfs: the system's temporary one, or this."""
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path(os.getcwd())]
    memory = {"tmpfs", "ramfs"}
    return next(
        (path for path in candidates if machine.file_system(path) not in memory), candidates[0]
    )
