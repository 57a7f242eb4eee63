"""A `ckpt://` URL as a place: see `place`. Protocol adapter only; any thread."""
# pyright: basic

from __future__ import annotations

import json
from typing import Any, Final

from fsspec.core import url_to_fs

__all__ = ["UrlPlace"]

_STATE: Final = "user.ckptgate.state"


class UrlPlace:
    """What a URL means to the fsspec file system, whose daemon answers extended attributes.

    It has no descriptor that would stay with what the name means now: `held` is the name itself.
    """

    def __init__(self, fs: Any, path: str, address: str) -> None:
        self.address = address
        self._fs = fs
        self._path = path

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
        return UrlPlace(self._fs, f"{self._path.rstrip('/')}/{name}", f"{self.address}/{name}")

    def has(self, name: str) -> bool:
        """See `Place`."""
        return bool(self._fs.exists(f"{self._path.rstrip('/')}/{name}"))

    def say(self, attribute: str, value: bytes) -> None:
        """See `Place`."""
        self._fs.setxattr(self._path, attribute, value)

    def ask(self, attribute: str) -> dict[str, Any]:
        """See `Place`."""
        found: dict[str, Any] = json.loads(self._fs.getxattr(self._path, attribute))
        return found

    def held(self) -> UrlPlace:
        """See `Place`."""
        self.ask(_STATE)
        return self

    def release(self) -> None:
        """See `Place`."""
