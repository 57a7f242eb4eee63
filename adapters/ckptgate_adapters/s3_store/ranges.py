"""Ranges of one version of an object. Loop only."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Final

from ckptgate.errors import IntegrityError, TransientStoreError, UnusableError
from ckptgate_adapters.s3_store.failures import ConditionFailedError, OutOfRangeError
from ckptgate_adapters.s3_store.session import Answer, Session

__all__ = ["ReplacedError", "read_bytes", "read_into", "size_of"]


class ReplacedError(TransientStoreError):
    """The version that was read until now is gone."""


_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)")


def size_of(answer: Answer) -> int:
    """Bytes of the whole object, from the answer to a range of it or to all of it."""
    match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    return int(match.group(3)) if match else int(answer["ContentLength"])


async def read_into(
    session: Session, key: str, offset: int, view: memoryview, *, etag: str = ""
) -> Answer:
    """Fill *view* with the bytes from *offset* on, of the version *etag* if that is given.

    Raises:
        IntegrityError: the object ends before.
        ReplacedError: it is another version now.
        TransientStoreError: nothing is known.
    """
    done = 0

    def start() -> None:
        nonlocal done
        done = 0

    def take(piece: bytes) -> None:
        nonlocal done
        view[done : done + len(piece)] = piece
        done += len(piece)

    answer = await _read(session, key, offset, len(view), start, take, etag)
    if done != len(view):
        path = session.location.path(key)
        msg = f"{path!r} ends at byte {offset + done} in the store, wanted {offset + len(view)}"
        raise IntegrityError(msg, subject=path)
    return answer


async def read_bytes(
    session: Session, key: str, offset: int, length: int, *, etag: str = ""
) -> tuple[bytes, Answer | None]:
    """Up to *length* bytes at *offset*, short only at the end; no answer if it ends before."""
    # It grows in place, and gives its bytes away without a copy.
    taken = io.BytesIO()

    def start() -> None:
        taken.seek(0)
        taken.truncate()

    try:
        answer = await _read(session, key, offset, length, start, taken.write, etag)
    except OutOfRangeError:
        return b"", None
    return taken.getvalue(), answer


async def _read(
    session: Session,
    key: str,
    offset: int,
    length: int,
    start: Callable[[], None],
    take: Callable[[bytes], object],
    etag: str,
) -> Answer:
    """The range, asked for again after errors that may pass; *start* begins anew."""
    path = session.location.path(key)
    params = {"Key": key, "Range": f"bytes={offset}-{offset + length - 1}"}
    if etag:
        params["IfMatch"] = etag

    def check(answer: Answer) -> None:
        match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
        if int(match.group(1)) != offset if match else offset:
            msg = f"the store answers {answer.get('ContentRange', 'with all')} for byte {offset} on"
            raise UnusableError(f"{msg} of {path!r}", subject=path)

    async def once() -> Answer:
        start()
        return await session.stream(take, limit=length, check=check, **params)

    try:
        return await session.policy.run(once, f"read {key}")
    except ConditionFailedError as exc:
        msg = f"{path!r} was replaced while it was read"
        raise ReplacedError(msg, subject=path) from exc
