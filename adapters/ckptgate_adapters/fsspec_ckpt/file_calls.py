"""Files as fsspec opens, reads, writes and copies them. Any thread."""

from __future__ import annotations

import errno
import os
from typing import Any, Final

from ckptgate_adapters.fsspec_ckpt import copying, exiting, messages
from ckptgate_adapters.fsspec_ckpt.base import Base, umask
from ckptgate_adapters.fsspec_ckpt.connection import Answered, Client
from ckptgate_adapters.fsspec_ckpt.readers import CkptReader, StoredFile, open_reader
from ckptgate_adapters.fsspec_ckpt.untyped import COMPRESSIONS, get_compression
from ckptgate_adapters.fsspec_ckpt.wrappers import CkptText, Compressed
from ckptgate_adapters.fsspec_ckpt.writers import CkptUpdater, CkptWriter, Written

__all__ = ["FileCalls"]

_MODES: Final = {
    "rb": os.O_RDONLY,
    "wb": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "ab": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "r+b": os.O_RDWR,
}
_SAME_MODES: Final = {"rb+": "r+b", "br+": "r+b", "bw": "wb", "br": "rb", "bx": "xb", "ba": "ab"}
_TEXT_OPTIONS: Final = ("encoding", "errors", "newline")
_DURABLE_S: Final = 600.0


class FileCalls(Base):
    """Files."""

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file; see `files` for what its close means.

        Args:
            path: of the file.
            mode: `r`, `w`, `x`, `a`, `r+`, with or without `b`.
            block_size: of a file that only the store has, as fsspec knows it.
            cache_options: likewise.
            compression: as fsspec knows it.
            kwargs: `encoding`, `errors`, `newline` for text; `cache_type`; `autocommit`.
        """
        path = self._strip_protocol(path)
        is_text = "b" not in mode
        if is_text:
            mode = mode.replace("t", "") + "b"
        text = {key: kwargs.pop(key) for key in _TEXT_OPTIONS if is_text and key in kwargs}
        autocommit = kwargs.pop("autocommit", not self._intrans)
        file: Any = self._open(
            path,
            mode=mode,
            block_size=block_size,
            cache_options=cache_options,
            autocommit=autocommit,
            **kwargs,
        )
        if compression is not None:
            found = get_compression(path, compression)
            if found is not None:
                file = Compressed(COMPRESSIONS[found](file, mode=mode[0]), file)
        if is_text:
            file = CkptText(file, **text)
        if not autocommit and _SAME_MODES.get(mode, mode) != "rb":
            self.transaction.files.append(file)
        return file

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CkptReader | CkptWriter | CkptUpdater | StoredFile:
        mode = _SAME_MODES.get(mode, mode)
        if mode not in _MODES:
            msg = f"mode {mode!r} is not possible: {', '.join(_MODES)} are"
            raise ValueError(msg)
        if not path:
            raise IsADirectoryError(errno.EISDIR, "this is the root of the store", path)
        client = self.client
        answered = self._open_there(client, path, mode)
        if mode == "rb":
            options = {"block_size": block_size or "default", "cache_options": cache_options}
            if "cache_type" in kwargs:
                options["cache_type"] = kwargs["cache_type"]
            return open_reader(self, client, path, answered, **options)
        written = Written(
            client, path, answered.told, is_synced=self.durable, after=self._after_close
        )
        if mode == "r+b":
            return CkptUpdater(answered.fd, written, autocommit=autocommit)
        is_appended = mode == "ab"
        return CkptWriter(answered.fd, written, is_appended=is_appended, autocommit=autocommit)

    def _open_there(self, client: Client, path: str, mode: str) -> Answered:
        flags, bits = _MODES[mode], 0o666 & ~umask()

        def request() -> messages.Open:
            return messages.Open(id=client.next_id(), path=path, flags=flags, mode=bits)

        try:
            return client.call(request())
        except FileNotFoundError:
            is_making = flags & os.O_CREAT and self.auto_mkdir and "/" in path
            if not is_making:
                raise
        self.makedirs(self._parent(path), exist_ok=True)
        return client.call(request())

    def _after_close(self, path: str) -> None:
        exiting.note(self.client, path)
        if self.durable:
            self._wait_stored(path)

    def _wait_stored(self, path: str) -> None:
        """Wait until the store has the bytes of a file, verified."""
        self.client.call(messages.WaitStored(path=path, timeout_s=_DURABLE_S), is_long=True)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Bytes of a file; positions below 0 count from its end."""
        with self.open(path, "rb", **kwargs) as file:
            return copying.part_of(file, start, end)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Ranges of files, each file opened once."""
        return copying.cat_ranges(self, paths, starts, ends, on_error=on_error)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a whole file."""
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file within the store: blocks are shared where the spool's disk can do that."""
        source = self._strip_protocol(path1)
        if self.isdir(source):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(source, "rb") as reader, self.open(path2, "wb") as writer:
            copying.copy(reader, writer)

    def put_file(
        self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Copy a local file here: blocks are shared where it lies on the spool's file system."""
        if os.path.isdir(lpath):
            self.makedirs(rpath, exist_ok=True)
            return
        kept = "xb" if mode == "create" else "wb"
        with open(lpath, "rb") as reader, self.open(rpath, kept) as writer:
            copying.copy(reader, writer, callback)

    def get_file(
        self, rpath: str, lpath: Any, callback: Any = None, outfile: Any = None, **kwargs: Any
    ) -> None:
        """Copy a file to a local one."""
        if outfile is None and hasattr(lpath, "write"):
            outfile = lpath
        if outfile is None and self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        with self.open(rpath, "rb") as reader:
            if outfile is not None:
                copying.copy(reader, outfile, callback)
                return
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
            with open(lpath, "wb") as writer:
                copying.copy(reader, writer, callback)
