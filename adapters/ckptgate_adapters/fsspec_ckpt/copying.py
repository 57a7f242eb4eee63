"""Bytes from file to file: blocks are shared where both are on one file system that can do it.

A local file is never linked or renamed into the spool: whoever has it open or mapped could go on
writing to bytes that a checkpoint consists of. Any thread.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from ckptgate.vfs.bytes import copy_bytes
from ckptgate_adapters.fsspec_ckpt.readers import CkptReader, StoredFile

__all__ = ["cat_ranges", "copy", "part_of"]

_PIECE_BYTES: Final = 4 << 20
_AT_ONCE: Final = 8


def copy(reader: Any, writer: Any, callback: Any = None) -> None:
    """Copy all of *reader* to the empty file *writer*.

    Args:
        reader: a file at its beginning.
        writer: a file.
        callback: fsspec's, told of sizes.
    """
    size = _size(reader)
    if callback is not None and size is not None:
        callback.set_size(size)
    fds = _descriptors(reader, writer)
    if fds is not None:
        copy_bytes(*fds)
        if callback is not None:
            callback.relative_update(size)
        writer.seek(0, os.SEEK_END)
        return
    while data := reader.read(_PIECE_BYTES):
        writer.write(data)
        if callback is not None:
            callback.relative_update(len(data))


def _size(file: Any) -> int | None:
    size = getattr(file, "size", None)
    if isinstance(size, int):
        return size
    try:
        return os.fstat(file.fileno()).st_size
    except (OSError, AttributeError):
        return None


def _descriptors(reader: Any, writer: Any) -> tuple[int, int] | None:
    """Descriptors of both, if the kernel can copy between them."""
    if isinstance(reader, StoredFile) or (
        isinstance(reader, CkptReader) and not reader.is_complete
    ):
        return None
    try:
        source, target = reader.fileno(), writer.fileno()
        is_empty = os.fstat(target).st_size == 0
    except (OSError, AttributeError, io.UnsupportedOperation):
        return None
    return (source, target) if is_empty else None


def cat_ranges(fs: Any, paths: Any, starts: Any, ends: Any, *, on_error: str) -> list[Any]:
    """Ranges of files, in their order; an error is an item of the list, or raised."""
    if not isinstance(paths, list):
        raise TypeError("paths is not a list")
    names = cast("list[str]", paths)
    count = len(names)
    firsts: list[Any] = list(starts) if hasattr(starts, "__iter__") else [starts] * count
    lasts: list[Any] = list(ends) if hasattr(ends, "__iter__") else [ends] * count
    wanted = list(zip(names, firsts, lasts, strict=True))
    by_path: dict[str, list[int]] = {}
    for index, (path, _, _) in enumerate(wanted):
        by_path.setdefault(path, []).append(index)
    found: list[Any] = [None] * count

    def one(path: str) -> None:
        try:
            with fs.open(path, "rb") as file:
                for index in by_path[path]:
                    found[index] = part_of(file, wanted[index][1], wanted[index][2])
        except OSError as exc:
            if on_error == "raise":
                raise
            for index in by_path[path]:
                found[index] = exc if found[index] is None else found[index]

    if len(by_path) <= 1:
        for path in by_path:
            one(path)
    else:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(one, by_path))
    return found


def part_of(file: Any, start: int | None, end: int | None) -> bytes:
    """Bytes of an open file from *start* to *end*; positions below 0 count from its end."""
    size = file.seek(0, os.SEEK_END)
    first, last, _ = slice(start, end).indices(size)
    file.seek(first)
    return bytes(file.read(max(last - first, 0)))
