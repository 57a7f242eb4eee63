"""A committed checkpoint under plain names in an object store, each file verified there.

It owns the order: nothing is sent before the place is known to be free, and a file's bytes either
never leave the services, which copy and prove them, or come here, are compared with the manifest,
and are sent on. A place in an object store fills up file by file: whole is what this returned from.
Any thread.
"""

from __future__ import annotations

import os
import tempfile

from ckptgate.engine.each_file import for_each_file
from ckptgate.engine.export import fetch_file
from ckptgate.engine.ranges import Ranges
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.layout import full_key
from ckptgate.ports.export import Exported, ExportTarget
from ckptgate.ports.store import DigestedFile, Store

__all__ = ["export_objects"]


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
    ranges = Ranges(store)

    def bring(entry: FileEntry) -> bool:
        if target.has(manifest, entry):
            return True
        if not target.copy(store, full_key(run, entry.key), manifest, entry):
            _carry(ranges, store, run, target, manifest, entry)
        return False

    kept = sum(for_each_file(files, bring))
    for entry in manifest.entries:
        if entry.type is not EntryType.FILE:
            target.make(manifest, entry)
    return Exported(files=len(files), size_bytes=sum(entry.size for entry in files), kept=kept)


def _carry(
    ranges: Ranges,
    store: Store,
    run: str,
    target: ExportTarget,
    manifest: Manifest,
    entry: FileEntry,
) -> None:
    """Fetch a file, compare it, and send it on."""
    with tempfile.NamedTemporaryFile(prefix="ckptgate-export-") as local:
        fetch_file(ranges, store, run, entry, local.fileno())
        source = DigestedFile(
            path=os.fspath(local.name),
            size=entry.size,
            digest=entry.digest,
            chunks=b"",
            may_link=False,
        )
        target.put(source, manifest, entry)
