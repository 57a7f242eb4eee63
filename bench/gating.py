"""What it costs to know a framework's checkpoint: CPU a file, time of a save, time to decide.

A DeepSpeed checkpoint is held until all its partitions are there. It is saved beside the same bytes
under names that mean nothing, which an explicit commit seals.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from bench import gated, machine, mounts
from bench.clients import Worker, workers
from bench.pairs import alternate, ratios
from bench.plan import GIB, MIB, Plan
from bench.report import Figure, spread
from ckptgate.engine.digest import SpoolView
from ckptgate.formats import registry
from ckptgate.formats.containers import check_container

__all__ = ["run"]

FILE_MS: Final = 5.0
SHARE: Final = 1.01
DECIDED_S: Final = 1.0
LATE_S: Final = 3.0
SETS: Final = 2
"""How often the expected set is asked for: by the mount, and by who decides."""
CONFIG: Final = "[room]\nfree_min_share = 0.0\n"
MODEL: Final = "mp_rank_00_model_states.pt"
PARTITION: Final = "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def run(plan: Plan) -> Iterator[Figure]:
    """CPU of each file in process; then saves through mounts."""
    for title, write in gated.CHECKPOINTS.items():
        if title in gated.BY_TORCH and not importlib.util.find_spec("torch"):
            continue
        with mounts.scratch(plan.memory.path) as base:
            name = write(base)
            values = [_cpu_ms(base, name) for _ in range(max(3, plan.sizes.pairs))]
            files = len(os.listdir(base))
        yield spread("gating", f"{title}, {files} files: CPU a file", values, "ms", at_most=FILE_MS)
    yield from _saves(plan)
    yield from _late(plan)


class _Files:
    """A directory's files as formats see them."""

    def __init__(self, folder: Path) -> None:
        self._fds = {p.name: os.open(p, os.O_RDONLY) for p in sorted(folder.iterdir())}
        self._sizes = {name: os.fstat(fd).st_size for name, fd in self._fds.items()}

    def files(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, path: str) -> SpoolView:
        return SpoolView(self._fds[path], self._sizes[path])

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def _cpu_ms(folder: Path, name: str) -> float:
    """Of all that knowing its format costs a checkpoint, the share of a file."""
    with contextlib.closing(_Files(folder)) as tree:
        began = time.thread_time()
        there: list[str] = []
        for path in tree.files():
            there.append(path)
            registry.commit_event(there, "close", path, "", name)
            found = check_container(path, tree.open(path))
            assert not found.problem, (path, found)
        for _ in range(SETS):
            known = registry.recognise(there, name)
            assert known is not None, name
            expected = registry.expected(known, tree)
            assert set(expected.files) <= set(there), name
        return (time.thread_time() - began) / len(there) * 1e3


# Saves


