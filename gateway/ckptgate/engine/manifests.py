"""Reading what a COMMIT names: the manifest and the tables of chunk digests, each checked.

It owns the rule that nothing is believed because of where it lies: a manifest's bytes must have the
digest that the COMMIT names, a table's the digest that its key names, and every key in a document
must lie where data lies.

Thread rule: any thread; no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ckptgate.errors import IntegrityError, InvalidNameError, MissingError
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    ChunkRef,
    EntryType,
    FileEntry,
    Manifest,
    decode,
    digest_of,
)
from ckptgate.model.ids import check_attempt_id, check_digest, check_member_id, chunk_count
from ckptgate.model.layout import chunk_table_key, data_key, full_key, manifest_key
from ckptgate.ports.store import Records

__all__ = [
    "DIGEST_BYTES",
    "check_entry_keys",
    "entry_chunks",
    "load_chunks",
    "load_manifest",
    "small_chunks",
]

DIGEST_BYTES: Final = 32
_HINT: Final = "run `ckptgate verify` on another node, or restore the object from a backup"


def load_manifest(store: Records, run: str, attempt: str, digest: str) -> Manifest:
    """The manifest with this *digest*, checked.

    Args:
        store: where it lies.
        run: the run's path.
        attempt: the attempt that the COMMIT names.
        digest: the digest that the COMMIT names.

    Raises:
        IntegrityError: missing, not the bytes that the COMMIT names, torn, hostile, or another
            attempt's; names the key.
        TransientStoreError: the store did not answer.
    """
    key = manifest_key(run, attempt, digest)
    try:
        data = store.get(key, limit=MAX_DOCUMENT_BYTES)
    except MissingError as exc:
        msg = f"manifest {key} is missing, but the log says that it is committed"
        raise IntegrityError(msg, subject=key, hint=_HINT) from exc
    found = digest_of(data)
    if found != digest:
        msg = f"manifest {key} was changed: its digest is {found}, its COMMIT names {digest}"
        raise IntegrityError(msg, subject=key, hint=_HINT)
    manifest = decode(data, Manifest, subject=key)
    if manifest.attempt != attempt:
        msg = f"manifest {key} is of attempt {manifest.attempt!r}, not of {attempt!r}"
        raise IntegrityError(msg, subject=key)
    check_entry_keys(manifest.entries, subject=key)
    return manifest


def check_entry_keys(entries: Iterable[FileEntry], *, subject: str) -> None:
    """Refuse entries whose bytes or chunk digests would be read from where no data lies.

    Raises:
        IntegrityError: names *subject* and the entry's path.
    """
    for entry in entries:
        if entry.type is not EntryType.FILE:
            continue
        if not _is_data_key(entry.key):
            msg = f"{subject}: key of {entry.path!r} is not one of a run's data: {entry.key!r}"
            raise IntegrityError(msg, subject=subject)
        ref = entry.chunks
        if ref is not None and (ref.start < 0 or not _table_digest(ref.table)):
            msg = f"{subject}: chunk table of {entry.path!r} is not a table: {ref.table!r}"
            raise IntegrityError(msg, subject=subject)


def load_chunks(store: Records, run: str, ref: ChunkRef, size: int) -> bytes:
    """The chunk digests (32 bytes each) of a file of *size* bytes, from its table.

    Raises:
        IntegrityError: the table is missing, was changed, or is too short; names its key.
        TransientStoreError: the store did not answer.
    """
    key = full_key(run, ref.table)
    try:
        data = store.get(key, limit=MAX_DOCUMENT_BYTES)
    except MissingError as exc:
        msg = f"chunk table {key} is missing"
        raise IntegrityError(msg, subject=key, hint=_HINT) from exc
    if digest_of(data) != _table_digest(ref.table):
        msg = f"chunk table {key} was changed: its digest is not the one in its name"
        raise IntegrityError(msg, subject=key, hint=_HINT)
    start = ref.start * DIGEST_BYTES
    chunks = data[start : start + chunk_count(size) * DIGEST_BYTES]
    if len(chunks) != chunk_count(size) * DIGEST_BYTES:
        msg = f"chunk table {key} is too short for {chunk_count(size)} chunks at {ref.start}"
        raise IntegrityError(msg, subject=key)
    return chunks


def entry_chunks(store: Records, run: str, entry: FileEntry) -> bytes:
    """The chunk digests of a manifest's file, from its table if it has several; raises as that."""
    if entry.chunks is None:
        return small_chunks(entry)
    return load_chunks(store, run, entry.chunks, entry.size)


def small_chunks(entry: FileEntry) -> bytes:
    """The chunk digests of a file of at most one chunk (its own digest); b"" of a larger one."""
    if entry.chunks is not None or entry.size == 0:
        return b""
    return bytes.fromhex(entry.digest)


def _is_data_key(key: str) -> bool:
    parts = key.split("/")
    if len(parts) != 6:
        return False
    attempt, member, file = parts[2], parts[4], parts[5]
    try:
        check_attempt_id(attempt)
        check_member_id(member)
    except InvalidNameError:
        return False
    return key == data_key(attempt, member, file)


def _table_digest(table: str) -> str:
    """The digest in a table's key, "" if it is no such key."""
    parts = table.split("/")
    if len(parts) != 5:
        return ""
    attempt, digest = parts[2], parts[4]
    try:
        check_attempt_id(attempt)
        check_digest(digest)
    except InvalidNameError:
        return ""
    return digest if table == chunk_table_key(attempt, digest) else ""
