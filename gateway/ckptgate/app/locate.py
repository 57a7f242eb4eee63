"""What a PATH argument means: a mount's or a store's run and checkpoint.

A path inside a running mount leads to its daemon and its store; any other path is taken as lying in
a store directory, in which a run is a directory that holds `.ckptgate`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptgate.app.config import store_path
from ckptgate.app.mountpoints import is_mounted
from ckptgate.app.registry import MountInfo, find_mount, list_mounts
from ckptgate.errors import MissingError, UsageError
from ckptgate.model.documents import MAX_POINTER_BYTES
from ckptgate.model.kinds import DEFAULT_PATTERNS
from ckptgate.model.layout import GATEWAY_DIR

__all__ = ["Place", "locate_checkpoint", "locate_in_mount", "locate_run", "require_mount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something is.

    Attributes:
        store: directory of the store (or of the run itself, where only that is known).
        run: the run's path in it.
        name: the checkpoint, "" for a run.
        mount: the running mount it was named through, if any.
    """

    store: str
    run: str
    name: str
    mount: MountInfo | None


def _absolute(path: str) -> str:
    """The path with links of its directory resolved; its last part may be hidden or a link."""
    path = store_path(path) if "://" in path else os.path.abspath(os.path.expanduser(path))
    head, tail = os.path.split(path)
    return os.path.join(os.path.realpath(head), tail) if tail else os.path.realpath(path)


def locate_run(path: str) -> Place:
    """The run that *path* names.

    Raises:
        MissingError: there is no run.
    """
    where = os.path.realpath(_absolute(path))
    mount = find_mount(where)
    if mount is not None:
        run = os.path.relpath(where, mount.mountpoint)
        return Place(store=mount.store, run="" if run == "." else run, name="", mount=mount)
    if not os.path.isdir(os.path.join(where, GATEWAY_DIR)):
        _refuse_dead(path, where)
        msg = f"no run at {path}: it is in no mount and holds no {GATEWAY_DIR}"
        raise MissingError(msg, subject=path, hint="name a run's directory, in a mount or a store")
    return Place(store=where, run="", name="", mount=None)


def locate_checkpoint(path: str) -> Place:
    """The checkpoint that *path* names; `latest` and other links are followed.

    Raises:
        MissingError, UsageError: the path can't be one.
    """
    where = _absolute(path)
    target = _pointer_target(where)
    if target:
        where = os.path.normpath(os.path.join(os.path.dirname(where), target))
    head, name = os.path.split(where.rstrip("/"))
    mount = find_mount(where)
    if not name or (mount is not None and mount.mountpoint == where):
        msg = f"{path} is not a checkpoint" + (", it is the mount point" if mount else "")
        raise UsageError(msg, subject=path, hint="name one, such as mnt/run1/step-100")
    place = locate_run(head)
    return Place(store=place.store, run=place.run, name=name, mount=place.mount)


def locate_in_mount(path: str) -> tuple[Place, MountInfo]:
    """The checkpoint that *path* names, and the running mount that it lies in.

    Raises:
        MissingError, UsageError: the path can't be one, or is in no running mount.
    """
    place = locate_checkpoint(path)
    if place.mount is None:
        raise _unmounted(path, _absolute(path))
    return place, place.mount


def _pointer_target(path: str) -> str:
    """What a symlink or a pointer's text names, "" for anything else."""
    if os.path.islink(path):
        return os.readlink(path)
    if not DEFAULT_PATTERNS.is_pointer(os.path.basename(path)) or not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as stream:
        text = stream.read(MAX_POINTER_BYTES).strip()
    return text if "/" not in text and "\0" not in text else ""


def require_mount(path: str) -> MountInfo:
    """The running mount of *path*.

    Raises:
        MissingError: there is none.
    """
    where = _absolute(path)
    mount = find_mount(where) or find_mount(os.path.realpath(path))
    if mount is None:
        raise _unmounted(path, where)
    return mount


def _unmounted(path: str, where: str) -> MissingError:
    """What to say of *path* (absolute: *where*), which is in no running mount."""
    _refuse_dead(path, where)
    served = [i for i in list_mounts() if (where + "/").startswith(i.store.rstrip("/") + "/")]
    if served:
        what = "is" if served[0].store == where else "is in"
        mountpoints = ", ".join(info.mountpoint for info in served)
        msg = f"{path} {what} a store, mounted on {mountpoints}"
        there = os.path.join(served[0].mountpoint, os.path.relpath(where, served[0].store))
        return MissingError(msg, subject=path, hint=f"name {os.path.normpath(there)}")
    msg = f"{path} is not in a running ckptgate mount"
    return MissingError(msg, subject=path, hint="ckptgate status lists the mounts")


def _refuse_dead(path: str, where: str) -> None:
    """Say so where *path* (absolute: *where*) lies in a mount whose daemon has died.

    Raises:
        MissingError: it does.
    """
    above = where
    while above != os.path.dirname(above):
        if is_mounted(above):
            msg = f"{path} is in the mount {above}, whose daemon has died"
            hint = f"mount it again: ckptgate mount STORE {above}"
            raise MissingError(msg, subject=path, hint=hint)
        above = os.path.dirname(above)
