"""The chunks of a stored file: where each lies, and the digest that it must have.

Thread rule: any thread; a call may block on the store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from ckptgate.engine.manifests import DIGEST_BYTES, load_chunks, load_manifest
from ckptgate.errors import IntegrityError
from ckptgate.model.documents import ChunkRef
from ckptgate.model.ids import CHUNK_BYTES, chunk_count
from ckptgate.model.layout import full_key
from ckptgate.ports.spool import AttemptRow, FileRow, Spool
from ckptgate.ports.store import Store

__all__ = ["Chunk", "ChunkDigests", "chunk_of", "chunk_range"]

MANIFESTS_KEPT: Final = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a file: where it lies and what it must be."""

    index: int
    offset: int
    length: int
    digest: bytes


def chunk_range(size: int, offset: int, length: int) -> range:
    """Indices of the chunks that these bytes touch."""
    end = min(size, offset + length)
    return range(offset // CHUNK_BYTES, chunk_count(end)) if end > offset else range(0)


def chunk_of(row: FileRow, index: int) -> Chunk:
    """The chunk of a file whose chunk digests are known."""
    offset = index * CHUNK_BYTES
    start = index * DIGEST_BYTES
    return Chunk(
        index=index,
        offset=offset,
        length=min(CHUNK_BYTES, row.size - offset),
        digest=row.chunks[start : start + DIGEST_BYTES],
    )


class ChunkDigests:
    """Finds the chunk digests of files in their checkpoints' tables. Any thread."""

    def __init__(self, store: Store, spool: Spool) -> None:
        self._store = store
        self._spool = spool
        self._lock = threading.Lock()
        self._refs: OrderedDict[tuple[str, str], dict[str, ChunkRef]] = OrderedDict()

    def known(self, row: FileRow) -> FileRow:
        """The row with its chunk digests, read from their table if they were not yet.

        Raises:
            IntegrityError: no manifest names them, or the table was changed.
            TransientStoreError: the store did not answer.
        """
        if len(row.chunks) == chunk_count(row.size) * DIGEST_BYTES:
            return row
        if row.size <= CHUNK_BYTES:
            return self._spool.update_file(row.file, chunks=bytes.fromhex(row.digest))
        for node in self._spool.nodes_of_file(row.file):
            attempt = self._spool.attempt(node.attempt) if node.attempt is not None else None
            if attempt is None or not attempt.manifest:
                continue
            ref = self._refs_of(attempt).get(row.key)
            if ref is not None:
                chunks = load_chunks(self._store, attempt.run, ref, row.size)
                return self._spool.update_file(row.file, chunks=chunks)
        msg = f"no manifest names the chunk digests of file {row.file} ({row.key})"
        raise IntegrityError(msg, subject=row.key)

    def _refs_of(self, attempt: AttemptRow) -> dict[str, ChunkRef]:
        """Key -> where its chunk digests are, of a committed attempt's large files."""
        wanted = (attempt.run, attempt.manifest)
        with self._lock:
            known = self._refs.get(wanted)
        if known is not None:
            return known
        manifest = load_manifest(self._store, attempt.run, attempt.attempt, attempt.manifest)
        refs = {
            full_key(attempt.run, entry.key): entry.chunks
            for entry in manifest.entries
            if entry.chunks is not None
        }
        with self._lock:
            self._refs[wanted] = refs
            while len(self._refs) > MANIFESTS_KEPT:
                self._refs.popitem(last=False)
        return refs
