"""A local file under a plain key: its bytes, attributes and digest in one step.

The file may be written while it is read (logs are). Of one that only grew, the bytes that it had at
first are stored. Coroutines run on the session's loop; files are read on its threads.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import blake3

from ckptgate.errors import MissingError, TransientStoreError
from ckptgate_adapters.s3_store.attributes import Attributes
from ckptgate_adapters.s3_store.objects import put_small
from ckptgate_adapters.s3_store.session import Session

__all__ = ["put_local"]

_READ_BYTES = 4 * 1024 * 1024


async def put_local(session: Session, key: str, path: str, attributes: Attributes) -> None:
    """Store the local file *path* under *key*, with the digest of its bytes.

    Raises:
        MissingError: there is no such file.
        TransientStoreError: it got shorter while it was read, or nothing is known.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        msg = f"cannot read {path!r}: it is not there"
        raise MissingError(msg, subject=path) from exc
    try:
        size = os.fstat(fd).st_size
        data = await asyncio.to_thread(_read, fd, size, path)
        digest = blake3.blake3(data).hexdigest()
        await put_small(session, key, data, replace(attributes, digest=digest))
    finally:
        os.close(fd)


def _read(fd: int, size: int, path: str) -> bytes:
    pieces: list[bytes] = []
    done = 0
    while done < size:
        piece = os.pread(fd, min(_READ_BYTES, size - done), done)
        if not piece:
            msg = f"{path!r} got shorter while it was read"
            raise TransientStoreError(msg, subject=path)
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)
