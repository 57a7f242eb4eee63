"""What a plain name is, as an object's user metadata says it; and which names can be shown.

It owns the rule how attributes are written and read: an object that others wrote has none, and gets
defaults; what is written there wrongly counts as not written. Metadata is text of header lines, so
what may hold other characters is percent-encoded. Pure; any thread.
"""

from __future__ import annotations

import enum
import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ckptgate.errors import InvalidNameError
from ckptgate.model.ids import check_name
from ckptgate.ports.store import PlainEntry, PlainKind

__all__ = [
    "DEFAULT_DIR_MODE",
    "Attributes",
    "ObjectKind",
    "can_be_shown",
    "entry_of",
    "read_attributes",
    "time_ns",
]

_PREFIX: Final = "ckptgate-"
_DEFAULT_FILE_MODE: Final = 0o644
DEFAULT_DIR_MODE: Final = 0o755
_LINK_MODE: Final = 0o777
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NS: Final = 1_000_000_000


class ObjectKind(enum.StrEnum):
    """What an object is."""

    FILE = "file"
    DIR = "dir"
    """A zero-byte object `path/`."""
    SYMLINK = "symlink"
    """Its body is the target."""
    POINTER = "pointer"
    """A symlink, too; its body is the target and a newline, which people and programs without
    ckptgate read as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What an object's metadata says.

    Attributes:
        kind: what it is.
        mode: permission bits, None where nothing says.
        mtime_ns: modification time, None where nothing says.
        uid, gid: owner, None where nothing says.
        digest: BLAKE3 of the body, "" where nothing says.
        attempt: the attempt that it was published for, "" for none.
    """

    kind: ObjectKind = ObjectKind.FILE
    mode: int | None = None
    mtime_ns: int | None = None
    uid: int | None = None
    gid: int | None = None
    digest: str = ""
    attempt: str = ""

    def metadata(self) -> dict[str, str]:
        """As the user metadata of a request."""
        found = {"type": str(self.kind)}
        if self.mode is not None:
            found["mode"] = f"{self.mode:04o}"
        for name, value in (("mtime", self.mtime_ns), ("uid", self.uid), ("gid", self.gid)):
            if value is not None:
                found[name] = str(value)
        if self.digest:
            found["blake3"] = self.digest
        if self.attempt:
            found["attempt"] = urllib.parse.quote(self.attempt, safe="")
        return {_PREFIX + name: value for name, value in found.items()}


def read_attributes(metadata: Mapping[str, str]) -> Attributes:
    """What the user metadata of an answer says; what is wrong in it counts as missing."""
    found = {key.lower(): value for key, value in metadata.items()}

    def text(name: str) -> str:
        return found.get(_PREFIX + name, "")

    kind = text("type")
    digest = text("blake3")
    return Attributes(
        kind=ObjectKind(kind) if kind in set(ObjectKind) else ObjectKind.FILE,
        mode=_number(text("mode"), 8, 0, 0o7777),
        mtime_ns=_number(text("mtime"), 10, -(2**63), 2**63 - 1),
        uid=_number(text("uid"), 10, 0, 2**32 - 1),
        gid=_number(text("gid"), 10, 0, 2**32 - 1),
        digest=digest if _DIGEST.fullmatch(digest) else "",
        attempt=urllib.parse.unquote(text("attempt")),
    )


def _number(text: str, base: int, lowest: int, highest: int) -> int | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        value = int(text, base)
    except ValueError:
        return None
    return value if lowest <= value <= highest else None


def time_ns(answer: Mapping[str, Any]) -> int:
    """When the object was stored, by the server's clock, in ns; 0 where it doesn't say."""
    stored = answer.get("LastModified")
    if not isinstance(stored, datetime):
        return 0
    return round(stored.timestamp() * 1000) * (_NS // 1000)


def entry_of(
    name: str, attributes: Attributes, *, size: int, stored_ns: int, target: str = ""
) -> PlainEntry:
    """The entry of a file or symlink.

    Args:
        name: that it shows.
        attributes: of the object.
        size: bytes of its body.
        stored_ns: when it was stored.
        target: of a symlink.
    """
    is_link = attributes.kind in {ObjectKind.SYMLINK, ObjectKind.POINTER}
    default = _LINK_MODE if is_link else _DEFAULT_FILE_MODE
    return PlainEntry(
        name=name,
        kind=PlainKind.SYMLINK if is_link else PlainKind.FILE,
        size=len(target.encode("utf-8", "surrogateescape")) if is_link else size,
        mode=default if attributes.mode is None else attributes.mode,
        mtime_ns=stored_ns if attributes.mtime_ns is None else attributes.mtime_ns,
        uid=os.geteuid() if attributes.uid is None else attributes.uid,
        gid=os.getegid() if attributes.gid is None else attributes.gid,
        target=target,
    )


def can_be_shown(name: str) -> bool:
    """Whether a part of somebody's key can be a name in a directory."""
    try:
        check_name(name)
    except InvalidNameError:
        return False
    return True
