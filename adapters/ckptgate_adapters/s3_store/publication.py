"""The committed state under its own name: one conditional PUT of the manifest, and pointers.

`R/<name>/.ckptgate/manifest.json` names the objects that hold the checkpoint's bytes; that one
object is what is published, so readers of it see one attempt or the other. Who replaces it says
what it had looked at (`If-Match`), so that what came in between is looked at, too, before anything
is decided. What others put below `R/<name>/` is moved to `R/.ckptgate/displaced/`, never deleted.
Every step may be repeated, by anyone, after a crash at any point. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import msgspec

from ckptgate.errors import (
    IntegrityError,
    InvalidNameError,
    NotCopiedError,
    TransientStoreError,
)
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    Manifest,
    PointerKind,
    PointerValue,
    digest_of,
)
from ckptgate.model.ids import check_attempt_id, check_checkpoint_name, check_name
from ckptgate.model.layout import GATEWAY_DIR, join_key
from ckptgate.ports.store import always
from ckptgate_adapters.s3_store.attributes import Attributes, ObjectKind
from ckptgate_adapters.s3_store.audit import audit
from ckptgate_adapters.s3_store.directories import MANIFEST_NAME, target_of
from ckptgate_adapters.s3_store.objects import (
    Found,
    delete,
    delete_if_same,
    get_small,
    head,
    put_small,
)
from ckptgate_adapters.s3_store.plain import keep_directory
from ckptgate_adapters.s3_store.plain_copies import make_copies, why_uncopied
from ckptgate_adapters.s3_store.room import Room, check_stored, make_room
from ckptgate_adapters.s3_store.session import Session

__all__ = ["S3Publication"]

_TRIES: Final = 16
_POINTER_BYTES: Final = 64 * 1024
_LINKS: Final = frozenset({ObjectKind.SYMLINK, ObjectKind.POINTER})

_locks_lock = threading.Lock()
_locks: dict[tuple[str, str, str], threading.Lock] = {}


class _Shown(msgspec.Struct):
    """What of a published manifest tells whose it is."""

    attempt: str


class S3Publication:
    """`ports.store.Publication` on S3."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plain_copy = session.options.plain_copy

    def publish(
        self,
        run: str,
        manifest: Manifest,
        manifest_bytes: bytes,
        *,
        is_due: Callable[[], bool] = always,
    ) -> None:
        """Make `run/<name>` show exactly *manifest*, replacing any earlier attempt's."""
        place = join_key(run, manifest.name)
        problem = why_uncopied(self._session, run, manifest) if self._plain_copy else ""
        copied = manifest.entries if self._plain_copy and not problem else ()
        keeps = frozenset(entry.path for entry in copied)
        for _ in range(_TRIES):
            shown = self._session.run(self._shown(place))
            if shown is not None and shown[1] == manifest.attempt:
                break
            if not is_due():
                return
            if self._session.run(self._publish_if(run, manifest, manifest_bytes, shown, keeps)):
                break
        else:
            msg = f"{manifest.name!r} is replaced by others all the time"
            raise TransientStoreError(msg, subject=place)
        if problem:
            raise NotCopiedError(problem, subject=place)
        if self._plain_copy:
            self._session.run(make_copies(self._session, run, manifest))

    def published_attempt(self, run: str, name: str) -> str:
        """The attempt that `run/<name>` shows now, or ""."""
        check_checkpoint_name(name)
        shown = self._session.run(self._shown(join_key(run, name)))
        return "" if shown is None else shown[1]

    def published_problems(self, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
        """How `run/<name>` differs from what *manifest* says, one line each."""
        return self._session.run(audit(self._session, run, manifest, manifest_bytes))

    def unpublish(self, run: str, name: str, attempt: str) -> None:
        """Hide `run/<name>` if it shows *attempt*; the bytes stay."""
        check_attempt_id(attempt)
        self._session.run(self._unpublish(run, check_checkpoint_name(name), attempt))

    def set_pointer(self, run: str, value: PointerValue) -> None:
        """Make `run/<pointer>` be *value*, atomically for readers."""
        key = self._session.key(join_key(run, check_name(value.pointer)))
        for _ in range(_TRIES):
            there = self._session.run(self._pointer(key))
            if there is not None and _value(there) == (value.kind, value.content):
                return
            if self._session.run(self._put_pointer(key, value, there)):
                return
        msg = f"{value.pointer!r} is replaced by others all the time"
        raise TransientStoreError(msg, subject=join_key(run, value.pointer))

    def remove_pointer(self, run: str, pointer: str) -> None:
        """Remove the pointer if it is there."""
        key = self._session.key(join_key(run, check_name(pointer)))

        async def remove() -> None:
            if await head(self._session, key) is not None:
                await keep_directory(self._session, run)
                await delete(self._session, key)

        self._session.run(remove())

    def pointer_content(self, run: str, pointer: str) -> str | None:
        """The symlink's target or the text now under that name, None if there is none."""
        key = self._session.key(join_key(run, check_name(pointer)))
        there = self._session.run(self._pointer(key))
        return None if there is None else _value(there)[1]

    @contextmanager
    def lock_run(self, run: str) -> Generator[None]:
        """One publisher of this run at a time in this process; the conditions do for others."""
        location = self._session.location
        with _locks_lock:
            lock = _locks.setdefault((location.bucket, location.prefix, run), threading.Lock())
        with lock:
            yield

    # On the loop

    async def _shown(self, place: str) -> tuple[Found, str] | None:
        """The published manifest and its attempt, "" if it isn't ours; None if there is none."""
        key = self._session.key(join_key(place, GATEWAY_DIR, MANIFEST_NAME))
        found = await head(self._session, key)
        if found is None:
            return None
        if found.attributes.attempt:
            return found, _checked(found.attributes.attempt)
        # Whoever copied the store may have left the metadata behind.
        try:
            read = await get_small(self._session, key, MAX_DOCUMENT_BYTES)
        except IntegrityError:
            return found, ""
        return None if read is None else (read, _attempt_in(read.body))

    async def _publish_if(
        self,
        run: str,
        manifest: Manifest,
        data: bytes,
        shown: tuple[Found, str] | None,
        keeps: frozenset[str],
    ) -> bool:
        """Put the manifest if what it replaces is still *shown*."""
        await check_stored(self._session, run, manifest)
        before, attempt = shown or (None, "")
        room = Room(run=run, name=manifest.name, by=manifest.attempt, keeps=keeps)
        await make_room(self._session, room)
        if not attempt:
            # What was there was moved away.
            before = None
        key = self._session.key(join_key(run, manifest.name, GATEWAY_DIR, MANIFEST_NAME))
        attributes = Attributes(
            mode=0o644,
            mtime_ns=time.time_ns(),
            digest=digest_of(data),
            attempt=manifest.attempt,
        )
        if before is None:
            return await put_small(self._session, key, data, attributes, is_new=True)
        return await put_small(self._session, key, data, attributes, replaces=before.etag)

    async def _unpublish(self, run: str, name: str, attempt: str) -> None:
        place = join_key(run, name)
        shown = await self._shown(place)
        if shown is None or shown[1] != attempt:
            return
        await make_room(self._session, Room(run=run, name=name, by=attempt, is_left=True))
        # Last, so that whoever repeats this finds that there is something to do.
        await delete(self._session, self._session.location.below(place))
        await delete_if_same(self._session, shown[0].key, shown[0].etag)

    async def _pointer(self, key: str) -> Found | None:
        return await get_small(self._session, key, _POINTER_BYTES)

    async def _put_pointer(self, key: str, value: PointerValue, there: Found | None) -> bool:
        is_link = value.kind is PointerKind.SYMLINK
        body = f"{value.content}\n" if is_link else value.content
        attributes = Attributes(
            kind=ObjectKind.POINTER if is_link else ObjectKind.FILE,
            mode=0o777 if is_link else 0o644,
            mtime_ns=time.time_ns(),
        )
        data = body.encode("utf-8", "surrogateescape")
        if there is None:
            return await put_small(self._session, key, data, attributes, is_new=True)
        return await put_small(self._session, key, data, attributes, replaces=there.etag)


def _value(there: Found) -> tuple[PointerKind, str]:
    kind = there.attributes.kind
    if kind in _LINKS:
        return PointerKind.SYMLINK, target_of(kind, there.body)
    return PointerKind.TEXT, there.body.decode("utf-8", "surrogateescape")


def _checked(attempt: str) -> str:
    try:
        return check_attempt_id(attempt)
    except InvalidNameError:
        return ""


def _attempt_in(data: bytes) -> str:
    try:
        return _checked(msgspec.json.decode(data, type=_Shown).attempt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
