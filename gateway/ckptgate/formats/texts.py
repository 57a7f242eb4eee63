"""Small JSON documents that frameworks keep beside their shards.

Owns the rule that they are read up to a bound, by type, and that what isn't as it must be is an
IntegrityError that names the file. No state; any thread.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from ckptgate.errors import IntegrityError, InvalidNameError
from ckptgate.formats.base import FileView, read_exact
from ckptgate.model.ids import check_relative_path

__all__ = ["MAX_TEXT_BYTES", "checked_path", "read_json", "read_text"]

MAX_TEXT_BYTES: Final = 128 * 1024 * 1024
"""A larger document is refused."""

_T = TypeVar("_T")


def read_text(view: FileView, path: str) -> bytes:
    """All of a small file.

    Raises:
        IntegrityError: it is over the limit, or short.
    """
    if view.size > MAX_TEXT_BYTES:
        msg = f"{path} has {view.size} bytes, limit {MAX_TEXT_BYTES}"
        raise IntegrityError(msg, subject=path)
    return read_exact(view, 0, view.size, path)


def read_json(view: FileView, path: str, kind: type[_T]) -> _T:
    """The document, fields that *kind* doesn't have left out.

    Raises:
        IntegrityError: it is no such JSON.
    """
    data = read_text(view, path)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{path} is not what it must be: {exc}"
        raise IntegrityError(msg, subject=path) from exc


def checked_path(relative: str, path: str) -> str:
    """*relative*, which *path* refers to, if it stays inside of the checkpoint.

    Raises:
        IntegrityError: it doesn't.
    """
    try:
        return check_relative_path(relative)
    except InvalidNameError as exc:
        msg = f"{path} refers to {relative[:80]!r}, outside of the checkpoint"
        raise IntegrityError(msg, subject=path) from exc
