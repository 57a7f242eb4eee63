"""A node without a mount: a spool and a publisher over a shared store; files are staged by rows.

The clock stands still unless a test moves it. A node can be restarted at any point: its spool and
its files stay, everything in memory is made anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.engine_parts import Counts, EngineParts, Forgotten

from ckptgate.engine.settings import PublisherSettings
from ckptgate.engine.verify import fold_log, verify_checkpoint
from ckptgate.model.documents import EntryType, Evidence, PointerKind
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.explicit import record_explicit_commit
from ckptgate.ports.spool import (
    ROOT_INO,
    AttemptRow,
    HandleRow,
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    Spool,
)
from ckptgate.ports.store import Store
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.sqlite_spool import SqliteSpool

RUN = "run"
JOB = "run:job-1"


@dataclass
class Cluster:
    """A store, a clock, and the nodes that share them."""

    tmp: Path
    store: Store = field(default_factory=MemoryStore)
    clock: ManualClock = field(default_factory=ManualClock)
    settings: PublisherSettings = field(
        default_factory=lambda: PublisherSettings(
            job_wait_s=20.0, digest_threads=1, upload_threads=1, spool_free_min_share=0.0
        )
    )
    nodes: dict[str, StagedNode] = field(default_factory=dict)

    def node(
        self,
        host: str,
        *,
        store: Store | None = None,
        wrap: Callable[[Spool], Spool] = lambda spool: spool,
    ) -> StagedNode:
        """A new node, or (with the same host) the old one's spool under a new process."""
        old = self.nodes.pop(host, None)
        if old is not None:
            old.close()
        made = StagedNode(self, host, store or self.store, wrap)
        self.nodes[host] = made
        return made

    def settle(self, *nodes: StagedNode, rounds: int = 60, tick_s: float = 1.0) -> None:
        """Step the nodes (all by default) until nothing moves any more."""
        quiet = 0
        for _ in range(rounds):
            did = [node.step() for node in nodes or tuple(self.nodes.values())]
            self.clock.advance(tick_s)
            quiet = 0 if any(did) else quiet + 1
            # Survivors come in late: silence of a few seconds isn't the end.
            if quiet > 8:
                return

    def state(self, run: str = RUN) -> RunState:
        """The run's log, folded anew."""
        return fold_log(self.store, run)

    def files(self, name: str, run: str = RUN) -> dict[str, bytes]:
        """Path -> bytes of the published checkpoint, below the store."""
        found: dict[str, bytes] = {}

        def walk(path: str, prefix: str) -> None:
            for entry in self.store.plain_list(path):
                if entry.kind == "dir":
                    walk(f"{path}/{entry.name}", f"{prefix}{entry.name}/")
                elif entry.kind == "file":
                    data = self.store.plain_read(f"{path}/{entry.name}", 0, entry.size)
                    found[prefix + entry.name] = data

        walk(f"{run}/{name}", "")
        return found

    def check_invariants(self, run: str = RUN) -> None:
        """I1 and I8 for everything that is committed, I2 to I4 and I7 by folding the log."""
        state = self.state(run)
        for name in state.current:
            report = verify_checkpoint(self.store, run, name)
            assert report.problems == ()

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


