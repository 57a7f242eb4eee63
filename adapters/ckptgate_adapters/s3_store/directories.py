"""What is a directory where there are only keys, and what its names are.

A directory is what has objects below it, or a zero-byte object of its own, `path/` (its *marker*,
which holds its mode). Of a name that is both an object and a directory the directory is shown.
Names that no file system can show are left out, and told once. One request a directory tells what
is in it of the gateway; attributes cost a HEAD, and are kept. Coroutines run on the session's loop.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import MissingError
from ckptgate.model.layout import GATEWAY_DIR, TEMP_PREFIX
from ckptgate.ports.store import PlainEntry, PlainKind
from ckptgate_adapters.s3_store.attributes import (
    DEFAULT_DIR_MODE,
    Attributes,
    ObjectKind,
    can_be_shown,
    entry_of,
)
from ckptgate_adapters.s3_store.objects import (
    Found,
    Listed,
    each,
    first_below,
    get_small,
    head,
    list_names,
)
from ckptgate_adapters.s3_store.session import Session

__all__ = ["MANIFEST_NAME", "SUMS_NAME", "Directories", "Look", "is_hidden", "target_of"]

MANIFEST_NAME: Final = "manifest.json"
SUMS_NAME: Final = "b3sums"
_LOOK: Final = 3
"""Objects that tell what a directory is: its marker, and a published one's two own files."""
_RUN_NAMES: Final = ("attempts/", "displaced/", "format.json", "log/")
_KEPT: Final = 32_768
"""Attributes that are kept."""
_SETTLED_NS: Final = 2_000_000_000
"""Times are whole seconds: an object that was stored just now may get another version with the
same time and the same bytes, but other attributes."""
_TARGET_BYTES: Final = 8192

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a directory is.

    Attributes:
        marker: its own object, None where only what is below it makes it one.
        stored_ns: when something in it was stored.
        is_managed: ckptgate published it.
        has_runs: it is a run.
    """

    marker: Listed | None
    stored_ns: int
    is_managed: bool = False
    has_runs: bool = False


def is_hidden(name: str) -> bool:
    """Whether a name is the gateway's own."""
    return name == GATEWAY_DIR or name.startswith(TEMP_PREFIX)


