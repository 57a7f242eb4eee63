"""Names and ids: their syntax, limits and checks, and only here.

Every name that comes from a caller, a manifest or a log passes `check_name` or
`check_relative_path` before it is used, so no path can leave its checkpoint.
"""

from __future__ import annotations

import errno
import re
from typing import Final, NewType

from ckptgate.errors import InvalidNameError

__all__ = [
    "CHUNK_BYTES",
    "MAX_CHECKPOINT_NAME_BYTES",
    "MAX_NAME_BYTES",
    "MAX_PATH_BYTES",
    "AttemptId",
    "Digest",
    "FileId",
    "MemberId",
    "RunPath",
    "check_attempt_id",
    "check_checkpoint_name",
    "check_digest",
    "check_member_id",
    "check_name",
    "check_relative_path",
    "chunk_count",
    "is_attempt_id",
    "make_attempt_id",
    "parents_of",
    "split_attempt_id",
]

RunPath = NewType("RunPath", str)
"""Path of a run directory in the store: "" for the root, else "a/b" without leading slash."""
AttemptId = NewType("AttemptId", str)
"""`<name at creation>.<k>`."""
MemberId = NewType("MemberId", str)
"""`<host>-<8 hex>`."""
FileId = NewType("FileId", str)
"""Id of a file's bytes in one spool: decimal digits, never used again."""
Digest = NewType("Digest", str)
"""BLAKE3 as 64 lower-case hex digits."""

CHUNK_BYTES: Final = 64 * 1024 * 1024
"""Bytes in one separately verifiable chunk of a file."""
MAX_NAME_BYTES: Final = 255
MAX_CHECKPOINT_NAME_BYTES: Final = 240
"""A checkpoint's name gets a suffix in the store, so it is shorter than a file's."""
MAX_PATH_BYTES: Final = 4096

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MEMBER = re.compile(r"[A-Za-z0-9_.-]{1,80}-[0-9a-f]{8}")
_ATTEMPT = re.compile(r"(?s)(.+)\.(0|[1-9][0-9]{0,8})")
_PLAIN = re.compile(r"(?:\.?[A-Za-z0-9_-][A-Za-z0-9_.-]*/)*\.?[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""Most paths by far: nothing in them is to be looked at twice."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(name: str) -> str:
    """Return *name* if it may be one component of a path.

    Raises:
        InvalidNameError: it is empty, `.`, `..`, holds `/`, a control character (newline among
            them), is no UTF-8 (lone surrogates), or is longer than 255 bytes.
    """
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError as exc:
        msg = f"name is not UTF-8: {name!r}"
        raise InvalidNameError(msg, subject=repr(name), errno_value=errno.EILSEQ) from exc
    if size > MAX_NAME_BYTES:
        msg = f"name is {size} bytes long, at most {MAX_NAME_BYTES} are possible: {name[:40]!r}..."
        raise InvalidNameError(msg, subject=name, errno_value=errno.ENAMETOOLONG)
    if name in {"", ".", ".."} or "/" in name or _CONTROL.search(name):
        msg = f"name is not usable: {name!r} (empty, '.', '..', '/' or a control character)"
        raise InvalidNameError(msg, subject=repr(name))
    return name


def check_checkpoint_name(name: str) -> str:
    """Return *name* if a checkpoint may have it: as `check_name`, at most 240 bytes."""
    check_name(name)
    size = len(name.encode("utf-8"))
    if size > MAX_CHECKPOINT_NAME_BYTES:
        msg = (
            f"checkpoint name is {size} bytes long, "
            f"at most {MAX_CHECKPOINT_NAME_BYTES} are possible: {name[:40]!r}..."
        )
        raise InvalidNameError(msg, subject=name, errno_value=errno.ENAMETOOLONG)
    return name


def check_relative_path(path: str) -> str:
    """Return *path* if it stays below the directory that it is relative to."""
    if len(path) <= MAX_NAME_BYTES and _PLAIN.fullmatch(path):
        return path
    if path.startswith("/"):
        msg = f"path is absolute: {path!r}"
        raise InvalidNameError(msg, subject=path)
    for part in path.split("/"):
        check_name(part)
    if len(path.encode("utf-8")) > MAX_PATH_BYTES:
        msg = f"path is longer than {MAX_PATH_BYTES} bytes: {path[:40]!r}..."
        raise InvalidNameError(msg, subject=path, errno_value=errno.ENAMETOOLONG)
    return path


def parents_of(path: str) -> list[str]:
    """The directories above *path*, outermost first, without the one it is relative to."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def check_digest(text: str) -> Digest:
    """Return *text* if it is a BLAKE3 digest in hex."""
    if not _DIGEST.fullmatch(text):
        msg = f"not a BLAKE3 digest (64 hex digits): {text[:80]!r}"
        raise InvalidNameError(msg, subject=text)
    return Digest(text)


def check_member_id(text: str) -> MemberId:
    """Return *text* if it is a member's id."""
    if not _MEMBER.fullmatch(text):
        msg = f"not a member id (<host>-<8 hex>): {text[:100]!r}"
        raise InvalidNameError(msg, subject=text)
    return MemberId(text)


def make_attempt_id(name: str, k: int) -> AttemptId:
    """The id of the *k*-th try at the checkpoint *name*."""
    return AttemptId(f"{check_checkpoint_name(name)}.{k}")


def split_attempt_id(attempt: str) -> tuple[str, int]:
    """The name at creation and the number of *attempt*.

    Raises:
        InvalidNameError: it has no such form.
    """
    found = _ATTEMPT.fullmatch(attempt)
    if not found:
        msg = f"not an attempt id (<name>.<number>): {attempt[:100]!r}"
        raise InvalidNameError(msg, subject=attempt)
    return check_checkpoint_name(found[1]), int(found[2])


def check_attempt_id(text: str) -> AttemptId:
    """Return *text* if it is an attempt's id."""
    split_attempt_id(text)
    return AttemptId(text)


def is_attempt_id(text: str) -> bool:
    """Whether *text* is an attempt's id."""
    try:
        split_attempt_id(text)
    except InvalidNameError:
        return False
    return True


def chunk_count(size: int) -> int:
    """How many chunks a file of *size* bytes has; an empty file has none."""
    return -(-size // CHUNK_BYTES)
