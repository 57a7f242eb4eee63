"""Plain names: directories, live and whole files outside of checkpoints, under their own keys.

The gateway's own directory and unfinished writes never appear and can't be named. A file's
attributes and the digest of its bytes come with it in one PUT, so a reader sees them together or
not at all. Any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

from ckptgate.errors import ExistsError, MissingError, RefusedError, UnusableError
from ckptgate.model.ids import check_relative_path
from ckptgate.ports.store import PlainEntry
from ckptgate_adapters.s3_store.attributes import Attributes, ObjectKind
from ckptgate_adapters.s3_store.directories import Directories, is_hidden
from ckptgate_adapters.s3_store.failures import OutOfRangeError
from ckptgate_adapters.s3_store.moving import rename
from ckptgate_adapters.s3_store.objects import delete, first_below, head, put_small
from ckptgate_adapters.s3_store.putting import put_local
from ckptgate_adapters.s3_store.session import Session
from ckptgate_adapters.s3_store.upload import Uploads

__all__ = ["S3Plain", "keep_directory"]

_log = logging.getLogger(__name__)


class S3Plain:
    """`ports.store.PlainTree` on S3."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._directories = Directories(session)
        self._plain_uploads = Uploads(session, _tell)

    def plain_stat(self, path: str) -> PlainEntry:
        """What is there now, fresh."""
        _check_plain(path)
        return self._session.run(self._plain_stat(path))

    def plain_list(self, path: str) -> list[PlainEntry]:
        """The directory's entries, sorted by name."""
        _check_plain(path)
        return self._session.run(self._plain_list(path))

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a plain file."""
        _check_plain(path)
        if length <= 0:
            return b""
        return self._session.run(self._plain_read(self._plain_key(path), offset, length))

    def plain_put(self, path: str, source: str, *, mode: int, mtime_ns: int) -> None:
        """Replace the file *path* by a copy of the local file *source*, atomically, durably."""
        _check_plain(path)
        self._session.run(self._plain_put(path, source, mode, mtime_ns))

    def plain_mkdir(self, path: str, mode: int) -> None:
        """Make a directory; an existing one is success."""
        _check_plain(path)
        self._session.run(self._plain_mkdir(path, mode))

    def plain_symlink(self, path: str, target: str) -> None:
        """Make or replace a symlink."""
        _check_plain(path)
        self._session.run(self._plain_symlink(path, target))

    def plain_remove(self, path: str, *, is_dir: bool) -> None:
        """Remove a file, symlink or empty directory; nothing there is success."""
        _check_plain(path)
        self._session.run(self._plain_remove_dir(path) if is_dir else self._plain_remove_file(path))

    def plain_rename(self, old: str, new: str) -> None:
        """Rename; *old* missing and *new* there is success (an earlier call landed)."""
        _check_plain(old)
        _check_plain(new)
        if old == new:
            self.plain_stat(old)
            return
        if f"{new}/".startswith(f"{old}/"):
            msg = f"{old!r} can't be moved into itself ({new!r})"
            raise RefusedError(msg, subject=old)
        self._session.run(self._plain_rename(old, new))

    # On the loop

    def _plain_key(self, path: str) -> str:
        return self._session.key(path)

    async def _plain_stat(self, path: str) -> PlainEntry:
        below = self._session.location.below(path)
        name = path.rpartition("/")[2]
        if not path:
            look = await self._directories.look(below)
            return await self._directories.root_entry(look)
        found, look = await asyncio.gather(
            head(self._session, self._plain_key(path)), self._directories.look(below)
        )
        if look is not None:
            return await self._directories.directory_entry(name, look)
        if found is None:
            raise _missing(path)
        return await self._directories.file_entry(name, found)

    async def _plain_list(self, path: str) -> list[PlainEntry]:
        entries = await self._directories.entries(self._session.location.below(path))
        if entries is None and path:
            raise _missing(path)
        return entries or []

    async def _plain_read(self, key: str, offset: int, length: int) -> bytes:
        wanted = f"bytes={offset}-{offset + length - 1}"

        async def read() -> bytes:
            body = await self._session.body(limit=length, Key=key, Range=wanted)
            return body.data

        try:
            return await self._session.policy.run(read, "get_object")
        except OutOfRangeError:
            return b""

    async def _plain_put(self, path: str, source: str, mode: int, mtime_ns: int) -> None:
        key = self._plain_key(path)
        await self._plain_no_directory(path)
        attributes = _owned(ObjectKind.FILE, mode=mode, mtime_ns=mtime_ns)
        await put_local(self._session, self._plain_uploads, key, source, attributes)

    async def _plain_mkdir(self, path: str, mode: int) -> None:
        key = self._plain_key(path)
        found, is_there = await asyncio.gather(
            head(self._session, key), self._directories.is_there(f"{key}/")
        )
        if is_there:
            return
        if found is not None:
            msg = f"{path!r} is there and no directory"
            raise ExistsError(msg, subject=path)
        attributes = _owned(ObjectKind.DIR, mode=mode, mtime_ns=time.time_ns())
        # Without a condition: some services say of a directory that was that it is there.
        await put_small(self._session, f"{key}/", b"", attributes)

    async def _plain_symlink(self, path: str, target: str) -> None:
        key = self._plain_key(path)
        await self._plain_no_directory(path)
        attributes = _owned(ObjectKind.SYMLINK, mode=0o777, mtime_ns=time.time_ns())
        body = target.encode("utf-8", "surrogateescape")
        await put_small(self._session, key, body, attributes)

    async def _plain_no_directory(self, path: str) -> None:
        if await self._directories.is_there(self._session.location.below(path)):
            msg = f"{path!r} is a directory"
            raise ExistsError(msg, subject=path)

    async def _plain_remove_file(self, path: str) -> None:
        key = self._plain_key(path)
        if await head(self._session, key) is not None:
            await keep_directory(self._session, path.rpartition("/")[0])
            await delete(self._session, key)
        else:
            await self._plain_no_directory(path)

    async def _plain_remove_dir(self, path: str) -> None:
        key = self._plain_key(path)
        prefix = f"{key}/"
        listed = await first_below(self._session, prefix, 2)
        if any(item.key != prefix for item in listed):
            msg = f"{path!r} is not empty"
            raise ExistsError(msg, subject=path)
        if listed:
            await keep_directory(self._session, path.rpartition("/")[0])
            await delete(self._session, prefix)
        elif await head(self._session, key) is not None:
            msg = f"{path!r} is no directory"
            raise UnusableError(msg, subject=path)

    async def _plain_rename(self, old: str, new: str) -> None:
        async def keep() -> None:
            await keep_directory(self._session, old.rpartition("/")[0])

        await rename(self._session, self._plain_key(old), self._plain_key(new), keep)


async def keep_directory(session: Session, path: str) -> None:
    """Let the directory *path* stay when what makes it one goes."""
    if not path:
        return
    prefix = session.location.below(path)
    listed = await first_below(session, prefix, 1)
    if not listed or listed[0].key != prefix:
        attributes = _owned(ObjectKind.DIR, mode=0o755, mtime_ns=time.time_ns())
        await put_small(session, prefix, b"", attributes)


def _tell(text: str) -> None:
    _log.warning("s3-bucket-warning problem=%s", text)


def _owned(kind: ObjectKind, *, mode: int, mtime_ns: int) -> Attributes:
    return Attributes(
        kind=kind, mode=mode & 0o7777, mtime_ns=mtime_ns, uid=os.geteuid(), gid=os.getegid()
    )


def _check_plain(path: str) -> None:
    if path:
        check_relative_path(path)
    if any(is_hidden(part) for part in path.split("/")):
        msg = f"{path!r} is the gateway's own, not a plain name"
        raise RefusedError(msg, subject=path)


def _missing(path: str) -> MissingError:
    msg = f"{path!r} is not there"
    return MissingError(msg, subject=path)
