"""Copies of a published checkpoint's files under their plain names, for people without ckptgate.

The store makes them itself. `R/<name>/.ckptgate/b3sums` (for `b3sum --check`) is put last, and is
the sign that all are there and proved; it goes first when they go. Each says in its metadata for
which attempt it was made, so that only these are ever removed. Coroutines run on the session's
loop.

All or nothing: where one of the names can't be a key, none is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptgate.errors import IntegrityError, InvalidNameError, MissingError
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.layout import GATEWAY_DIR, full_key, join_key
from ckptgate.model.published import b3sums
from ckptgate_adapters.s3_store.attributes import Attributes, ObjectKind
from ckptgate_adapters.s3_store.copying import Source, copy_object, prove_copy
from ckptgate_adapters.s3_store.directories import SUMS_NAME
from ckptgate_adapters.s3_store.objects import Found, Listed, each, head, list_all, put_small
from ckptgate_adapters.s3_store.session import Session

__all__ = ["attributes_of", "make_copies", "why_uncopied"]

_KINDS = {
    EntryType.FILE: ObjectKind.FILE,
    EntryType.DIR: ObjectKind.DIR,
    EntryType.SYMLINK: ObjectKind.SYMLINK,
}


def attributes_of(entry: FileEntry, attempt: str) -> Attributes:
    """What the copy of an entry says."""
    return Attributes(
        kind=_KINDS[entry.type],
        mode=entry.mode,
        mtime_ns=entry.mtime_ns,
        uid=entry.uid,
        gid=entry.gid,
        digest=entry.digest,
        attempt=attempt,
    )


def why_uncopied(session: Session, run: str, manifest: Manifest) -> str:
    """Why the files can't be under their plain names, "" if they can."""
    location = session.location
    for entry in manifest.entries:
        path = join_key(run, manifest.name, entry.path)
        try:
            if entry.type is EntryType.DIR:
                location.directory_key(path)
            else:
                location.key(path)
        except InvalidNameError as exc:
            return f"{entry.path!r} can't be copied to its plain name: {exc}"
    return ""


async def make_copies(session: Session, run: str, manifest: Manifest) -> None:
    """Have all files, directories and symlinks under their plain names, unless they are.

    Raises:
        MissingError, IntegrityError: stored bytes are not there, or a copy differs.
    """
    base = session.location.below(join_key(run, manifest.name))
    sums_key = f"{base}{GATEWAY_DIR}/{SUMS_NAME}"
    sums = await head(session, sums_key)
    if sums is not None and sums.attributes.attempt == manifest.attempt:
        return
    there = {item.key: item async for item in list_all(session, base)}

    async def make(entry: FileEntry) -> None:
        await _make(session, run, manifest.attempt, base, entry, there)

    await each(session.options.max_parallel, manifest.entries, make)
    data = b3sums(manifest.entries)
    attributes = Attributes(mode=0o644, attempt=manifest.attempt)
    await put_small(session, sums_key, data, attributes)


async def _make(
    session: Session,
    run: str,
    attempt: str,
    base: str,
    entry: FileEntry,
    there: Mapping[str, Listed],
) -> None:
    attributes = attributes_of(entry, attempt)
    key = base + entry.path
    if entry.type is EntryType.DIR:
        await put_small(session, f"{key}/", b"", attributes)
        return
    if entry.type is EntryType.SYMLINK:
        target = entry.target.encode("utf-8", "surrogateescape")
        await put_small(session, key, target, attributes)
        return
    stored = await _stored(session, run, entry)
    if key in there and await _is_made(session, stored, key, attributes):
        return
    await copy_object(session, Source.of(session, stored), key, attributes)
    await prove_copy(session, stored, key, digest=entry.digest, is_strict=True)


async def _stored(session: Session, run: str, entry: FileEntry) -> Found:
    stored = await head(session, session.key(full_key(run, entry.key)))
    if stored is None:
        msg = f"bytes that the manifest names are not in the store: {entry.key!r}"
        raise MissingError(msg, subject=entry.key)
    if stored.size != entry.size:
        msg = f"{entry.key!r} has {stored.size} bytes in the store, wanted {entry.size}"
        raise IntegrityError(msg, subject=entry.key)
    return stored


async def _is_made(session: Session, stored: Found, key: str, attributes: Attributes) -> bool:
    """Whether an earlier call has made this copy."""
    made = await head(session, key)
    if made is None or made.attributes != attributes:
        return False
    try:
        await prove_copy(session, stored, key, digest=attributes.digest, is_strict=True)
    except (IntegrityError, MissingError):
        return False
    return True
