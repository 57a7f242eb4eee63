"""Upload of large files to a server that costs nothing, with real checksums, beside other clients.

Every client gets the same files, in the page cache; each transfer is a process of its own. The
gateway's client sends a CRC64NVME of each part and compares what the store says of the whole; the
others do what is fastest for them, some of them without any check of the bytes. The same to
SeaweedFS, which takes most of the processors itself, stands beside it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine, mounts
from bench.pairs import alternate
from bench.plan import MIB, Plan
from bench.report import Figure, spread
from bench.s3_race import Limit, Race
from bench.s3_servers import S3Server, check_stored, content_file, null_server, weed_server
from bench.s3_sides import Cost, Side, digests_of, python_side, rclone, s5cmd

__all__ = ["run"]

LIMITS = {name: Limit(rate=1.5, cpu=0.5) for name in ("rclone", "s5cmd")}
MOST_IN_FLIGHT = 8
AT_MOST_MB = 300.0
CLIENT_BYTES = 512 * MIB
WEED_ROUNDS = 2
WEED_FILES = 4


@dataclass
class _Upload:
    """The same *count* files, sent by any side under keys of their own."""

    server: S3Server
    base: Path
    content: Path
    count: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def by(self, side: Side) -> Callable[[], Cost]:
        """Send them once."""

        def measure() -> Cost:
            number = next(self.numbers)
            with mounts.scratch(self.base) as local:
                files = {f"{number}/f{n}": local / f"f{n}" for n in range(self.count)}
                for path in files.values():
                    os.link(self.content, path)
                machine.fault_in(CLIENT_BYTES)
                cost = side.move(files)
            check_stored(self.server, files, self.content.stat().st_size)
            return cost

        return measure


def run(plan: Plan) -> Iterator[Figure]:
    """Rates and CPU by files in flight, and the memory of the most of them."""
    size = plan.sizes.stream
    with mounts.scratch(plan.memory.path) as base:
        content = content_file(base / "content", size)
        with null_server(content) as server:
            # They only stand beside: not worth their start where nothing is repeated.
            beside = ("boto3", "obstore", "s3fs") if plan.sizes.pairs > 1 else ()
            sides = _sides(server, content, beside)
            for count in plan.sizes.in_flight:
                upload = _Upload(server, base, content, count)
                costs = alternate([upload.by(side) for side in sides], plan.sizes.pairs)
                what = f"{count} x {size // MIB} MiB"
                names = [side.name for side in sides]
                yield from Race(
                    subject="s3_upload", what=what, total=count * size, names=names, limits=LIMITS
                ).figures(costs)
            most = _Upload(server, base, content, MOST_IN_FLIGHT).by(sides[0])()
            title = f"{MOST_IN_FLIGHT} files of {size // MIB} MiB in flight: peak RSS"
            yield spread("s3_upload", title, [most.peak_mb], "MB", at_most=AT_MOST_MB)
        if plan.sizes.pairs > 1:
            os.truncate(content, size // WEED_FILES)
            yield from _on_seaweedfs(base, content)


def _on_seaweedfs(base: Path, content: Path) -> Iterator[Figure]:
    size = content.stat().st_size
    with weed_server() as server:
        sides = _sides(server, content, ())
        upload = _Upload(server, base, content, WEED_FILES)
        costs = alternate([upload.by(side) for side in sides], WEED_ROUNDS)
        what = f"{WEED_FILES} x {size // MIB} MiB on SeaweedFS"
        names = [side.name for side in sides]
        total = WEED_FILES * size
        yield from Race(subject="s3_upload", what=what, total=total, names=names).figures(costs)


def _sides(server: S3Server, content: Path, beside: tuple[str, ...]) -> list[Side]:
    """The gateway's client, those that it has limits to, and *beside*."""
    digests = digests_of(content)
    found = [python_side("ckptgate", "ours_put", server, digests), rclone(server), s5cmd(server)]
    found += [python_side(name, f"{name}_put", server, digests) for name in beside]
    return [side for side in found if side is not None]
