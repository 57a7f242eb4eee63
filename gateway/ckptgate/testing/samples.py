"""Ready-made files, entries and manifests for tests of stores and engines. Any thread."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import blake3

from ckptgate.errors import MissingError
from ckptgate.model.documents import EntryType, FileEntry, Manifest, decode, encode
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.layout import data_key, full_key, join_key
from ckptgate.ports.store import DigestedFile, PlainKind, Store

__all__ = [
    "MEMBER",
    "digested",
    "has_records",
    "manifest_of",
    "named_tree",
    "plain_tree",
    "sample_checkpoint",
    "store_checkpoint",
    "store_file",
    "write_file",
]

MEMBER = "node-a-0123abcd"
MTIME_NS = 1_700_000_000_123_000_000


def digested(path: str, *, may_link: bool = False) -> DigestedFile:
    """The file at *path* with its digests."""
    with open(path, "rb") as file:
        data = file.read()
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return DigestedFile(
        path=path,
        size=len(data),
        digest=blake3.blake3(data).hexdigest(),
        chunks=b"".join(blake3.blake3(chunk).digest() for chunk in chunks),
        may_link=may_link,
    )


def store_file(
    store: Store,
    run: str,
    attempt: str,
    path: str,
    local: str,
    *,
    mode: int = 0o644,
    may_link: bool = False,
    file: int = 1,
) -> FileEntry:
    """Put the local file under an attempt's data and return its entry at *path*."""
    source = digested(local, may_link=may_link)
    key = data_key(attempt, MEMBER, file)
    store.put(full_key(run, key), source)
    return FileEntry(
        path=path,
        type=EntryType.FILE,
        mode=mode,
        mtime_ns=MTIME_NS,
        size=source.size,
        digest=source.digest,
        key=key,
        uid=os.getuid(),
        gid=os.getgid(),
    )


def manifest_of(run: str, name: str, attempt: str, entries: Iterable[FileEntry]) -> Manifest:
    """A manifest of these entries, sorted."""
    return Manifest(
        run=run,
        name=name,
        attempt=attempt,
        generation=1,
        event="explicit",
        created_at="2026-01-01T00:00:00.000Z",
        members=(MEMBER,),
        entries=tuple(sorted(entries, key=lambda entry: entry.path)),
    )


def store_checkpoint(
    store: Store, run: str, attempt: str, name: str, spool: str, files: dict[str, bytes]
) -> tuple[Manifest, bytes]:
    """Put *files* (path -> bytes) and return the manifest of a checkpoint with them.

    Args:
        store: where.
        run: the run's directory.
        attempt: the attempt's id.
        name: the checkpoint's name.
        spool: an existing local directory for the sources.
        files: what the checkpoint consists of.
    """
    entries: list[FileEntry] = []
    for number, (path, data) in enumerate(sorted(files.items()), start=1):
        local = os.path.join(spool, f"{attempt}-{number}")
        with open(local, "wb") as file:
            file.write(data)
        entries.append(store_file(store, run, attempt, path, local, file=number))
    manifest = manifest_of(run, name, attempt, entries)
    return manifest, encode(manifest)


def sample_checkpoint(
    store: Store, tmp_path: Path, run: str, attempt: str = "step-1.0", **files: bytes
) -> tuple[Manifest, bytes]:
    """A stored checkpoint named as its attempt; one file if none is given."""
    spool = tmp_path / "spool"
    spool.mkdir(exist_ok=True)
    name = attempt.rpartition(".")[0]
    contents = files or {"model.pt": b"weights of " + attempt.encode()}
    return store_checkpoint(store, run, attempt, name, str(spool), contents)


def write_file(path: Path, data: bytes) -> str:
    """Write a local file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def plain_tree(store: Store, path: str) -> dict[str, bytes | str]:
    """Everything below a plain directory: bytes of files, targets of symlinks, "/" for others."""
    found: dict[str, bytes | str] = {}
    for entry in store.plain_list(path):
        key = f"{path}/{entry.name}"
        match entry.kind:
            case PlainKind.FILE:
                found[entry.name] = store.plain_read(key, 0, entry.size + 1)
            case PlainKind.SYMLINK:
                found[entry.name] = f"-> {entry.target}"
            case PlainKind.DIR:
                found[entry.name] = "/"
                below = plain_tree(store, key)
                found.update({f"{entry.name}/{name}": value for name, value in below.items()})
    return found


def named_tree(store: Store, run: str, name: str) -> dict[str, bytes | str]:
    """As `plain_tree`, of a published checkpoint: what its manifest names."""
    key = f"{run}/{name}/.ckptgate/manifest.json".lstrip("/")
    found: dict[str, bytes | str] = {}
    for entry in decode(store.get(key), Manifest, subject=key).entries:
        match entry.type:
            case EntryType.FILE:
                found[entry.path] = store.read(full_key(run, entry.key), 0, entry.size + 1)
            case EntryType.SYMLINK:
                found[entry.path] = f"-> {entry.target}"
            case EntryType.DIR:
                found[entry.path] = "/"
    return found


def has_records(store: Store, key: str) -> bool:
    """Whether anything is stored under a key, or below it; "" is the root."""
    try:
        if key:
            store.get(key)
            return True
    except MissingError:
        pass
    return any(has_records(store, join_key(key, name)) for name in store.children(key))
