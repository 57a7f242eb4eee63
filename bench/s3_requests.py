"""S3 requests of a commit of small files by several members, counted by the server.

All members run in this process, each with a client of its own, on a clock moved by hand: what
is counted doesn't depend on how fast the machine is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.engine_harness import RUN, Cluster, StagedNode

from bench import mounts
from bench.plan import Plan
from bench.report import Figure, spread
from bench.s3_servers import BUCKET, CREDENTIALS, NullServer, content_file, null_server
from ckptgate.model.states import UNDECIDED
from ckptgate_adapters.s3_store import S3Options, S3Store

__all__ = ["run"]

MEMBERS = 4
FILES_EACH = 250
FILE_BYTES = 4096
PER_FILE_MAX = 3.0
PER_MEMBER = 10
STEPS_MAX = 400


def run(plan: Plan) -> Iterator[Figure]:
    """Requests from the first file until all members know the outcome."""
    files = min(FILES_EACH, plan.sizes.many // MEMBERS)
    with (
        mounts.scratch(plan.memory.path) as base,
        null_server(content_file(base / "content", 1)) as server,
        mock.patch.dict(os.environ, CREDENTIALS),
    ):
        counts = _commit(base, server, files)
    total = sum(counts.values())
    share = (total - PER_MEMBER * MEMBERS) / (MEMBERS * files)
    title = f"{MEMBERS} members x {files} files: {PER_MEMBER} a member and, a file"
    most = sorted(counts.items(), key=lambda each: -each[1])
    note = f"{total} in all: " + ", ".join(f"{kind} {count}" for kind, count in most)
    yield spread("s3_requests", title, [share], "each", at_most=PER_FILE_MAX, note=note)


def _commit(base: Path, server: NullServer, files: int) -> dict[str, int]:
    options = S3Options(endpoint_url=server.endpoint, path_style=True)
    stores = [S3Store(f"s3://{BUCKET}/prefix", options) for _ in range(MEMBERS)]
    cluster = Cluster(base, store=stores[0])
    nodes = [cluster.node(f"n{number}", store=store) for number, store in enumerate(stores)]
    for rank, node in enumerate(nodes):
        row = node.begin("step-1", world_size=MEMBERS)
        for number in range(files):
            node.write(row, f"r{rank}-{number}.bin", os.urandom(FILE_BYTES), rank=rank)
        node.commit(row, rank, MEMBERS)
    before = server.counts()
    _until_decided(cluster, nodes)
    after = server.counts()
    cluster.close()
    for store in stores:
        store.close()
    return {kind: count - before.get(kind, 0) for kind, count in after.items()}


def _until_decided(cluster: Cluster, nodes: list[StagedNode]) -> None:
    """Step the nodes until each of them knows."""
    for _ in range(STEPS_MAX):
        for node in nodes:
            node.step()
        if not any(node.raw.attempts(run=RUN, states=UNDECIDED) for node in nodes):
            return
        cluster.clock.advance(0.1)
    msg = "the checkpoint isn't committed"
    raise TimeoutError(msg)
