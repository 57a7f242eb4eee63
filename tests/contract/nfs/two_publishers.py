"""Run in the guest: two nodes on two client machines save checkpoints together.

Usage: two_publishers.py DIRECTORY1 DIRECTORY2 EXPORT (the same directory, as each machine has it
mounted and as the server has it). The publishers are processes; spools lie on a local disk. Prints
one line for each check that held; any failure is a traceback and exit code 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.engine_harness import RUN, Cluster
from tests.publishers import Machine, real_cluster, wait_until

from ckptgate.engine.catalog import StoreCatalog
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.verify import fold_log, verify_checkpoint
from ckptgate.errors import IntegrityError
from ckptgate.model.layout import full_key
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import AttemptRow
from ckptgate.ports.store import Store
from ckptgate_adapters.posix_store import PosixStore

LIMIT_S = 30.0
SHARD_BYTES = 300_000


class Pair:
    """The two machines; each one's store is its own NFS client's view."""

    def __init__(self, tmp: Path, roots: tuple[str, str]) -> None:
        self.stores = tuple(PosixStore(root) for root in roots)
        self.cluster: Cluster = real_cluster(tmp, self.stores[0])
        self.machines = tuple(
            Machine(self.cluster, f"client{at + 1}", store, root)
            for at, (store, root) in enumerate(zip(self.stores, roots, strict=True))
        )

    def save(self, name: str, *, ranks: int, commits: bool) -> dict[str, bytes]:
        """Each machine stages every second rank; path -> bytes."""
        data = {f"shard-{rank}.bin": os.urandom(SHARD_BYTES) for rank in range(ranks)}
        for at, machine in enumerate(self.machines):
            row = machine.node.begin(name, world_size=ranks)
            for rank in range(at, ranks, 2):
                path = f"shard-{rank}.bin"
                machine.node.write(row, path, data[path], rank=rank)
                if commits:
                    machine.node.commit(row, rank, ranks)
        return data

    def rows(self, name: str) -> list[AttemptRow]:
        """The machines' rows of that checkpoint."""
        found = [machine.node.raw.attempts(run=RUN, name=name) for machine in self.machines]
        return [rows[-1] for rows in found if rows]

    def is_published(self, name: str) -> bool:
        """Whether client 1 sees it in the log."""
        state = fold_log(self.stores[0], RUN)
        attempt = state.current.get(name)
        return attempt is not None and state.attempts[attempt].is_published


def check_seen_at_once(pair: Pair, name: str, data: dict[str, bytes]) -> None:
    """What client 1 sees as published, client 2's next look sees: log, directory and pointer."""
    two = pair.stores[1]
    state = fold_log(two, RUN)
    assert state.attempts[state.current[name]].is_published
    assert two.published_attempt(RUN, name) == state.current[name]
    assert two.pointer_content(RUN, "latest") == name
    assert two.plain_stat(f"{RUN}/latest").target == name
    for path, content in data.items():
        assert two.plain_read(f"{RUN}/{name}/{path}", 0, SHARD_BYTES + 1) == content
    for store in pair.stores:
        assert verify_checkpoint(store, RUN, name).problems == ()
    wait_until(
        lambda: [row.state for row in pair.rows(name)] == [AttemptState.COMMITTED] * 2,
        LIMIT_S,
        f"{name} adopted on both",
    )


def check_explicit_commits(pair: Pair) -> None:
    """Four ranks on two machines, each commits explicitly."""
    data = pair.save("step-1", ranks=4, commits=True)
    wait_until(lambda: pair.is_published("step-1"), LIMIT_S, "step-1 published")
    check_seen_at_once(pair, "step-1", data)
    print("explicit-commits-agree")


def check_rename(pair: Pair) -> None:
    """Both stage under a temporary name; the first machine's rename is the commit event."""
    data = pair.save("step-2.tmp", ranks=2, commits=False)
    one = pair.machines[0].node
    wait_until(
        lambda: all(row.is_joined for row in pair.rows("step-2.tmp")), LIMIT_S, "both joined"
    )
    joined = pair.rows("step-2.tmp")
    assert {row.attempt for row in joined} == {"step-2.tmp.0"}
    with one.raw.transaction():
        one.raw.update_attempt(joined[0].id, name="step-2")
        one.event(joined[0], "rename")
    wait_until(lambda: pair.is_published("step-2"), LIMIT_S, "step-2 published")
    check_seen_at_once(pair, "step-2", data)
    print("a-rename-commits-both")


def check_kills(pair: Pair) -> None:
    """kill -9 of a publisher in the middle of a save, at several moments; its restart finishes."""
    for at, delay_s in enumerate((0.0, 0.1, 0.3)):
        name = f"step-{at + 3}"
        victim = pair.machines[at % 2]
        data = pair.save(name, ranks=4, commits=True)
        time.sleep(delay_s)
        victim.kill()
        victim.start()
        wait_until(lambda name=name: pair.is_published(name), LIMIT_S, f"{name} published")
        check_seen_at_once(pair, name, data)
    print("killed-publishers-finish")


def reader(store: Store, tmp: Path, name: str) -> Callable[[str], None]:
    """Verified reads of a checkpoint's files on a node that has nothing of it yet."""
    cluster = real_cluster(tmp, store)
    node = cluster.node("reader", store=store)
    catalog = StoreCatalog(
        store=store,
        spool=node.raw,
        logs=node.logs,
        membership=node.membership,
        clock=cluster.clock,
        events=node.events,
    )
    row = catalog.materialise(RUN, node.directory(), name)
    catalog.fill(row.id)
    files = {path: file for path, _, file in node.raw.files_of_attempt(row.id)}

    def read(path: str) -> None:
        catalog.fetch(files[path].file, 0, files[path].size)

    return read


def refusal(read: Callable[[str], None], path: str) -> str:
    """What a read of changed bytes is refused with."""
    try:
        read(path)
    except IntegrityError as exc:
        return str(exc)
    raise AssertionError(f"changed bytes of {path} were read")


def check_verified_reads(pair: Pair, tmp: Path, export: str) -> None:
    """A byte that changed on the server reaches no reader, whatever the client has cached."""
    two = pair.stores[1]
    state = fold_log(two, RUN)
    attempt = state.current["step-1"]
    manifest = load_manifest(two, RUN, attempt, state.attempts[attempt].manifest)
    (key,) = [entry.key for entry in manifest.entries if entry.path == "shard-1.bin"]
    read = reader(two, tmp, "step-1")
    read("shard-0.bin")
    flip(os.path.join(export, full_key(RUN, key)))
    assert key in refusal(read, "shard-1.bin")
    read("shard-2.bin")
    problems = verify_checkpoint(two, RUN, "step-1").problems
    assert problems
    assert all("shard-1.bin" in problem for problem in problems), problems
    print("changed-bytes-are-refused")


def flip(path: str) -> None:
    """Change one byte in the middle, behind everybody's back."""
    found = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(SHARD_BYTES // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def main(first: str, second: str, export: str) -> None:
    started = time.monotonic()
    place = os.path.basename(tempfile.mkdtemp(dir=first))
    roots = (os.path.join(first, place), os.path.join(second, place))
    with tempfile.TemporaryDirectory() as spools:
        pair = Pair(Path(spools), roots)
        for machine in pair.machines:
            machine.start()
        try:
            check_explicit_commits(pair)
            check_rename(pair)
            check_kills(pair)
        finally:
            for machine in pair.machines:
                machine.stop()
        elsewhere = Path(spools) / "elsewhere"
        elsewhere.mkdir()
        check_verified_reads(pair, elsewhere, os.path.join(export, place))
    print(f"took {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
