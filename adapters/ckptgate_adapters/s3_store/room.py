"""What lies below a checkpoint's name and isn't its manifest: ours goes, others' is moved away.

Ours are copies under plain names: their metadata names the attempt that they were made for. All
else is somebody's, and is moved to `R/.ckptgate/displaced/`, under a name that a repeat finds
again. Coroutines run on the session's loop.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Final

import blake3

from ckptgate.errors import IntegrityError, MissingError
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.layout import GATEWAY_DIR, full_key, join_key
from ckptgate_adapters.s3_store.directories import MANIFEST_NAME, SUMS_NAME
from ckptgate_adapters.s3_store.moving import move_object, remove_all
from ckptgate_adapters.s3_store.objects import (
    Found,
    delete_if_same,
    each,
    head,
    list_all,
    put_small,
)
from ckptgate_adapters.s3_store.session import Session

__all__ = ["Room", "check_stored", "make_room"]

_NAME_DIGITS: Final = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Which place is to be emptied, for whom.

    Attributes:
        run: the run's path.
        name: the checkpoint's.
        by: the attempt that gets the place, or leaves it.
        keeps: paths that are overwritten soon, so that our copies there may stay.
        is_left: nobody gets the place: copies of others than *by* are somebody's who just did.
    """

    run: str
    name: str
    by: str
    keeps: frozenset[str] = frozenset()
    is_left: bool = False


async def check_stored(session: Session, run: str, manifest: Manifest) -> None:
    """Look for all objects that the manifest names: one listing for each attempt that has some.

    Raises:
        MissingError, IntegrityError: one is not there, or of another size.
    """
    wanted: dict[str, FileEntry] = {}
    for entry in manifest.entries:
        if entry.type is EntryType.FILE:
            wanted[session.key(full_key(run, entry.key))] = entry
    attempts = {key.rpartition("/data/")[0] for key in wanted}
    sizes: dict[str, int] = {}
    for attempt in sorted(attempts):
        async for item in list_all(session, f"{attempt}/data/"):
            if item.key in wanted:
                sizes[item.key] = item.size
    for key, entry in wanted.items():
        size = sizes.get(key)
        if size is None:
            msg = f"bytes that the manifest names are not in the store: {entry.key!r}"
            raise MissingError(msg, subject=entry.key)
        if size != entry.size:
            msg = f"{entry.key!r} has {size} bytes in the store, wanted {entry.size}"
            raise IntegrityError(msg, subject=entry.key)


async def make_room(session: Session, room: Room) -> None:
    """Leave nothing at and below `run/<name>` but a manifest of ours, and what is to stay.

    Raises:
        UnusableError: the store refuses to remove something; it names it.
        TransientStoreError: others change it at the same time.
    """
    place = join_key(room.run, room.name)
    base = session.location.below(place)
    own = f"{base}{GATEWAY_DIR}/"
    in_place = await head(session, session.key(place))
    listed = [item async for item in list_all(session, base) if item.key != base]
    found = await each(session.options.max_parallel, listed, lambda item: head(session, item.key))
    there = [item for item in found if item is not None]
    # Another publisher may have put the manifest meanwhile: only a condition replaces one of ours.
    ours = [i for i in there if i.attributes.attempt and i.key != own + MANIFEST_NAME]
    gone = [item.key for item in ours if _goes(item, base, room)]
    sums = own + SUMS_NAME
    if sums in gone:
        # It says that the copies are whole.
        await remove_all(session, [sums])
    await remove_all(session, [key for key in gone if key != sums])
    foreign = [item for item in there if not item.attributes.attempt]
    await _displace(session, room, base, foreign, in_place)


def _goes(item: Found, base: str, room: Room) -> bool:
    if room.is_left:
        return item.attributes.attempt == room.by
    if not room.keeps:
        return True
    path = item.key[len(base) :].rstrip("/")
    return item.attributes.attempt != room.by and path not in room.keeps


async def _displace(
    session: Session, room: Room, base: str, foreign: list[Found], in_place: Found | None
) -> None:
    if not foreign and in_place is None:
        return
    moved = {item.key[len(base) :]: item for item in foreign}
    to = await _displaced_name(session, room, moved, in_place)
    for path, item in moved.items():
        await _move(session, item, f"{to}/{path}")
    if in_place is not None:
        await _move(session, in_place, to)
    _log.info("moved-away run=%s name=%s objects=%d to=%s", room.run, room.name, len(moved), to)


async def _move(session: Session, item: Found, key: str) -> None:
    if item.key.endswith("/") and not item.size:
        await put_small(session, key, b"", item.attributes)
        await delete_if_same(session, item.key, item.etag)
    else:
        await move_object(session, item, key)


async def _displaced_name(
    session: Session, room: Room, moved: dict[str, Found], in_place: Found | None
) -> str:
    """A key where nothing is but what an earlier call has moved: the same for each repeat."""
    for number in itertools.count():
        of = blake3.blake3(f"{room.by}/{number}".encode()).hexdigest()[:_NAME_DIGITS]
        path = join_key(room.run, GATEWAY_DIR, "displaced", f"{room.name}-{of}")
        key = session.key(path)
        there = {item.key: item async for item in list_all(session, f"{key}/")}
        taken = await head(session, key)
        if taken is not None and (in_place is None or taken.etag != in_place.etag):
            continue
        clashes = (
            path in moved and moved[path].etag != item.etag
            for path, item in ((item[len(key) + 1 :], there[item]) for item in there)
        )
        if not any(clashes):
            return key
    raise AssertionError("numbers don't end")
