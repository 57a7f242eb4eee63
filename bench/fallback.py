"""Without passthrough: the gateway serves READ and WRITE itself, beside an mfusepy file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench import machine, mounts
from bench.clients import Worker, workers
from bench.pairs import alternate, ratios
from bench.plan import GIB, MIB, Place, Plan
from bench.report import Figure, spread
from bench.write import writing

__all__ = ["run"]

CASES = (("1 MiB", MIB, 1.0), ("64 KiB", 64 << 10, 1.0), ("4 KiB", 4 << 10, 1.5))


def run(plan: Plan) -> Iterator[Figure]:
    """Ratios of speed against the peer, with those against native beside them."""
    for place in plan.places:
        with (
            mounts.scratch(place.path) as base,
            mounts.mounted(base, passthrough=False) as mount,
            mounts.peer_mounted(base) as peer,
            workers(1) as clients,
            mount.paused(),
        ):
            (mount.path / "step-1").mkdir()
            yield from _writes(plan, place, mount, peer, clients)
            yield from _reads(plan, place, mount, peer, clients[0])


def _writes(
    plan: Plan,
    place: Place,
    mount: mounts.Mount,
    peer: mounts.PeerMount,
    clients: list[Worker],
) -> Iterator[Figure]:
    for name, call, limit in CASES:
        size = plan.sizes.small_stream if call < MIB >> 4 else plan.sizes.stream >> 1
        sides = [
            writing(clients, directory, call, size, mount.settle)
            for directory in (mount.spool, mount.path / "step-1", peer.path)
        ]
        before = machine.cpu_s(mount.server), machine.cpu_s(peer.pid)
        native, ours, theirs = alternate(sides, plan.sizes.pairs)
        after = machine.cpu_s(mount.server), machine.cpu_s(peer.pid)
        title = f"{place.name}: write, {name} calls"
        yield spread("fallback", f"{title}, to mfusepy", ratios(theirs, ours), "x", at_least=limit)
        yield spread("fallback", f"{title}, to native", ratios(native, ours), "x")
        gib = size * (plan.sizes.pairs + 1) / GIB
        cpu, peer_cpu = ((b - a) / gib for a, b in zip(before, after, strict=True))
        note = f"mfusepy {peer_cpu:.2f}"
        yield spread("fallback", f"{title}, CPU of the mount", [cpu], "s/GiB", note=note)


def _reads(
    plan: Plan, place: Place, mount: mounts.Mount, peer: mounts.PeerMount, client: Worker
) -> Iterator[Figure]:
    size = plan.sizes.stream >> 1
    paths = [directory / "read.bin" for directory in (mount.path / "step-1", peer.path)]
    for path in paths:
        client.seconds("write", path=path, call=MIB, size=size)

    def measure(path: Path, call: int) -> float:
        mount.settle(size)
        return client.seconds("read", path=path, call=call)

    for name, call, limit in (("1 MiB", MIB, 1.0), ("64 KiB", 64 << 10, 1.0)):
        sides = [lambda p=path, c=call: measure(p, c) for path in paths]
        ours, theirs = alternate(sides, plan.sizes.pairs)
        title = f"{place.name}: read, {name} calls, to mfusepy"
        yield spread("fallback", title, ratios(theirs, ours), "x", at_least=limit)
