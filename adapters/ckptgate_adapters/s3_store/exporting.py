"""A place in a bucket that a checkpoint is exported to: plain names, nothing of the gateway's.

Where the bytes are in a bucket of the same service, that copies them. What is brought says in its
metadata of which attempt it is, so that a repeat finds it. Any thread.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptgate.errors import IntegrityError, MissingError, RefusedError, UsageError
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.ids import parents_of
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.ports.store import DataObjects, DigestedFile
from ckptgate_adapters.s3_store.copying import Source, copy_object, digest_stored, prove_copy
from ckptgate_adapters.s3_store.directories import MANIFEST_NAME
from ckptgate_adapters.s3_store.location import S3Options, parse_s3_url
from ckptgate_adapters.s3_store.moving import remove_all
from ckptgate_adapters.s3_store.objects import (
    Found,
    Listed,
    delete,
    each,
    head,
    list_all,
    put_small,
)
from ckptgate_adapters.s3_store.plain_copies import attributes_of
from ckptgate_adapters.s3_store.session import Session
from ckptgate_adapters.s3_store.store import S3Store
from ckptgate_adapters.s3_store.upload import Uploads

__all__ = ["S3ExportTarget"]


class S3ExportTarget:
    """`ports.export.ExportTarget` below an `s3://` URL.

    Args:
        url: `s3://bucket/prefix`.
        options: how the service is spoken to.

    Raises:
        ConfigError: not such a URL.
        UsageError: it names a whole bucket, or the gateway's own directory of a store.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        location = parse_s3_url(url)
        if not location.prefix or GATEWAY_DIR in location.prefix.split("/"):
            msg = f"{url!r} is no place for a checkpoint's files"
            raise UsageError(msg, subject=url, hint="s3://BUCKET/PREFIX")
        self._session = Session(location, options or S3Options())
        self._uploads = Uploads(self._session, lambda _: None)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return self._session.location.url

    def close(self) -> None:
        """Close the connections; nothing can be called afterwards."""
        self._session.close()

    def begin(self, manifest: Manifest, *, may_replace: bool) -> None:
        """Refuse a place that holds something else, or empty it of that."""
        self._session.run(self._begin(manifest, may_replace=may_replace))

    def has(self, manifest: Manifest, entry: FileEntry) -> bool:
        """Whether an earlier try has brought exactly this."""
        return self._session.run(self._has(manifest, entry))

    def copy(self, store: DataObjects, key: str, manifest: Manifest, entry: FileEntry) -> bool:
        """Have the service copy it, if both are of one."""
        if not isinstance(store, S3Store) or not self._is_same_service(store.session):
            return False
        stored = store.session.run(head(store.session, store.session.key(key)))
        if stored is None:
            msg = f"{key!r} is not in the store"
            raise MissingError(msg, subject=key)
        if stored.size != entry.size:
            msg = f"{key!r} has {stored.size} bytes in the store, wanted {entry.size}"
            raise IntegrityError(msg, subject=key)
        # What was stored by us says what was proved then; of anything else the bytes have to.
        said = stored.attributes.digest
        found = said or store.session.run(digest_stored(store.session, stored.key))
        if found != entry.digest:
            msg = f"{key!r} was stored with digest {found}, not {entry.digest}"
            raise IntegrityError(msg, subject=key)
        source = Source.of(store.session, stored)
        self._session.run(self._copy(source, stored, manifest, entry))
        return True

    def put(self, source: DigestedFile, manifest: Manifest, entry: FileEntry) -> None:
        """Send a local file, and prove that it arrived."""
        self._session.run(self._put(source, manifest, entry))

    def make(self, manifest: Manifest, entry: FileEntry) -> None:
        """Make a directory or a symlink."""
        key, body = self._key(entry), entry.target.encode("utf-8", "surrogateescape")
        attributes = attributes_of(entry, manifest.attempt)
        self._session.run(put_small(self._session, key, body, attributes))

    def _is_same_service(self, other: Session) -> bool:
        ours, theirs = self._session.options, other.options
        return (ours.endpoint_url, ours.profile, ours.anon, ours.region) == (
            theirs.endpoint_url,
            theirs.profile,
            theirs.anon,
            theirs.region,
        )

    def _key(self, entry: FileEntry) -> str:
        if entry.type is EntryType.DIR:
            return self._session.location.directory_key(entry.path)
        return self._session.key(entry.path)

    async def _begin(self, manifest: Manifest, *, may_replace: bool) -> None:
        wanted = {self._key(entry) for entry in manifest.entries}
        start = self._session.location.below("")
        listed = [item async for item in list_all(self._session, start)]
        await self._refuse_managed(listed)
        in_place = await head(self._session, start.rstrip("/"))
        limit = self._session.options.max_parallel
        found = await each(limit, listed, lambda item: head(self._session, item.key))
        there = [item for item in [in_place, *found] if item is not None]
        above = {
            f"{self._session.key(parent)}/"
            for entry in manifest.entries
            for parent in parents_of(entry.path)
        } | {start}
        others = [
            item.key
            for item in there
            if not (item.key in wanted and _is_of(item, manifest))
            # A directory says nothing of who made it where the service makes them by itself.
            and not (item.key in wanted | above and item.key.endswith("/") and not item.size)
        ]
        if others and not may_replace:
            raise self._taken(others)
        await remove_all(self._session, others)

    async def _refuse_managed(self, listed: Collection[Listed]) -> None:
        """Refuse a place in a published checkpoint, or one that holds anything of ckptgate's.

        Nobody who says that all of it may be replaced means a store.
        """
        prefix = self._session.location.prefix
        found = next((i.key for i in listed if GATEWAY_DIR in i.key.split("/")), "")
        for above in parents_of(prefix) if not found else ():
            key = f"{above}/{GATEWAY_DIR}/{MANIFEST_NAME}"
            found = found or (key if await head(self._session, key) is not None else "")
        if found:
            msg = f"{self.url} is no place for an export: {found!r} is ckptgate's"
            raise RefusedError(msg, subject=self.url, hint="name a prefix outside of stores")

    def _taken(self, others: Collection[str]) -> RefusedError:
        first = min(others)
        msg = f"{self.url} is not empty: {first!r} and {len(others) - 1} more are there"
        hint = "name another one, or --overwrite to replace all of it"
        return RefusedError(msg, subject=self.url, hint=hint)

    async def _has(self, manifest: Manifest, entry: FileEntry) -> bool:
        key = self._key(entry)
        made = await head(self._session, key)
        if made is None or made.attributes != attributes_of(entry, manifest.attempt):
            return False
        return made.size == entry.size and await digest_stored(self._session, key) == entry.digest

    async def _copy(
        self, source: Source, stored: Found, manifest: Manifest, entry: FileEntry
    ) -> None:
        key = self._key(entry)
        await copy_object(self._session, source, key, attributes_of(entry, manifest.attempt))
        await prove_copy(self._session, stored, key, digest=entry.digest, is_strict=True)

    async def _put(self, source: DigestedFile, manifest: Manifest, entry: FileEntry) -> None:
        key = self._key(entry)
        more = attributes_of(entry, manifest.attempt).metadata()
        async with self._session.files:
            await self._uploads.send(key, source, more=more)
        found = await digest_stored(self._session, key)
        if found != entry.digest:
            await delete(self._session, key)
            msg = f"{entry.path!r} arrived at {self.url} with digest {found}, not {entry.digest}"
            raise IntegrityError(msg, subject=entry.path)


def _is_of(item: Found, manifest: Manifest) -> bool:
    return item.attributes.attempt == manifest.attempt
