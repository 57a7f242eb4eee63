"""Where the files of a service belong on a machine or in an image, and how they get there.

Owns the rules of putting them in place: a file is there whole or not at all, a repeat changes
nothing, and what an operator writes (the configuration) is never overwritten or removed once it
differs from what was installed. It knows no configuration and no commands. One thread.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from dataclasses import dataclass
from importlib import resources
from typing import Final

from ckptgate.errors import UnusableError

__all__ = ["Done", "FileToPlace", "Step", "inside", "place", "read_template", "take_away"]

_LINKS_MAX: Final = 40
_TEMPORARY: Final = ".ckptgate-new"


class Done(enum.StrEnum):
    """What became of a file."""

    WRITTEN = "written"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    KEPT = "kept"
    REMOVED = "removed"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToPlace:
    """A file of the service.

    Attributes:
        path: as the machine will see it, absolute.
        content: its text, or what it links to.
        mode: its permissions.
        is_link: it is a symlink.
        is_theirs: the operator's from then on.
    """

    path: str
    content: str
    mode: int = 0o644
    is_link: bool = False
    is_theirs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was done, or would be, to one path."""

    path: str
    done: Done
    why: str = ""


def read_template(name: str) -> str:
    """One of the files in `files/`."""
    return resources.files("ckptgate_adapters.systemd").joinpath("files", name).read_text()


def inside(root: str, path: str) -> str:
    """Where *path* of the machine is if its root directory is *root*.

    A symlink of a directory in an image means something in that image, wherever it leads.

    Raises:
        UnusableError: the symlinks lead nowhere.
    """
    if root in {"", "/"}:
        return path
    *above, name = path.strip("/").split("/")
    todo, at, links = above[::-1], list[str](), 0
    while todo:
        part = todo.pop()
        if part == "..":
            # Above the root there is nothing but the root.
            del at[-1:]
            continue
        step = os.path.join(root, *at, part)
        if not os.path.islink(step):
            at.append(part)
            continue
        links += 1
        if links > _LINKS_MAX:
            msg = f"too many symlinks at {step}"
            raise UnusableError(msg, subject=step, errno_value=errno.ELOOP)
        target = os.readlink(step)
        if target.startswith("/"):
            at.clear()
        todo += [word for word in target.split("/") if word not in {"", "."}][::-1]
    return os.path.join(root, *at, name)


def place(file: FileToPlace, *, root: str, is_dry: bool) -> Step:
    """Put a file in place.

    Raises:
        OSError: it can't be; what was there is as it was.
    """
    where = inside(root, file.path)
    present = _present(where, is_link=file.is_link)
    if present == file.content:
        return Step(path=file.path, done=Done.UNCHANGED)
    if present is not None and file.is_theirs:
        return Step(path=file.path, done=Done.KEPT, why="it is yours")
    if not is_dry:
        os.makedirs(os.path.dirname(where), exist_ok=True)
        _write(where, file)
    return Step(path=file.path, done=Done.WRITTEN if present is None else Done.REPLACED)


def take_away(file: FileToPlace, *, root: str, is_dry: bool) -> Step:
    """Remove what `place` put there, and its directory if that is a drop-in's and empty then.

    Raises:
        OSError: it can't be removed.
    """
    where = inside(root, file.path)
    present = _present(where, is_link=file.is_link)
    if present is None:
        return Step(path=file.path, done=Done.ABSENT)
    if present != file.content and (file.is_theirs or file.is_link):
        return Step(path=file.path, done=Done.KEPT, why="it was changed since")
    if not is_dry:
        os.unlink(where)
        if os.path.dirname(where).endswith(".d"):
            with contextlib.suppress(OSError):
                # Only if nothing else is in it.
                os.rmdir(os.path.dirname(where))
    return Step(path=file.path, done=Done.REMOVED)


def _present(where: str, *, is_link: bool) -> str | None:
    """What is there: a file's text or a link's target; None for nothing."""
    if os.path.islink(where):
        return os.readlink(where) if is_link else f"-> {os.readlink(where)}"
    try:
        with open(where, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def _write(where: str, file: FileToPlace) -> None:
    temporary = where + _TEMPORARY
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    if file.is_link:
        os.symlink(file.content, temporary)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as stream:
            stream.write(file.content)
            stream.flush()
            os.fchmod(stream.fileno(), file.mode)
            os.fsync(stream.fileno())
    try:
        os.replace(temporary, where)
    except BaseException:
        # An interrupt, too, must not leave the temporary file beside the real ones.
        os.unlink(temporary)
        raise