def _saves(plan: Plan) -> Iterator[Figure]:
    """A save with all that, against one of the same bytes that mean nothing."""
    size = plan.sizes.commit
    decided: list[float] = []
    used: list[list[float]] = [[], []]
    with mounts.scratch(plan.memory.path) as sources:
        gated.model_states(sources / "model")
        gated.optimizer_states(
            sources / "partition", size // gated.RANKS, tensors=gated.SHARD_TENSORS
        )

        def save(*, is_known: bool) -> float:
            took, cpu, after = _save(plan, sources, is_known=is_known)
            used[is_known].append(cpu)
            if is_known:
                decided.append(after)
            return took

        plain, known = alternate(
            [lambda: save(is_known=False), lambda: save(is_known=True)], plan.sizes.commits
        )
    title = f"{plan.disk.name}: save of {size / GIB:g} GiB"
    middle = sorted(plain)[len(plain) // 2]
    note = f"{middle:.2f} s without"
    yield spread(
        "gating", f"{title}, known / not", ratios(known, plain), "times", at_most=SHARE, note=note
    )
    # The first of each warmed up.
    more = [
        (b - a) / seconds * 100
        for a, b, seconds in zip(used[0][1:], used[1][1:], plain, strict=True)
    ]
    yield spread("gating", f"{title}, CPU of it more", more, "%", at_most=(SHARE - 1) * 100)
    yield spread("gating", "last shard verified to COMMIT", decided[1:], "s", at_most=DECIDED_S)


def _save(plan: Plan, sources: Path, *, is_known: bool) -> tuple[float, float, float]:
    """Seconds of a save, the daemons' CPU, and seconds from the last verification to the COMMIT."""
    with (
        mounts.scratch(plan.disk.path) as base,
        mounts.mounted(base, config=CONFIG) as mount,
        workers() as one,
    ):
        mount.settle(plan.sizes.commit)
        cpu = _cpu_s(mount)
        began = time.monotonic()
        directory = mount.path / ("global_step1" if is_known else "step-1")
        directory.mkdir()
        for rank in range(gated.RANKS):
            last = directory / (PARTITION if is_known else "shard-{rank}.dat").format(rank=rank)
            _copy(one[0], sources / "partition", last)
            if rank == 0:
                _copy(one[0], sources / "model", directory / (MODEL if is_known else "model.dat"))
        if is_known:
            (mount.path / "latest").write_text(directory.name)
        else:
            one[0].seconds("commit", directory=directory)
        stored = _stored_at(one[0], last)
        mounts.until("it is published", (mount.store / directory.name).exists)
        took = time.monotonic() - began
        machine.wait_idle(mount.processes)
        return took, _cpu_s(mount) - cpu, max(0.0, _committed_at(mount.store) - stored)


def _late(plan: Plan) -> Iterator[Figure]:
    """The same of two nodes, one of them late: what it brings is seen, sealed and voted on."""
    size = max(plan.sizes.commit // 16, MIB)
    with mounts.scratch(plan.memory.path) as sources:
        gated.model_states(sources / "model")
        gated.optimizer_states(
            sources / "partition", size // gated.RANKS, tensors=gated.SHARD_TENSORS
        )
        values = [
            _late_one(plan, sources, f"bench-{os.getpid()}-{number}")
            for number in range(plan.sizes.pairs)
        ]
    title = f"the same, the other node {LATE_S:g} s late"
    yield spread("gating", title, values, "s", at_most=DECIDED_S)


def _late_one(plan: Plan, sources: Path, job: str) -> float:
    late_s = LATE_S if plan.sizes.pairs > 1 else 0.2
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(mounts.scratch(plan.disk.path))
        nodes = []
        for name in ("a", "b"):
            (base / name).mkdir()
            nodes.append(
                stack.enter_context(
                    mounts.mounted(base / name, store=base / "store", config=CONFIG)
                )
            )
        clients = stack.enter_context(workers(2, {"CKPTGATE_RUN_ID": job}))
        half = gated.RANKS // 2
        for at, (node, client) in enumerate(zip(nodes, clients, strict=True)):
            directory = node.path / "global_step1"
            client.seconds("make", directory=directory)
            for rank in range(at * half, (at + 1) * half):
                last = directory / PARTITION.format(rank=rank)
                _copy(client, sources / "partition", last)
            if at == 0:
                _copy(client, sources / "model", directory / MODEL)
                client.seconds("text", path=node.path / "latest", text="global_step1")
                time.sleep(late_s)
        stored = _stored_at(clients[1], last)
        mounts.until("it is published", (base / "store" / "global_step1").exists)
        return max(0.0, _committed_at(base / "store") - stored)


def _copy(client: Worker, source: Path, path: Path) -> None:
    client.seconds("copy", source=source, path=path, call=MIB)


def _cpu_s(mount: mounts.Mount) -> float:
    return machine.cpu_s(mount.server) + machine.cpu_s(mount.publisher)


def _stored_at(client: Worker, path: Path) -> float:
    """When the store had a file, verified; seconds since the epoch."""
    client.begin("stored", path=path)
    found: float = client.end()["result"]
    return found


def _committed_at(store: Path) -> float:
    """When the COMMIT was written; seconds since the epoch."""
    records = [json.loads(path.read_bytes()) for path in (store / ".ckptgate/log").iterdir()]
    (at,) = (record["at"] for record in records if record["entry"]["type"] == "COMMIT")
    return datetime.fromisoformat(at).timestamp()