class StagedNode:
    """One node."""

    def __init__(
        self, cluster: Cluster, host: str, store: Store, wrap: Callable[[Spool], Spool]
    ) -> None:
        self.cluster = cluster
        self.host = host
        path = str(cluster.tmp / f"spool-{host}")
        self.raw = SqliteSpool.create_or_open(path, store_url="memory:", host=host)
        self.member = f"{host}-{sum(host.encode()):08x}"
        self.raw.set_meta("member", self.member)
        self.spool = wrap(self.raw)
        self.forgotten = Forgotten()
        self.meters = Counts()
        parts = EngineParts.build(
            meters=self.meters,
            store=store,
            spool=self.spool,
            clock=cluster.clock,
            ids=SeededIds(sum(host.encode())),
            member=self.member,
            host=host,
        )
        self.events = parts.events
        self.logs = parts.logs
        self.membership = parts.membership
        self.wakes: list[float] = []
        self.publisher = parts.publisher(
            self.forgotten, cluster.settings, lambda: self.wakes.append(cluster.clock.monotonic())
        )
        self._parts = parts

    def step(self) -> bool:
        return self.publisher.step()

    def close(self) -> None:
        self.publisher.close()
        self.raw.close()

    # Reading, as a mount would do it

    def fetched(self, name: str, *, run: str = RUN) -> list[int]:
        """Ids of the files of a committed checkpoint, all of whose bytes are here now."""
        catalog = self._parts.catalog(self.forgotten)
        row = catalog.materialise(run, self.directory(run), name)
        catalog.fill(row.id)
        files = [file for _, _, file in self.raw.files_of_attempt(row.id)]
        for file in files:
            catalog.fetch(file.file, 0, file.size)
        return [file.file for file in files]

    # Staging, as a mount would do it

    def directory(self, run: str = RUN) -> int:
        """The run's node."""
        spool, clock = self.raw, self.cluster.clock
        found = spool.child(ROOT_INO, run)
        if found is not None:
            return found.ino
        with spool.transaction():
            node = spool.add_node(self._node(NodeKind.DIR, plain_path=run))
            spool.link(ROOT_INO, run, node.ino)
            spool.watch_run(run)
        assert clock is not None
        return node.ino

    def begin(
        self,
        name: str,
        *,
        run: str = RUN,
        job: str = JOB,
        base: AttemptRow | None = None,
        world_size: int | None = None,
    ) -> AttemptRow:
        """mkdir of a checkpoint."""
        spool, now = self.raw, self.cluster.clock.now_ns()
        run_ino = self.directory(run)
        with spool.transaction():
            root = spool.add_node(self._node(NodeKind.DIR))
            row = spool.add_attempt(
                AttemptRow(
                    id=0,
                    run=run,
                    run_ino=run_ino,
                    name=name,
                    attempt="",
                    job_key=job,
                    generation=-1,
                    state=AttemptState.OPEN,
                    root=root.ino,
                    base=base.id if base else None,
                    world_size=world_size,
                    created_ns=now,
                    write_ns=now,
                )
            )
            spool.update_node(root.ino, attempt=row.id)
            if base is not None:
                self._copy_tree(base, row, root.ino)
        return row

    def write(
        self,
        row: AttemptRow,
        path: str,
        data: bytes,
        *,
        rank: int = -1,
        is_torn: bool = False,
        is_open: bool = False,
        extend_to: int = 0,
    ) -> int:
        """A process creates or replaces a file, and closes it unless *is_open*."""
        spool, now = self.raw, self.cluster.clock.now_ns()
        with spool.transaction():
            parent = self._parent(row, path)
            name = path.rpartition("/")[2]
            old = spool.child(parent, name)
            if old is not None:
                spool.unlink(parent, name)
                spool.drop_node(old.ino)
            file = spool.add_file(state=FileState.OPEN)
            spool.update_file(file.file, evidence=Evidence(is_torn=is_torn, rank=rank))
            local = Path(spool.data_path(file.file))
            local.write_bytes(data)
            if extend_to:
                os.truncate(local, extend_to)
            stat = local.stat()
            node = spool.add_node(
                replace(
                    self._node(NodeKind.FILE),
                    attempt=row.id,
                    size=stat.st_size,
                    mtime_ns=stat.st_mtime_ns,
                    file=file.file,
                )
            )
            spool.link(parent, name, node.ino)
            if rank >= 0:
                spool.add_writer_rank(row.id, rank)
            spool.update_attempt(row.id, write_ns=now)
            if is_open:
                self._open(node.ino, file.file, rank)
            else:
                spool.update_file(file.file, state=FileState.QUIET)
        return file.file

    def close_file(self, file: int) -> None:
        """The process that has *file* open closes it."""
        spool = self.raw
        with spool.transaction():
            for handle in spool.handles(file=file):
                spool.drop_handle(handle.fh)
            spool.update_file(file, state=FileState.QUIET)

    def event(self, row: AttemptRow, event: str = "format", detail: str = "") -> None:
        """The mount saw a commit event."""
        self.raw.update_attempt(
            row.id,
            event=event,
            detail=detail,
            state=AttemptState.SEALED,
            event_ns=self.cluster.clock.now_ns(),
        )

    def commit(
        self, row: AttemptRow, rank: int | None = 0, world: int | None = 1, *, is_all: bool = False
    ) -> None:
        """An explicit commit."""
        record_explicit_commit(
            self.raw,
            row.id,
            rank=rank,
            world_size=world,
            is_all=is_all,
            now_ns=self.cluster.clock.now_ns(),
        )

    def point(
        self, name: str, target: str, *, content: str | None = None, job: str = JOB, run: str = RUN
    ) -> None:
        """A symlink, or with *content* a text file, that names a checkpoint."""
        spool, run_ino = self.raw, self.directory(run)
        with spool.transaction():
            if content is None:
                node = spool.add_node(replace(self._node(NodeKind.SYMLINK), target=target))
            else:
                file = spool.add_file(state=FileState.QUIET)
                Path(spool.data_path(file.file)).write_text(content)
                node = spool.add_node(replace(self._node(NodeKind.FILE), file=file.file))
            spool.add_pending(
                PendingRow(
                    id=0,
                    parent=run_ino,
                    name=name,
                    ino=node.ino,
                    kind=PendingKind.POINTER,
                    job_key=job,
                    target=target,
                )
            )

    def fresh(self, row: AttemptRow) -> AttemptRow:
        found = self.raw.attempt(row.id)
        assert found is not None
        return found

    def tree(self, row: AttemptRow) -> dict[str, str]:
        """Path -> digest (or kind) of the attempt's tree in this spool."""
        files = {path: file.digest for path, _, file in self.raw.files_of_attempt(row.id)}
        return {path: files.get(path, str(node.kind)) for path, node in self.raw.tree(row.id)}

    def kinds(self) -> list[str]:
        """Kinds of the incidents so far."""
        return [event.kind for event in self.events.recent(1000)]

    def _node(self, kind: NodeKind, **changes: Any) -> NodeRow:
        now = self.cluster.clock.now_ns()
        node = NodeRow(
            ino=0,
            kind=kind,
            attempt=None,
            mode=0o755 if kind is NodeKind.DIR else 0o644,
            uid=os.getuid(),
            gid=os.getgid(),
            size=0,
            mtime_ns=now,
            ctime_ns=now,
        )
        return replace(node, **changes)

    def _open(self, ino: int, file: int, rank: int) -> None:
        fh = self.raw.next_handle()
        self.raw.add_handle(HandleRow(fh=fh, ino=ino, file=file, pid=4242, start=1, rank=rank))

    def _parent(self, row: AttemptRow, path: str) -> int:
        parent = row.root
        for part in path.split("/")[:-1]:
            found = self.raw.child(parent, part)
            if found is None:
                found = self.raw.add_node(replace(self._node(NodeKind.DIR), attempt=row.id))
                self.raw.link(parent, part, found.ino)
            parent = found.ino
        return parent

    def _copy_tree(self, base: AttemptRow, row: AttemptRow, root: int) -> None:
        made = {"": root}
        for path, node in self.raw.tree(base.id):
            copy = self.raw.add_node(replace(node, ino=0, attempt=row.id, base=node.ino))
            above, _, name = path.rpartition("/")
            self.raw.link(made[above], name, copy.ino)
            made[path] = copy.ino


def outcome(cluster: Cluster, run: str = RUN) -> dict[str, Any]:
    """What a save came to, without times, ids and indices: for comparing one history to another."""
    state = cluster.state(run)
    committed = {
        name: {
            "files": cluster.files(name, run),
            "published": state.attempts[attempt].is_published,
        }
        for name, attempt in state.current.items()
    }
    return {
        "committed": committed,
        "pointers": {n: (f.value.target, f.value.content) for n, f in state.pointers.items()},
        "store": {
            name: cluster.store.pointer_content(run, name) for name in sorted(state.pointers)
        },
        "states": {
            host: sorted(
                (row.name, str(row.state), tuple(sorted(node.tree(row))))
                for row in node.raw.attempts(run=run)
            )
            for host, node in sorted(cluster.nodes.items())
        },
    }


def entries_of(paths: Iterable[str]) -> list[str]:
    """Sorted, for comparing."""
    return sorted(paths)


__all__ = [
    "JOB",
    "RUN",
    "UNDECIDED",
    "Cluster",
    "EntryType",
    "PointerKind",
    "StagedNode",
    "entries_of",
    "outcome",
]
