"""Names and attributes as fsspec asks for them. Listings are never cached. Any thread."""

from __future__ import annotations

import datetime
import errno
import stat
from typing import Any, Final

from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.base import Base, umask
from ckptgate_adapters.fsspec_ckpt.untyped import AbstractFileSystem

__all__ = ["NameCalls"]

_KINDS: Final = {"file": "file", "dir": "directory", "symlink": "other"}
_TYPE_BITS: Final = {"file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK}


class NameCalls(Base):
    """Names and attributes."""

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """What a local file system tells of a file, of a symlink's target where there is one."""
        path = self._strip_protocol(path)
        try:
            told = self.call(messages.Stat(path=path)).told
        except FileNotFoundError:
            # A symlink that leads nowhere is there all the same.
            told = self.call(messages.Stat(path=path, is_followed=False)).told
        assert told.facts is not None
        return _info(path, told.facts, told.target)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What a directory holds; a file itself."""
        path = self._strip_protocol(path)
        answered = self.call(messages.List(path=path))
        facts = answered.told.facts
        assert facts is not None
        if facts.kind != "dir":
            found = [_info(path, facts, "")]
        else:
            found = [
                _listed(f"{path}/{name.name}" if path else name.name, name)
                for packet in answered.packets
                for name in packet.names
            ]
        return found if detail else sorted(item["name"] for item in found)

    def lexists(self, path: str, **kwargs: Any) -> bool:
        """Whether the name is there, a symlink's that leads nowhere too."""
        try:
            self.call(messages.Stat(path=self._strip_protocol(path), is_followed=False))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether the name leads to something."""
        try:
            self.call(messages.Stat(path=self._strip_protocol(path)))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Whether it is a directory."""
        return self._kind(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether it is a file."""
        return self._kind(path) == "file"

    def _kind(self, path: str) -> str:
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def created(self, path: str) -> datetime.datetime:
        """When its attributes changed last, as a local file system tells."""
        return datetime.datetime.fromtimestamp(self.info(path)["created"], tz=datetime.UTC)

    def modified(self, path: str) -> datetime.datetime:
        """When its bytes changed last."""
        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], tz=datetime.UTC)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a directory.

        Raises:
            FileExistsError: something is there.
            FileNotFoundError: its parent isn't there, and isn't to be made.
        """
        path = self._strip_protocol(path)
        if not path:
            raise FileExistsError(errno.EEXIST, "the root is there", path)
        mode = kwargs.get("mode", 0o777) & ~umask()
        try:
            self.call(messages.Mkdir(id=self.next_id(), path=path, mode=mode))
        except FileNotFoundError:
            if not create_parents or "/" not in path:
                raise
            self.makedirs(self._parent(path), exist_ok=True)
            self.call(messages.Mkdir(id=self.next_id(), path=path, mode=mode))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and those above.

        Raises:
            FileExistsError: something is there (with *exist_ok*: that is no directory).
        """
        path = self._strip_protocol(path)
        try:
            self.mkdir(path, create_parents=True)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self.call(messages.Remove(id=self.next_id(), path=self._strip_protocol(path), is_dir=True))

    def rm_file(self, path: str) -> None:
        """Remove a file or symlink."""
        self.call(messages.Remove(id=self.next_id(), path=self._strip_protocol(path)))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, with *recursive* also directories with all below them.

        Raises:
            IsADirectoryError: it is a directory, and *recursive* isn't said.
        """
        for item in self.expand_path(path, recursive=recursive, maxdepth=maxdepth)[::-1]:
            is_dir = self.call(messages.Stat(path=item, is_followed=False)).told.facts
            assert is_dir is not None
            if is_dir.kind != "dir":
                self.rm_file(item)
            elif recursive:
                self.rmdir(item)
            else:
                msg = f"{item!r} is a directory: say recursive=True"
                raise IsADirectoryError(errno.EISDIR, msg, item)

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Rename, in one step; what can't be renamed is copied and removed.

        Raises:
            PermissionError: it is a committed checkpoint, which keeps its name.
        """
        if isinstance(path1, list) or _has_magic(str(path1)):
            AbstractFileSystem.mv(
                self, path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs
            )
            return
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if str(path2).endswith("/") or self.isdir(target):
            target = "/".join(filter(None, (target, source.rpartition("/")[2])))
        if source == target:
            return
        try:
            self.call(messages.Rename(id=self.next_id(), path=source, to=target))
        except FileNotFoundError:
            if not self.lexists(source) or not self.auto_mkdir:
                raise
            self.makedirs(self._parent(target), exist_ok=True)
            self.call(messages.Rename(id=self.next_id(), path=source, to=target))
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            AbstractFileSystem.mv(self, source, target, recursive=True, **kwargs)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or renew the time of one that is there (*truncate*: empty it)."""
        if not truncate and self.exists(path):
            now_ns = int(datetime.datetime.now(tz=datetime.UTC).timestamp() * 1e9)
            request = messages.SetAttrs(
                id=self.next_id(), path=self._strip_protocol(path), mtime_ns=now_ns
            )
            self.call(request)
            return
        self.open(path, "wb" if truncate else "ab").close()

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing is cached."""


def _info(path: str, facts: messages.Facts, target: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": path,
        "size": facts.size,
        "type": _KINDS[facts.kind],
        "created": facts.ctime_ns / 1e9,
        "islink": bool(target),
        "mode": facts.mode | _TYPE_BITS[facts.kind],
        "uid": facts.uid,
        "gid": facts.gid,
        "mtime": facts.mtime_ns / 1e9,
        "ino": facts.ino,
        "nlink": facts.nlink,
    }
    if target:
        found["destination"] = target
    return found


def _listed(path: str, name: messages.Name) -> dict[str, Any]:
    """As `_info`, in a listing: there a symlink is no directory, else a walk would go through."""
    found = _info(path, name.facts, name.target)
    if name.target and found["type"] == "directory":
        found["type"] = "other"
    return found


def _has_magic(path: str) -> bool:
    return any(sign in path for sign in "*?[")
