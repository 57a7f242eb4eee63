"""Where an `OSError` of the file system becomes an error of the store's contract: here, once.

Grouped by what the caller would do: wait for space, call a person, or call again. What is not
known to be permanent is transient. Any thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FullError,
    IntegrityError,
    MisplacedError,
    MissingError,
    TransientStoreError,
    UnusableError,
)

__all__ = ["translate", "translated"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNUSABLE: Final = frozenset({
    errno.EROFS, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG,
    errno.EMLINK, errno.EXDEV, errno.ENAMETOOLONG,
})  # fmt: skip
_MISPLACED: Final = {
    errno.ELOOP: "a symlink is in its place, and none is followed there",
    errno.ENOTDIR: "a symlink or file is in the place of a directory above it",
}
_MISPLACED_HINT: Final = "ls -l names it; move it away, and put back what belongs there"
_EXISTS: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR})
_HINTS: Final = {
    errno.EROFS: "mount -o remount,rw (the store is mounted read-only)",
    errno.EACCES: "ls -ld (the gateway's user may not write there)",
    errno.EDQUOT: "quota -s (a quota is used up)",
    errno.ENOSPC: "df -h; df -i (no space or no inodes left)",
}


def translate(exc: OSError, subject: str, doing: str) -> CkptError:
    """The contract's error for *exc*, which happened while *doing* something to *subject*."""
    if isinstance(exc, CkptError):
        return exc
    code = exc.errno or errno.EIO
    why = os.strerror(code)
    msg = f"cannot {doing} {subject!r}: {why}"
    hint = _HINTS.get(code, "")
    if code == errno.ENOENT:
        return MissingError(f"cannot {doing} {subject!r}: it is not there", subject=subject)
    if code in _FULL:
        return FullError(msg, subject=subject, hint=hint, errno_value=code)
    if code in _EXISTS:
        return ExistsError(msg, subject=subject, errno_value=code)
    if code in _MISPLACED:
        msg = f"cannot {doing} {subject!r}: {_MISPLACED[code]}"
        return MisplacedError(msg, subject=subject, hint=_MISPLACED_HINT, errno_value=code)
    if code in _UNUSABLE:
        return UnusableError(msg, subject=subject, hint=hint, errno_value=code)
    if code == errno.EBADMSG:
        return IntegrityError(msg, subject=subject, errno_value=errno.EIO)
    return TransientStoreError(msg, subject=subject, errno_value=code)


@contextmanager
def translated(subject: str, doing: str) -> Generator[None]:
    """Let no `OSError` but the contract's leave the block."""
    try:
        yield
    except CkptError:
        raise
    except OSError as exc:
        raise translate(exc, subject, doing) from exc
