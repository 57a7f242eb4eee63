"""What the engine's tests share: nodes of a cluster on one store, each with a real spool."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import blake3
from tests.engine_parts import EngineParts, Forgotten

from ckptgate.model.closure import merge_votes
from ckptgate.model.documents import (
    ChunkRef,
    EntryType,
    FileEntry,
    Manifest,
    Vote,
    digest_of,
    encode,
)
from ckptgate.model.entries import Close, Commit, Seal, SealEvent
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.layout import (
    chunk_table_key,
    data_key,
    full_key,
    manifest_key,
    vote_key,
)
from ckptgate.model.moves import taken
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import ROOT_INO, AttemptRow, NodeKind, NodeRow
from ckptgate.ports.store import DigestedFile
from ckptgate.testing.clock import ManualClock, SeededIds
from ckptgate_adapters.sqlite_spool import SqliteSpool

JOB = "run:job-1"
NEXT_JOB = "run:job-2"
SESSION = "session:host-a/7@9"
CHUNK = 4096
"""Size of a chunk where the fixture `small_chunks` is used."""


class Invalidated(Forgotten):
    """Remembers what the kernel was told to forget."""

    def node(self, ino: int) -> None:
        self.names.append((ino, ""))


class Node:
    """One machine: a spool, a member, a catalog, all on the shared *store*."""

    _seeds = itertools.count()

    def __init__(self, store, path: Path, host: str, *, spool=None, member=None):
        self.store = store
        self.host = host
        self.clock = ManualClock()
        self.ids = SeededIds(next(self._seeds))
        path.mkdir(exist_ok=True, parents=True)
        self.spool = spool or SqliteSpool.create_or_open(
            str(path / host), store_url="memory:", host=host
        )
        self.member: str = member or self.spool.get_meta("member") or ""
        self.invalidated = Invalidated()
        parts = EngineParts.build(
            store=store,
            spool=self.spool,
            clock=self.clock,
            ids=self.ids,
            member=self.member,
            host=host,
        )
        self.events = parts.events
        self.logs = parts.logs
        self.membership = parts.membership
        self.catalog = parts.catalog(self.invalidated)

    def with_store(self, store) -> Node:
        """The same machine after a restart, with another way to the store."""
        return Node(store, Path(self.spool.path).parent, self.host, spool=self.spool)

    # Staging

    def directory(self, parent: int, name: str, attempt=None, mode=0o755) -> int:
        present = self.spool.child(parent, name)
        if present is not None:
            return present.ino
        node = self.spool.add_node(self._node(NodeKind.DIR, attempt, mode=mode))
        self.spool.link(parent, name, node.ino)
        return node.ino

    def begin(self, name: str, job=JOB, run="run", base=None) -> AttemptRow:
        run_ino = self.directory(ROOT_INO, run)
        root = self.spool.add_node(self._node(NodeKind.DIR, None))
        row = self.spool.add_attempt(
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
                base=base,
            )
        )
        self.spool.update_node(root.ino, attempt=row.id)
        return row

    def stage(self, row: AttemptRow, path: str, data: bytes) -> int:
        """A closed file, digested and stored, at *path* of the (joined) attempt; its file id."""
        *above, name = path.split("/")
        parent = row.root
        for part in above:
            parent = self.directory(parent, part, row.id)
        file = self.spool.add_file(state=FileState.QUIET).file
        local = self.spool.data_path(file)
        Path(local).write_bytes(data)
        stat = os.stat(local)
        chunks = b"".join(
            blake3.blake3(data[at : at + CHUNK_BYTES]).digest()
            for at in range(0, len(data), CHUNK_BYTES)
        )
        digest = digest_of(data)
        self.spool.update_file(
            file,
            state=FileState.DIGESTED,
            size=len(data),
            mtime_ns=stat.st_mtime_ns,
            digest=digest,
            chunks=chunks,
        )
        key = full_key(row.run, data_key(row.attempt, self.member, file))
        source = DigestedFile(
            path=local, size=len(data), digest=digest, chunks=chunks, may_link=False
        )
        self.store.put(key, source)
        self.spool.update_file(file, state=FileState.STORED, key=key)
        node = self.spool.add_node(
            self._node(NodeKind.FILE, row.id, mode=0o644, size=len(data), file=file)
        )
        self.spool.link(parent, name, node.ino)
        return file

    def _node(self, kind, attempt, **changes) -> NodeRow:
        values = {"mode": 0o755, "size": 0} | changes
        now = self.clock.now_ns()
        return NodeRow(
            ino=0, kind=kind, attempt=attempt, uid=0, gid=0, mtime_ns=now, ctime_ns=now, **values
        )

    # Deciding

    def entries(self, row: AttemptRow) -> tuple[FileEntry, ...]:
        found = []
        for path, node in self.spool.tree(row.id):
            common: dict[str, Any] = {"path": path, "mode": node.mode, "mtime_ns": node.mtime_ns}
            if node.kind is NodeKind.DIR:
                found.append(FileEntry(type=EntryType.DIR, **common))
                continue
            file = self.spool.file(node.file or 0)
            assert file is not None
            if self.membership.is_imported(row, file):
                continue
            ref = None
            if file.size > CHUNK_BYTES:
                table = chunk_table_key(row.attempt, digest_of(file.chunks))
                self.store.create(full_key(row.run, table), file.chunks)
                ref = ChunkRef(table=table, start=0)
            key = data_key(row.attempt, self.member, file.file)
            found.append(
                FileEntry(
                    type=EntryType.FILE,
                    size=file.size,
                    digest=file.digest,
                    key=key,
                    chunks=ref,
                    **common,
                )
            )
        return tuple(found)

    def vote(self, row: AttemptRow, is_final=True) -> Vote:
        row = self.spool.attempt(row.id) or row
        vote = Vote(
            attempt=row.attempt,
            member=self.member,
            n=row.votes_count,
            is_final=is_final,
            after=taken(self.spool.moves(row.id)),
            entries=self.entries(row),
        )
        key = vote_key(row.run, row.attempt, self.member, vote.n)
        self.store.create(key, encode(vote))
        self.spool.update_attempt(row.id, votes_count=vote.n + 1)
        return vote

    def seal(self, row: AttemptRow, name=None) -> None:
        def decide(state):
            return Seal(
                attempt=row.attempt,
                name=name or row.name,
                generation=state.generation,
                event=SealEvent.EXPLICIT,
            )

        self.logs.get(row.run).append(decide)

    def close(self, row: AttemptRow) -> None:
        self.logs.get(row.run).append(lambda _: Close(attempt=row.attempt))

    def commit(self, row: AttemptRow, name=None) -> str:
        """Write the manifest of all votes and append COMMIT; the manifest's digest."""
        members = self.membership.members(row.run, row.attempt)
        votes = self.membership.newest_votes(row.run, row.attempt, members)
        entries, missing = merge_votes(votes)
        assert not missing
        manifest = Manifest(
            run=row.run,
            name=name or row.name,
            attempt=row.attempt,
            generation=max(row.generation, 0),
            event="explicit",
            created_at=self.clock.now(),
            members=tuple(sorted(votes)),
            entries=entries,
        )
        data = encode(manifest)
        digest = digest_of(data)
        self.store.create(manifest_key(row.run, row.attempt, digest), data)
        commit = Commit(attempt=row.attempt, name=manifest.name, manifest=digest)
        self.logs.get(row.run).append(lambda _: commit)
        return digest

    def decide(self, row: AttemptRow) -> str:
        """Vote, seal, close and commit."""
        self.seal(row)
        self.vote(row)
        self.close(row)
        return self.commit(row)

    def save(self, name: str, files: dict[str, bytes], job=JOB, run="run") -> AttemptRow:
        """A committed checkpoint of one node."""
        row = self.membership.join(self.begin(name, job, run))
        for path, data in files.items():
            self.stage(row, path, data)
        self.decide(row)
        return row

    def look_into(self, run: str, run_ino: int, name: str) -> AttemptRow:
        """The committed checkpoint with its tree."""
        self.catalog.fill(self.catalog.materialise(run, run_ino, name).id)
        return self.catalog.materialise(run, run_ino, name)

    def paths(self, row: AttemptRow) -> dict[str, str]:
        """Path -> kind of everything in the tree."""
        return {path: str(node.kind) for path, node in self.spool.tree(row.id)}

    def file_at(self, row: AttemptRow, path: str) -> int:
        return next(f.file for p, _, f in self.spool.files_of_attempt(row.id) if p == path)

    def read(self, row: AttemptRow, path: str) -> bytes:
        """The file's bytes as a reader gets them."""
        file = self.file_at(row, path)
        found = self.spool.file(file)
        assert found is not None
        size = found.size
        if not self.catalog.is_fetched(file, 0, size):
            self.catalog.fetch(file, 0, size)
        assert self.catalog.is_fetched(file, 0, size)
        return Path(self.spool.data_path(file)).read_bytes()


class Reads:
    """A store that counts reads and may change what they return."""

    def __init__(self, store, change=None):
        self._store = store
        self.change = change
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, key, offset, length):
        self.calls.append((key, offset))
        data = self._store.read(key, offset, length)
        return self.change(offset, data) if self.change else data

    def read_into(self, key, offset, view):
        data = self.read(key, offset, len(view))
        view[: len(data)] = data
        return len(data)


def reader_of(make_node, files, change=None):
    """A second node that reads what a first one saved: (node, row, its store)."""
    make_node("writer").save("step-1", files)
    reads = Reads(make_node("writer2").store, change)
    node = make_node("reader", on=reads)
    row = node.look_into("run", node.directory(ROOT_INO, "run"), "step-1")
    return node, row, reads
