"""A `ckpt://` URL as a place: see `place`. Protocol adapter only; any thread."""
# pyright: basic

from __future__ import annotations

import json
from typing import Any

from fsspec.core import url_to_fs

from ckptgate_adapters.hooks.place import told

__all__ = ["UrlPlace"]


class UrlPlace:
    """What a URL means to the fsspec file system, whose daemon answers extended attributes."""

    def __init__(self, fs: Any, path: str, address: str, directory: Any = None) -> None:
        """A place of *fs*.

        Args:
            fs: the file system.
            path: in it.
            address: the whole URL.
            directory: held open there, if any.
        """
        self.address = address
        self._fs = fs
        self._path = path
        self._directory = directory

    @staticmethod
    def of(url: str) -> UrlPlace:
        """The place of a URL; chained ones are fine."""
        fs, path = url_to_fs(url)
        return UrlPlace(fs, path, url.rstrip("/"))

    def make(self) -> None:
        """See `Place`."""
        self._fs.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """See `Place`."""
        if self._fs.exists(self._path):
            self._fs.rm(self._path, recursive=True)

    def below(self, name: str) -> UrlPlace:
        """See `Place`."""
        path = f"{self._path.rstrip('/')}/{name}".lstrip("/")
        return UrlPlace(self._fs, path, f"{self.address}/{name}")

    def has(self, name: str) -> bool:
        """See `Place`."""
        return bool(self._fs.exists(f"{self._path.rstrip('/')}/{name}"))

    def say(self, attribute: str, value: bytes) -> None:
        """See `Place`."""
        try:
            if self._directory is None:
                self._fs.setxattr(self._path, attribute, value)
            else:
                self._directory.setxattr(attribute, value)
        except OSError as exc:
            raise told(exc, self.address) from exc

    def ask(self, attribute: str) -> dict[str, Any]:
        """See `Place`."""
        try:
            if self._directory is None:
                data = self._fs.getxattr(self._path, attribute)
            else:
                data = self._directory.getxattr(attribute)
        except OSError as exc:
            raise told(exc, self.address) from exc
        found: dict[str, Any] = json.loads(data)
        return found

    def held(self) -> UrlPlace:
        """See `Place`."""
        return UrlPlace(self._fs, self._path, self.address, self._fs.hold(self._path))

    def release(self) -> None:
        """See `Place`."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.release()
