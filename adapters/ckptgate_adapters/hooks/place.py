"""A directory of checkpoints, or a checkpoint, as its writers speak to it: protocol adapter only.

All that is said goes through extended attributes of the directory: of a path on a mount those of
the kernel, of a `ckpt://` URL those of the fsspec file system, which has the daemon answer them. So
nothing is needed but the path: no socket, no configuration. Any thread.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from typing import Any, Final, Protocol

from ckptgate.errors import UsageError

__all__ = ["MountPlace", "Place", "is_url", "paths_only", "place_of", "step_of", "told"]

SCHEME: Final = "ckpt"
_STEP: Final = re.compile(r"([0-9]{1,18})/?$")


class Place(Protocol):
    """A directory, by its address.

    Errors are OSErrors with the errno that the gateway gave; UsageError where no gateway is.
    """

    address: str

    def make(self) -> None:
        """Make it, with what is above; fine if it is there."""
        ...

    def remove(self) -> None:
        """Remove it with all that is in it; nothing there is fine."""
        ...

    def below(self, name: str) -> Place:
        """What *name* is in it."""
        ...

    def has(self, name: str) -> bool:
        """Whether something is called *name* in it."""
        ...

    def say(self, attribute: str, value: bytes) -> None:
        """Set an extended attribute."""
        ...

    def ask(self, attribute: str) -> dict[str, Any]:
        """The JSON that an extended attribute has."""
        ...

    def held(self) -> Place:
        """The same directory whatever becomes of its name; to be released."""
        ...

    def release(self) -> None:
        """It is held no longer."""
        ...


class MountPlace:
    """A path on a mount; *fd* is an open descriptor of it, or -1."""

    def __init__(self, path: str, fd: int = -1) -> None:
        self.address = path
        self._fd = fd

    @property
    def _target(self) -> str | int:
        return self.address if self._fd < 0 else self._fd

    def make(self) -> None:
        """See `Place`."""
        os.makedirs(self.address, exist_ok=True)

    def remove(self) -> None:
        """See `Place`."""
        if os.path.isdir(self.address):
            shutil.rmtree(self.address)
        elif os.path.lexists(self.address):
            os.unlink(self.address)

    def below(self, name: str) -> MountPlace:
        """See `Place`."""
        return MountPlace(os.path.join(self.address, name))

    def has(self, name: str) -> bool:
        """See `Place`."""
        return os.path.exists(os.path.join(self.address, name))

    def say(self, attribute: str, value: bytes) -> None:
        """See `Place`."""
        try:
            os.setxattr(self._target, attribute, value)
        except OSError as exc:
            raise told(exc, self.address) from exc

    def ask(self, attribute: str) -> dict[str, Any]:
        """See `Place`."""
        try:
            found: dict[str, Any] = json.loads(os.getxattr(self._target, attribute))
        except OSError as exc:
            raise told(exc, self.address) from exc
        return found

    def held(self) -> MountPlace:
        """See `Place`."""
        fd = os.open(self.address, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return MountPlace(self.address, fd)

    def release(self) -> None:
        """See `Place`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def told(error: OSError, address: str) -> OSError:
    """The error, or what it means where no gateway answers: other file systems keep attributes."""
    if error.errno not in {errno.ENOTSUP, errno.ENODATA}:
        return error
    msg = f"not a checkpoint on a ckptgate mount: {address!r}"
    hint = "is it mounted? ckptgate status lists the mounts; [names] says what is a checkpoint"
    return UsageError(msg, subject=address, hint=hint)


def is_url(address: str) -> bool:
    """Whether it is one of `ckpt://` (chained ones too), and no path."""
    return address.startswith((f"{SCHEME}://", f"{SCHEME}::"))


def paths_only(address: str | os.PathLike[str], framework: str) -> None:
    """Refuse a URL as the place of a framework that takes it for the path of a local file.

    Raises:
        UsageError: it is one.
    """
    text = os.fspath(address)
    if "://" not in text and not is_url(text):
        return
    msg = f"{framework} writes its files by paths and can't write to the URL {text!r}"
    hint = (
        "ckptgate mount STORE DIR, and save below DIR; by URLs DCP and Lightning save, "
        "and what is written in `with ckptgate.checkpoint(URL, step)`"
    )
    raise UsageError(msg, subject=text, hint=hint)


def step_of(address: str) -> int | None:
    """The number at the end of a checkpoint's name, None without one."""
    found = _STEP.search(address)
    return int(found[1]) if found else None


def place_of(address: str | os.PathLike[str]) -> Place:
    """The place at a path on a mount or a `ckpt://` URL.

    Raises:
        UsageError: it is a URL of something else.
    """
    text = os.fspath(address)
    if is_url(text):
        from ckptgate_adapters.hooks.ckpt_url import UrlPlace  # noqa: PLC0415 -- not for paths

        return UrlPlace.of(text)
    if "://" in text:
        msg = f"not a path on a mount nor a ckpt:// URL: {text!r}"
        raise UsageError(msg, subject=text, hint="ckpt::" + text)
    return MountPlace(os.path.abspath(text))
