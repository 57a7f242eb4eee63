"""Upload of large files to a server that costs nothing, with real checksums, beside other clients.

Every client gets the same files, in the page cache; each transfer is a process of its own. The
gateway's client sends a CRC64NVME of each part and compares what the store says of the whole; the
others do what is fastest for them, some of them without any check of the bytes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine, mounts
from bench.pairs import alternate, ratios
from bench.plan import GIB, MIB, Plan
from bench.report import Figure, spread
from bench.s3_servers import NullServer, content_file, null_server
from bench.s3_sides import Cost, Side, digests_of, python_side, rclone, s5cmd

__all__ = ["run"]

MOST_IN_FLIGHT = 8
CLIENT_BYTES = 512 << 20
AT_LEAST_AS_FAST = 1.5
AT_MOST_CPU = 0.5
AT_MOST_MB = 300.0


@dataclass
class _Upload:
    """The same *count* files, sent by any side under keys of their own."""

    server: NullServer
    base: Path
    content: Path
    count: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def by(self, side: Side) -> Callable[[], Cost]:
        """Send them once."""

        def measure() -> Cost:
            number = next(self.numbers)
            local = self.base / f"{self.count}-{number}"
            local.mkdir()
            files = {f"{number}/f{n}": local / f"f{n}" for n in range(self.count)}
            for path in files.values():
                os.link(self.content, path)
            machine.fault_in(CLIENT_BYTES)
            cost = side.move(files)
            self.server.check_stored(files, self.content.stat().st_size)
            return cost

        return measure


def run(plan: Plan) -> Iterator[Figure]:
    """Rates and CPU by files in flight, and the memory of the most of them."""
    size = plan.sizes.stream
    with mounts.scratch(plan.memory.path) as base:
        content = content_file(base / "content", size)
        with null_server(content) as server:
            digests = digests_of(content)
            ours = python_side("ckptgate", "ours_put", server.endpoint, digests)
            peers = [side for side in (rclone(server.endpoint), s5cmd(server.endpoint)) if side]
            # They only stand beside: not worth their start where nothing is repeated.
            names = ("boto3", "obstore", "s3fs") if plan.sizes.pairs > 1 else ()
            others = [python_side(name, f"{name}_put", server.endpoint, digests) for name in names]
            for count in plan.sizes.in_flight:
                upload = _Upload(server, base, content, count)
                sides = [ours, *peers, *others]
                costs = alternate([upload.by(side) for side in sides], plan.sizes.pairs)
                yield from _figures(count, size, sides, costs, {side.name for side in peers})
            most = _Upload(server, base, content, MOST_IN_FLIGHT).by(ours)()
            title = f"{MOST_IN_FLIGHT} files of {size // MIB} MiB in flight: peak RSS"
            yield spread("s3_upload", title, [most.peak_mb], "MB", at_most=AT_MOST_MB)


def _figures(
    count: int, size: int, sides: list[Side], costs: list[list[Cost]], limiting: set[str]
) -> Iterator[Figure]:
    total = count * size
    seconds = [[cost.seconds for cost in each] for each in costs]
    cpu = [[cost.cpu_s for cost in each] for each in costs]
    what = f"{count} x {size // MIB} MiB"
    for side, took, used in zip(sides, seconds, cpu, strict=True):
        rates = [total / 1e6 / each for each in took]
        yield spread("s3_upload", f"{what}: {side.name}", rates, "MB/s")
        per_gib = [each * GIB / total for each in used]
        yield spread("s3_upload", f"{what}: {side.name}, CPU", per_gib, "s/GiB")
    for side, took, used in zip(sides[1:], seconds[1:], cpu[1:], strict=True):
        has_limit = side.name in limiting
        yield spread(
            "s3_upload", f"{what}: rate over {side.name}'s", ratios(took, seconds[0]), "x",
            at_least=AT_LEAST_AS_FAST if has_limit else None,
        )  # fmt: skip
        yield spread(
            "s3_upload", f"{what}: CPU over {side.name}'s", ratios(cpu[0], used), "times",
            at_most=AT_MOST_CPU if has_limit else None,
        )  # fmt: skip
