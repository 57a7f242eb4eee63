"""Four publisher processes on one store, killed at random times: what commits is whole, once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3
import pytest
from tests.engine_harness import RUN, Cluster
from tests.publishers import Machine, real_cluster, wait_until

from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.verify import verify_checkpoint
from ckptgate.model.documents import EntryType
from ckptgate.model.layout import log_prefix
from ckptgate.model.rules import AttemptPhase, RunState
from ckptgate.model.states import AttemptState
from ckptgate_adapters.posix_store import PosixStore

pytestmark = pytest.mark.slow

RANKS = 4
STEPS = 10
SEED = int(os.environ.get("CKPTGATE_TEST_SEED", "20"))
KILL_PAUSE_S = (0.05, 0.5)
LIMIT_S = 30.0


@contextmanager
def killer(machines: list[Machine], seed: int) -> Iterator[list[int]]:
    """Kills a random publisher again and again, and starts it at once; yields who was killed."""
    rng, stop, killed = random.Random(seed), threading.Event(), list[int]()

    def kill() -> None:
        while not stop.wait(rng.uniform(*KILL_PAUSE_S)):
            at = rng.randrange(len(machines))
            machines[at].kill()
            machines[at].start()
            killed.append(at)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def save(machine: Machine, name: str, rank: int, rng: random.Random) -> dict[str, bytes]:
    """One rank's part of a checkpoint; path -> bytes."""
    data = {
        f"shard-{rank}.bin": rng.randbytes(rng.choice([0, 10, 70_000, 400_000])),
        f"sub/state-{rank}.json": b'{"rank": %d}' % rank,
    }
    row = machine.node.begin(name, world_size=RANKS)
    for path, content in data.items():
        machine.node.write(row, path, content, rank=rank)
    machine.node.commit(row, rank, RANKS)
    return data


def test_four_publishers_killed_at_random_commit_every_checkpoint_once(tmp_path: Path) -> None:
    """I1, I2, I3, I4, I5, I7, I10, I12."""
    root = tmp_path / "store"
    root.mkdir()
    store = PosixStore(str(root))
    cluster = real_cluster(tmp_path, store)
    machines = [Machine(cluster, host, store, str(root)) for host in "abcd"]
    saved: dict[str, dict[str, bytes]] = {}
    rng = random.Random(SEED)
    try:
        for machine in machines:
            machine.start()
        with killer(machines, SEED) as killed:
            for step in range(STEPS):
                name = f"step-{step}"
                saved[name] = {}
                for rank in rng.sample(range(RANKS), RANKS):
                    saved[name] |= save(machines[rank], name, rank, rng)
                wait_until(lambda count=step: len(killed) >= 2 * count, LIMIT_S, "kills")
        wait_until(lambda: is_done(cluster), LIMIT_S, "all committed and published")
    finally:
        for machine in machines:
            machine.stop()
    print(f"kills: {len(killed)}, starts: {[machine.starts for machine in machines]}")
    assert len(killed) >= STEPS
    check(cluster, root, saved)
    cluster.close()


def is_done(cluster: Cluster) -> bool:
    state = cluster.state()
    views = [state.attempts[attempt] for attempt in state.current.values()]
    rows = [row for node in cluster.nodes.values() for row in node.raw.attempts(run=RUN)]
    return (
        len(views) == STEPS
        and all(view.is_published for view in views)
        and all(row.state is AttemptState.COMMITTED for row in rows)
    )


def check(cluster: Cluster, root: Path, saved: dict[str, dict[str, bytes]]) -> None:
    state = cluster.state()  # folding checks density, digests and rules: I2 I3 I4 I7
    assert state.current.keys() == saved.keys()
    assert {view.state for view in state.attempts.values()} == {AttemptPhase.COMMITTED}
    assert sorted(state.attempts) == sorted(f"{name}.0" for name in saved)
    assert state.fences == {"run:job-1": 1}
    slots = [f"{index:010d}.json" for index in range(state.length)]
    assert cluster.store.children(log_prefix(RUN)) == slots
    for name, content in saved.items():
        assert verify_checkpoint(cluster.store, RUN, name).problems == ()
        check_published(cluster, root / RUN / name, state, name, content)
    newest = max(state.attempts.values(), key=lambda view: view.seal_index)
    assert state.pointers["latest"].value.target == newest.name
    assert (root / RUN / "latest").readlink() == Path(newest.name)
    # Whatever the kills left beside it, nobody sees it.
    shown = {entry.name for entry in (root / RUN).iterdir() if entry.name[0] != "."}
    assert shown == {*saved, "latest"}


def check_published(
    cluster: Cluster, place: Path, state: RunState, name: str, content: dict[str, bytes]
) -> None:
    """I1: the directory is the manifest, byte for byte, and both are what the ranks wrote."""
    attempt = state.current[name]
    manifest = load_manifest(cluster.store, RUN, attempt, state.attempts[attempt].manifest)
    assert len(manifest.members) == RANKS
    digests = {e.path: e.digest for e in manifest.entries if e.type is EntryType.FILE}
    assert digests == {path: blake3.blake3(data).hexdigest() for path, data in content.items()}
    found = {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and ".ckptgate" not in path.relative_to(place).parts
    }
    assert found == content
