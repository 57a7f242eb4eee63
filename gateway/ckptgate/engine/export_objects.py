"""A committed checkpoint under plain names in an object store, each file verified there.

It owns the order: nothing is sent before the place is known to be free, and a file's bytes either
never leave the services, which copy and prove them, or come here, are compared with the manifest,
and are sent on. A place in an object store fills up file by file: whole is what this returned from.
Any thread.
"""

from __future__ import annotations

import os
import tempfile
from typing import Final

import blake3

from ckptgate.engine.each_file import for_each_file
from ckptgate.errors import IntegrityError
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.layout import full_key
from ckptgate.ports.export import Exported, ExportTarget
from ckptgate.ports.store import DigestedFile, Store

__all__ = ["export_objects"]

_PIECE_BYTES: Final = 8 * 1024 * 1024


def export_objects(
    store: Store, run: str, manifest: Manifest, target: ExportTarget, *, may_replace: bool
) -> Exported:
    """Bring exactly the checkpoint's entries to *target*.

    May be called again after an error: what an earlier call brought isn't brought again.

    Args:
        store: where the bytes are.
        run: the run's path.
        manifest: of the checkpoint.
        target: where they go.
        may_replace: what is there may go.

    Raises:
        RefusedError: something is there.
        IntegrityError, MissingError: stored bytes are not what the manifest says.
        FullError, UnusableError, TransientStoreError: of the target, of the store, or of the
            directory for temporary files, which a file needs that the services can't copy.
    """
    target.begin(manifest, may_replace=may_replace)
    files = [entry for entry in manifest.entries if entry.type is EntryType.FILE]

    def bring(entry: FileEntry) -> bool:
        if target.has(manifest, entry):
            return True
        key = full_key(run, entry.key)
        if not target.copy(store, key, manifest, entry):
            _carry(store, key, target, manifest, entry)
        return False

    kept = sum(for_each_file(files, bring))
    for entry in manifest.entries:
        if entry.type is not EntryType.FILE:
            target.make(manifest, entry)
    return Exported(files=len(files), size_bytes=sum(entry.size for entry in files), kept=kept)


def _carry(
    store: Store, key: str, target: ExportTarget, manifest: Manifest, entry: FileEntry
) -> None:
    """Fetch a file, compare it, and send it on."""
    with tempfile.NamedTemporaryFile(prefix="ckptgate-export-") as local:
        hasher = blake3.blake3()
        done = 0
        while piece := store.read(key, done, min(_PIECE_BYTES, entry.size + 1 - done)):
            hasher.update(piece)
            local.write(piece)
            done += len(piece)
        local.flush()
        found = hasher.hexdigest()
        if done != entry.size or found != entry.digest:
            msg = f"{entry.path}: {key} has {done} bytes with digest {found}, not {entry.digest}"
            raise IntegrityError(msg, subject=key, hint="ckptgate verify")
        source = DigestedFile(
            path=os.fspath(local.name), size=done, digest=found, chunks=b"", may_link=False
        )
        target.put(source, manifest, entry)
