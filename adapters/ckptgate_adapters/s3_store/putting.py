"""A local file under a plain key: its bytes, attributes and digest in one step.

The file may be written while it is read (logs are). Of one that only grew, the bytes that it had at
first are stored; one whose bytes changed meanwhile is stored at a later try, when they don't.
Coroutines run on the session's loop; files are read on its threads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import blake3

from ckptgate.errors import IntegrityError, MissingError, TransientStoreError
from ckptgate.ports.store import DigestedFile
from ckptgate_adapters.s3_store.attributes import Attributes
from ckptgate_adapters.s3_store.objects import put_small
from ckptgate_adapters.s3_store.session import Session
from ckptgate_adapters.s3_store.upload import SMALL_BYTES, Uploads

__all__ = ["put_local"]

_READ_BYTES: Final = 1024 * 1024


async def put_local(
    session: Session, uploads: Uploads, key: str, path: str, attributes: Attributes
) -> None:
    """Store the local file *path* under *key*, with the digest of its bytes.

    Raises:
        MissingError: there is no such file.
        TransientStoreError: it was changed while it was read, or nothing is known.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        msg = f"cannot read {path!r}: it is not there"
        raise MissingError(msg, subject=path) from exc
    try:
        size = os.fstat(fd).st_size
        hasher = blake3.blake3()
        pieces: list[bytes] = []
        keep: Callable[[bytes], object] = pieces.append if size <= SMALL_BYTES else len
        await asyncio.to_thread(_read, fd, size, path, hasher.update, keep)
    finally:
        os.close(fd)
    digest = hasher.hexdigest()
    if size <= SMALL_BYTES:
        await put_small(session, key, b"".join(pieces), replace(attributes, digest=digest))
        return
    source = DigestedFile(path=path, size=size, digest=digest, chunks=b"", may_link=False)
    try:
        async with session.files:
            await uploads.send(key, source, more=attributes.metadata(), may_grow=True)
    except IntegrityError as exc:
        msg = f"{path!r} was changed while it was stored: {exc}"
        raise TransientStoreError(msg, subject=path) from exc


def _read(
    fd: int,
    size: int,
    path: str,
    digest: Callable[[bytes], object],
    keep: Callable[[bytes], object],
) -> None:
    done = 0
    while done < size:
        piece = os.pread(fd, min(_READ_BYTES, size - done), done)
        if not piece:
            msg = f"{path!r} got shorter while it was read"
            raise TransientStoreError(msg, subject=path)
        digest(piece)
        keep(piece)
        done += len(piece)
