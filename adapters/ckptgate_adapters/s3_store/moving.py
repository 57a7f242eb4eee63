"""Renames, where there are none: copies of all, proved, and only then removals.

Owns the order: nothing is removed before everything is there under its new key, and only what is
still as it was copied is removed. So a crash at any point, or a repeat, goes on from what is there.
Coroutines run on the session's loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from ckptgate.errors import (
    ExistsError,
    MissingError,
    TransientStoreError,
    UnusableError,
)
from ckptgate_adapters.s3_store.copying import Source, copy_object, is_same_etag, prove_copy
from ckptgate_adapters.s3_store.objects import (
    Found,
    Listed,
    delete_each,
    delete_if_same,
    each,
    first_below,
    head,
    list_all,
    put_small,
    told,
)
from ckptgate_adapters.s3_store.session import Session

__all__ = ["move_object", "move_tree", "remove_all", "rename"]

_ROUNDS: Final = 4
"""So often what others put there meanwhile is moved, too."""


async def rename(session: Session, old: str, new: str, keep: Callable[[], Awaitable[None]]) -> None:
    """Move the object, or all below the directory, *old* to *new*.

    *keep* is called before anything goes, so that the directory above stays one.

    Where both a directory and an object have the name, the directory is moved, as it is shown. A
    directory that is in the place already gets what isn't in it (an earlier call may have begun).

    Raises:
        MissingError: neither is there.
        ExistsError: a file is in a directory's place, or a directory in a file's.
    """
    if await first_below(session, f"{old}/", 1):
        if await head(session, new) is not None:
            subject = told(session, new)
            msg = f"{subject!r} is there and no directory"
            raise ExistsError(msg, subject=subject)
        await keep()
        await move_tree(session, f"{old}/", f"{new}/")
        return
    found = await head(session, old)
    if found is not None:
        if await first_below(session, f"{new}/", 1):
            subject = told(session, new)
            msg = f"{subject!r} is a directory"
            raise ExistsError(msg, subject=subject)
        await keep()
        await move_object(session, found, new)
    elif await head(session, new) is None and not await first_below(session, f"{new}/", 1):
        subject = told(session, old)
        msg = f"{subject!r} is not there"
        raise MissingError(msg, subject=subject)


async def move_object(session: Session, found: Found, key: str) -> None:
    """Copy an object to *key*, then remove it if it is still the same.

    Raises:
        TransientStoreError: it was changed meanwhile; its new version is where it was.
    """
    await copy_object(session, Source.of(session, found), key)
    await prove_copy(session, found, key, is_strict=True)
    if not await delete_if_same(session, found.key, found.etag):
        subject = told(session, found.key)
        msg = f"{subject!r} was changed while it was moved"
        raise TransientStoreError(msg, subject=subject)


async def move_tree(session: Session, old: str, new: str) -> None:
    """Move all objects whose keys begin with *old*; they begin with *new* then.

    Raises:
        UnusableError: the store refuses to remove some; it names one. All are copied.
        TransientStoreError: others go on putting objects there.
    """
    limit = session.options.max_parallel
    for _ in range(_ROUNDS):
        listed = [item async for item in list_all(session, old)]
        if not listed:
            return

        async def copy(item: Listed) -> None:
            await _copy(session, item, new + item.key[len(old) :])

        await each(limit, listed, copy)
        await _prove(session, listed, old, new)
        same = {(item.key, item.etag, item.stored_ns) for item in listed}
        now = [item async for item in list_all(session, old)]
        unchanged = [i.key for i in now if (i.key, i.etag, i.stored_ns) in same]
        await remove_all(session, unchanged)
    if await first_below(session, old, 1):
        subject = told(session, old)
        msg = f"{subject!r} gets new objects while it is moved"
        raise TransientStoreError(msg, subject=subject)


async def remove_all(session: Session, keys: list[str]) -> None:
    """Remove these objects.

    Raises:
        UnusableError: the store refuses some; it names one.
    """
    _, refused = await delete_each(session, keys, session.options.max_parallel)
    if refused:
        key, reason = min(refused.items())
        subject = told(session, key)
        msg = f"cannot remove {len(refused)} objects, {subject!r} among them: {reason}"
        raise UnusableError(msg, subject=subject)


async def _copy(session: Session, item: Listed, key: str) -> None:
    if item.key.endswith("/") and not item.size:
        # A directory's own object; not every store copies those.
        found = await head(session, item.key)
        if found is not None:
            await put_small(session, key, b"", found.attributes)
        return
    try:
        await copy_object(session, Source.of(session, item), key)
    except MissingError:
        # Removed by others since it was listed.
        if await head(session, item.key) is not None:
            raise


async def _prove(session: Session, listed: list[Listed], old: str, new: str) -> None:
    """Compare all copies: by what the listings say of both, or else one by one."""
    there = {item.key: item async for item in list_all(session, new)}

    async def prove(item: Listed) -> None:
        key = new + item.key[len(old) :]
        copy = there.get(key)
        if copy is not None and is_same_etag(copy.etag, item.etag) and copy.size == item.size:
            return
        found = await head(session, item.key)
        # Removed by others, or changed: then it is copied again.
        if found is not None and found.etag == item.etag:
            await prove_copy(session, found, key, is_strict=True)

    await each(session.options.max_parallel, listed, prove)
