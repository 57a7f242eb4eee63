"""What is used of fsspec: its types are partly unknown, so all of it is `Any` here."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

__all__ = [
    "COMPRESSIONS",
    "AbstractBufferedFile",
    "AbstractFileSystem",
    "FileSystemMeta",
    "OpenFile",
    "Transaction",
    "get_compression",
]

_core: Any = import_module("fsspec.core")
_spec: Any = import_module("fsspec.spec")
AbstractBufferedFile: Any = _spec.AbstractBufferedFile
AbstractFileSystem: Any = _spec.AbstractFileSystem
FileSystemMeta: Any = cast("Any", type(AbstractFileSystem))
COMPRESSIONS: Any = import_module("fsspec.compression").compr
OpenFile: Any = _core.OpenFile
Transaction: Any = import_module("fsspec.transaction").Transaction
get_compression: Any = _core.get_compression