class Directories:
    """Looks at directories, and keeps what objects' metadata said. The loop's thread only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._limit = session.options.max_parallel
        self._kept: OrderedDict[tuple[str, str, int], Found] = OrderedDict()
        self._told: set[str] = set()

    async def look(self, prefix: str) -> Look | None:
        """What the directory is all of whose keys begin with *prefix*; None if there is none."""
        listed = await first_below(self._session, prefix, _LOOK)
        if not listed:
            return None
        marker = listed[0] if listed[0].key == prefix else None
        own = f"{prefix}{GATEWAY_DIR}/"
        rest = listed[1:] if marker is not None else listed
        found = [item for item in rest if item.key.startswith(own)]
        if not found and len(listed) == _LOOK and rest[-1].key < own:
            # Names that sort before it were all that was told.
            found = await first_below(self._session, own, _LOOK)
        is_managed = await self._has_manifest(own, found)
        return Look(
            marker=marker,
            stored_ns=listed[0].stored_ns,
            is_managed=is_managed,
            has_runs=bool(found) and not is_managed,
        )

    async def _has_manifest(self, own: str, found: Sequence[Listed]) -> bool:
        names = [item.key[len(own) :] for item in found]
        if MANIFEST_NAME in names:
            return True
        if len(found) < _LOOK or any(name.startswith(_RUN_NAMES) for name in names):
            return False
        return await head(self._session, own + MANIFEST_NAME) is not None

    async def is_there(self, prefix: str) -> bool:
        """Whether there is a directory all of whose keys begin with *prefix*."""
        return bool(await first_below(self._session, prefix, 1))

    async def directory_entry(self, name: str, look: Look) -> PlainEntry:
        """The entry of a directory."""
        attributes = Attributes(kind=ObjectKind.DIR)
        if look.marker is not None:
            found = await self.found(look.marker)
            attributes = attributes if found is None else found.attributes
        mode, mtime_ns = attributes.mode, attributes.mtime_ns
        return PlainEntry(
            name=name,
            kind=PlainKind.DIR,
            size=0,
            mode=DEFAULT_DIR_MODE if mode is None else mode,
            mtime_ns=look.stored_ns if mtime_ns is None else mtime_ns,
            uid=os.geteuid() if attributes.uid is None else attributes.uid,
            gid=os.getegid() if attributes.gid is None else attributes.gid,
            is_managed=look.is_managed,
            has_runs=look.has_runs,
        )

    async def root_entry(self, look: Look | None) -> PlainEntry:
        """The entry of the store's root, which is always there."""
        return await self.directory_entry("", look or Look(marker=None, stored_ns=0))

    async def file_entry(self, name: str, found: Found) -> PlainEntry:
        """The entry of a file or symlink."""
        attributes = found.attributes
        target = ""
        if attributes.kind in {ObjectKind.SYMLINK, ObjectKind.POINTER}:
            body = found.body
            if not body and found.size:
                read = await get_small(self._session, found.key, _TARGET_BYTES)
                if read is None:
                    msg = f"{found.key!r} is not there"
                    raise MissingError(msg, subject=found.key)
                found, attributes, body = read, read.attributes, read.body
            target = target_of(attributes.kind, body)
        return entry_of(name, attributes, size=found.size, stored_ns=found.stored_ns, target=target)

    async def found(self, listed: Listed) -> Found | None:
        """A listed object as it is, a symlink with its body; None if it is gone."""
        kept = (listed.key, listed.etag, listed.stored_ns)
        if kept in self._kept:
            self._kept.move_to_end(kept)
            return self._kept[kept]
        found = await head(self._session, listed.key)
        if found is not None and found.attributes.kind in {ObjectKind.SYMLINK, ObjectKind.POINTER}:
            found = await get_small(self._session, listed.key, _TARGET_BYTES)
        if found is None or found.etag != listed.etag:
            return found
        if found.answered_ns - found.stored_ns > _SETTLED_NS:
            self._kept[kept] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    async def entries(self, prefix: str) -> list[PlainEntry] | None:
        """The names in a directory, sorted; None if there is no such directory."""
        objects, deeper = await list_names(self._session, prefix)
        names = {item.key[len(prefix) :]: item for item in objects}
        is_there = bool(names)
        names.pop("", None)
        below = {start[len(prefix) : -1]: start for start in deeper}
        directories = await self._directories(below)
        # Some services go on listing directories in which nothing is any more.
        if not (is_there or directories or await self.is_there(prefix)):
            return None
        files = await self._files({n: f for n, f in names.items() if n not in directories})
        return [entry for _, entry in sorted({**directories, **files}.items())]

    async def _directories(self, below: dict[str, str]) -> dict[str, PlainEntry]:
        async def entry(name: str) -> PlainEntry | None:
            look = await self.look(below[name])
            return None if look is None else await self.directory_entry(name, look)

        found = await each(self._limit, self._shown(below), entry)
        return {one.name: one for one in found if one is not None}

    async def _files(self, names: dict[str, Listed]) -> dict[str, PlainEntry]:
        async def entry(name: str) -> PlainEntry | None:
            found = await self.found(names[name])
            # It may be gone by now.
            return None if found is None else await self.file_entry(name, found)

        found = await each(self._limit, self._shown(names), entry)
        return {one.name: one for one in found if one is not None}

    def _shown(self, names: Iterable[str]) -> list[str]:
        """Those names that can be shown; of each other one it is said once that it is not."""
        return [name for name in names if not is_hidden(name) and self._can_show(name)]

    def _can_show(self, name: str) -> bool:
        if can_be_shown(name):
            return True
        if len(self._told) < _KEPT and name not in self._told:
            self._told.add(name)
            _log.warning("name-not-shown name=%r store=%s", name[:300], self._session.location.url)
        return False


def target_of(kind: ObjectKind, body: bytes) -> str:
    """What a symlink's body says."""
    text = body.decode("utf-8", "surrogateescape")
    return text.removesuffix("\n") if kind is ObjectKind.POINTER else text
