"""From a client's path to nodes, by the look-ups that a kernel would do. One walk, one thread.

Owns the rules that a path never leads out of the store, and that every look-up is forgotten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import InvalidNameError
from ckptgate.ports.spool import ROOT_INO, NodeKind
from ckptgate.vfs.interface import Attr, Caller, Entry, FileSystem

__all__ = ["Place", "Walk", "walking"]

_LINKS_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Place:
    """What a path leads to.

    Attributes:
        parent: number of the directory that holds the name.
        name: in it; "" for the store's root.
        number: by which a directory is asked for what it holds.
        attr: of the node.
        link: target of the symlink that the path itself is, "" if it is none.
    """

    parent: int
    name: str
    number: int
    attr: Attr
    link: str = ""


class Walk:
    """Look-ups for one request."""

    def __init__(self, fs: FileSystem, caller: Caller) -> None:
        self._fs = fs
        self._caller = caller
        self._seen: list[tuple[int, int]] = []

    def saw(self, entry: Entry) -> Entry:
        """An answer that counts as a look-up."""
        self._seen.append((entry.number or entry.attr.ino, 1))
        return entry

    def find(self, path: str, *, is_followed: bool = True) -> Place:
        """What a path leads to; *is_followed*: a symlink at its end is followed.

        Raises:
            OSError: ENOENT, ENOTDIR, ELOOP, or what the look-up says.
        """
        todo = _parts(path)[::-1]
        root = Place(0, "", ROOT_INO, self._fs.getattr(self._caller, ROOT_INO, None))
        above, found, links, link = [root], root, 0, ""
        while todo:
            part = todo.pop()
            if part == "..":
                above.pop()
                if not above:
                    msg = f"{path!r}: a symlink leads out of the store"
                    raise OSError(errno.ENOENT, msg)
                found = above[-1]
                continue
            entry = self.saw(self._fs.lookup(self._caller, above[-1].number, part))
            attr = entry.attr
            found = Place(above[-1].number, part, entry.number or attr.ino, attr)
            if attr.kind is NodeKind.SYMLINK and (todo or is_followed):
                links += 1
                if links > _LINKS_MAX:
                    raise OSError(errno.ELOOP, f"{path!r}: too many symlinks")
                target = self._fs.readlink(self._caller, attr.ino)
                link = link or ("" if todo else target)
                todo.extend(_target(path, target)[::-1])
                found = above[-1]
            elif attr.kind is NodeKind.DIR:
                above.append(found)
            elif todo:
                raise OSError(errno.ENOTDIR, f"{path!r}: {part!r} is not a directory")
        return dataclasses.replace(found, link=link) if link else found

    def parent(self, path: str) -> tuple[int, str]:
        """Number of the directory of a path's last name, and that name.

        Raises:
            OSError: as `find`; EINVAL for the root.
        """
        parts = _parts(path)
        if not parts:
            raise OSError(errno.EINVAL, "this is the root of the store")
        place = self.find("/".join(parts[:-1]))
        if place.attr.kind is not NodeKind.DIR:
            raise OSError(errno.ENOTDIR, f"{path!r}: its parent is not a directory")
        return place.number, parts[-1]

    def keep(self, place: Place) -> None:
        """The place stays known: whoever asked for it says when it need not any more."""
        if (place.number, 1) in self._seen:
            self._seen.remove((place.number, 1))

    def forget(self) -> None:
        """Done: nothing is known any more."""
        if self._seen:
            self._fs.forget(self._seen)
            self._seen = []


@contextlib.contextmanager
def walking(fs: FileSystem, caller: Caller) -> Generator[Walk]:
    """A walk whose look-ups are forgotten in the end."""
    walk = Walk(fs, caller)
    try:
        yield walk
    finally:
        walk.forget()


def _target(path: str, target: str) -> list[str]:
    if target.startswith("/"):
        raise OSError(errno.ENOENT, f"{path!r}: a symlink leads out of the store: {target!r}")
    return [part for part in target.split("/") if part not in {"", "."}]


def _parts(path: str) -> list[str]:
    parts = path.split("/") if path else []
    if any(part in {"", ".", ".."} or "\0" in part for part in parts):
        msg = f"{path!r} is not a path in a store"
        raise InvalidNameError(msg, subject=path)
    return parts
