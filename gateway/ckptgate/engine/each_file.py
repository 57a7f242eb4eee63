"""One thing done to each file of a checkpoint, several at a time. Any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ckptgate.model.documents import FileEntry

__all__ = ["FILES_AT_ONCE", "for_each_file"]

_T = TypeVar("_T")

FILES_AT_ONCE: Final = 8


def for_each_file(files: Sequence[FileEntry], work: Callable[[FileEntry], _T]) -> list[_T]:
    """What *work* gives for each file, in their order; it is called on threads of its own.

    The first error is raised once those that run have ended; no other file is begun then.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="each-file") as pool:
        try:
            return list(pool.map(work, files))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
