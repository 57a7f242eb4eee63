"""What a PATH argument means: a mount's or a store's run and checkpoint.

A path inside a running mount leads to its daemon and its store; any other path, and any
`s3://bucket/prefix`, is taken as lying in a store, in which a run is a directory that holds
`.ckptgate`. A daemon is found by a path in its store, too, where it is the only one here that
serves it. All that looks into file systems is bounded (`reach`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass

from ckptgate.app.addresses import below, is_url, joined, split_address, store_address
from ckptgate.app.config import read_saved_config
from ckptgate.app.mountpoints import is_mounted
from ckptgate.app.reach import in_reach
from ckptgate.app.registry import MountInfo, find_mount, list_mounts
from ckptgate.app.sections import S3Section
from ckptgate.app.stores import opened_store
from ckptgate.errors import ConfigError, IntegrityError, MissingError, UsageError
from ckptgate.model.documents import MAX_POINTER_BYTES
from ckptgate.model.kinds import DEFAULT_PATTERNS
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.ports.store import Store

__all__ = [
    "Place",
    "Served",
    "locate_address",
    "locate_checkpoint",
    "locate_in_mount",
    "locate_run",
    "locate_served",
    "locate_unserved",
    "may_be_unserved",
    "require_daemon",
    "require_mount",
    "serving",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something is.

    Attributes:
        store: address of the store (or of the run itself, where only that is known).
        run: the run's path in it.
        name: the checkpoint, "" for a run.
        mount: the running mount it was named through, if any.
        s3: how the store is spoken to if it is a bucket.
    """

    store: str
    run: str
    name: str
    mount: MountInfo | None
    s3: S3Section

    @contextlib.contextmanager
    def opened(self) -> Generator[Store]:
        """The store, closed in the end."""
        with opened_store(self.store, self.s3) as store:
            yield store


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A path by which a daemon was found: the mount, and what of the path is below its root."""

    mount: MountInfo
    below: str


def _absolute(path: str) -> str:
    """The path with links of its directory resolved; its last part may be hidden or a link."""
    if "://" in path:
        path = store_address(path)
        if is_url(path):
            return path
    path = os.path.abspath(os.path.expanduser(path))
    head, tail = os.path.split(path)
    return os.path.join(os.path.realpath(head), tail) if tail else os.path.realpath(path)


def _resolved(path: str) -> str:
    """The same with all links resolved."""
    where = _absolute(path)
    return where if is_url(where) else os.path.realpath(where)


@in_reach
def locate_run(path: str, s3: S3Section) -> Place:
    """The run that *path* names.

    Args:
        path: of a run's directory, in a mount or a store.
        s3: how a bucket is spoken to that isn't named through a mount.

    Raises:
        MissingError: there is no run. (Of a bucket only who reads the run's log sees that.)
    """
    where = _resolved(path)
    if is_url(where):
        return Place(store=where, run="", name="", mount=None, s3=_spoken(where, s3))
    mount = find_mount(where)
    if mount is not None:
        run = os.path.relpath(where, mount.mountpoint)
        run = "" if run == "." else run
        return Place(store=mount.store, run=run, name="", mount=mount, s3=_s3_of(mount, s3))
    if not os.path.isdir(os.path.join(where, GATEWAY_DIR)):
        _refuse_dead(path, where)
        msg = f"no run at {path}: it is in no mount and holds no {GATEWAY_DIR}"
        raise MissingError(msg, subject=path, hint="name a run's directory, in a mount or a store")
    return Place(store=where, run="", name="", mount=None, s3=s3)


@in_reach
def locate_address(path: str, s3: S3Section) -> Place:
    """The store that *path* names, or what of one it names, as a store of its own.

    Raises:
        MissingError: its mount's daemon has died.
    """
    where = _resolved(path)
    mount = None if is_url(where) else find_mount(where)
    if mount is None:
        return Place(store=where, run="", name="", mount=None, s3=_spoken(where, s3))
    address = joined(mount.store, below(where, mount.mountpoint) or ".")
    return Place(store=address, run="", name="", mount=mount, s3=_s3_of(mount, s3))


@in_reach
def locate_checkpoint(path: str, s3: S3Section) -> Place:
    """The checkpoint that *path* names; `latest` and other links are followed.

    Raises:
        MissingError, UsageError: the path can't be one.
        TransientStoreError, UnusableError: the store was asked for a pointer, and failed.
    """
    where = _absolute(path)
    s3 = _spoken(where, s3)
    target = _pointer_target(where, s3)
    if target:
        where = joined(split_address(where)[0], target)
    head, name = split_address(where)
    mount = None if is_url(where) else find_mount(where)
    if not name or (mount is not None and mount.mountpoint == where):
        msg = f"{path} is not a checkpoint" + (", it is the mount point" if mount else "")
        raise UsageError(msg, subject=path, hint="name one, such as mnt/run1/step-100")
    place = locate_run(head, s3)
    return Place(store=place.store, run=place.run, name=name, mount=place.mount, s3=place.s3)


@in_reach
def locate_in_mount(path: str) -> tuple[Place, MountInfo]:
    """The checkpoint that *path* names, and the running mount that it lies in.

    Raises:
        MissingError, UsageError: the path can't be one, or is in no running mount.
    """
    where = _absolute(path)
    mount = _only(path, where)
    s3 = _s3_of(mount, S3Section())
    place = locate_checkpoint(path, s3)
    if place.mount is None:
        inside = below(place.store, mount.store) or ""
        place = Place(store=mount.store, run=inside, name=place.name, mount=mount, s3=s3)
    return place, mount


def _pointer_target(where: str, s3: S3Section) -> str:
    """What a symlink or a pointer's text names, "" for anything else."""
    head, name = split_address(where)
    if is_url(where):
        if not name or not DEFAULT_PATTERNS.is_pointer(name):
            return ""
        with opened_store(head, s3) as store, contextlib.suppress(IntegrityError):
            return _last_line(store.pointer_content("", name) or "")
        return ""
    if os.path.islink(where):
        # In a run a checkpoint's name means the checkpoint, whatever somebody put in its place.
        is_in_run = os.path.isdir(os.path.join(head, GATEWAY_DIR))
        is_meant = is_in_run and DEFAULT_PATTERNS.is_checkpoint(name)
        return "" if is_meant else os.readlink(where)
    if not DEFAULT_PATTERNS.is_pointer(name) or not os.path.isfile(where):
        return ""
    with open(where, encoding="utf-8", errors="replace") as stream:
        return _last_line(stream.read(MAX_POINTER_BYTES))


def _last_line(text: str) -> str:
    """The name that a pointer's text is, "" if it is none."""
    text = text.strip()
    return text if "/" not in text and "\0" not in text else ""


@in_reach
def locate_served(path: str) -> Served:
    """The running mount of *path*, which lies in it or in its store, and what it names there.

    Raises:
        MissingError: there is none.
        UsageError: several mounts here serve the store.
    """
    where = _resolved(path)
    mount = _only(path, where)
    if not is_url(where):
        inside = below(where, mount.mountpoint)
        if inside is not None:
            return Served(mount=mount, below=inside)
    return Served(mount=mount, below=below(where, mount.store) or "")


@in_reach
def serving(path: str) -> list[Served]:
    """As `locate_served`, all of the mounts; a daemon without one is found by its spool, too.

    Raises:
        MissingError: there is none.
    """
    where = _resolved(path)
    found = [] if is_url(where) else _mount_of(path, where)
    if found:
        return [Served(mount=m, below=below(where, m.mountpoint) or "") for m in found]
    found = [info for info in list_mounts() if info.place == where]
    if found:
        return [Served(mount=m, below="") for m in found]
    found = _serving(where)
    if not found:
        raise _unmounted(path, where)
    return [Served(mount=m, below=below(where, m.store) or "") for m in found]


def require_daemon(path: str) -> MountInfo:
    """The one daemon here of *path*: a mount, the store that it serves, or its spool.

    Raises:
        MissingError: there is none.
        UsageError: several serve that store.
    """
    found = serving(path)
    if len(found) > 1:
        places = ", ".join(it.mount.place for it in found)
        msg = f"{path} is in a store that several daemons here serve: {places}"
        raise UsageError(msg, subject=path, hint=f"name {found[0].mount.place}")
    return found[0].mount


@in_reach
def locate_unserved(path: str, s3: S3Section) -> Place | None:
    """The store or run that *path* names, if no daemon on this machine serves it; else None.

    A directory counts only if it, or one right in it, is a run.
    """
    where = _resolved(path)
    if is_url(where):
        is_one = not _serving(where)
    else:
        is_one = not (_mount_of(path, where) or _serving(where)) and _holds_runs(where)
    return Place(store=where, run="", name="", mount=None, s3=s3) if is_one else None


def may_be_unserved(path: str, s3: S3Section) -> bool:
    """Whether *path* may name a store, a run or a checkpoint that no daemon here serves."""
    return any(locate_unserved(it, s3) is not None for it in (path, split_address(path)[0]))


def _holds_runs(directory: str) -> bool:
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    paths = (os.path.join(directory, name, GATEWAY_DIR) for name in names)
    return GATEWAY_DIR in names or any(os.path.isdir(path) for path in paths)


@in_reach
def require_mount(path: str) -> MountInfo:
    """The running mount that *path* lies in.

    Raises:
        MissingError: there is none.
    """
    where = _resolved(path)
    found = [] if is_url(where) else _mount_of(path, where)
    if not found:
        raise _unmounted(path, where)
    return found[0]


def _only(path: str, where: str) -> MountInfo:
    """The one mount of *path* (absolute: *where*)."""
    found = ([] if is_url(where) else _mount_of(path, where)) or _serving(where)
    if not found:
        raise _unmounted(path, where)
    if len(found) > 1:
        mounts = ", ".join(mount.place for mount in found)
        msg = f"{path} is in a store that several mounts here serve: {mounts}"
        hint = _name_in(found, where)
        raise UsageError(msg, subject=path, hint=hint)
    return found[0]


def _name_in(served: list[MountInfo], where: str) -> str:
    """The hint to name *where*, which is in the store of these, by the first one's mount."""
    for info in served:
        if info.mountpoint:
            return f"name {joined(info.mountpoint, below(where, info.store) or '.')}"
    return "ckptgate status lists the mounts"


def _mount_of(path: str, where: str) -> list[MountInfo]:
    mount = find_mount(where) or find_mount(os.path.realpath(path))
    return [] if mount is None else [mount]


def _serving(where: str) -> list[MountInfo]:
    """The mounts here in whose store this is."""
    return [info for info in list_mounts() if below(where, info.store) is not None]


def _s3_of(mount: MountInfo, otherwise: S3Section) -> S3Section:
    """How the mount's daemon speaks to its bucket, if it may be known."""
    if not is_url(mount.store):
        return otherwise
    try:
        return read_saved_config(mount.spool).s3
    except (OSError, ConfigError):
        # Another user's spool: what this one's environment says has to do.
        return otherwise


def _spoken(where: str, s3: S3Section) -> S3Section:
    """How the bucket of *where* is spoken to: as the mount here that serves it does.

    Unless *s3* says where the service is; a bucket's name means something at one service only.
    """
    if not is_url(where) or s3.endpoint_url or s3.profile:
        return s3
    found = _serving(where)
    return _s3_of(found[0], s3) if found else s3


def _unmounted(path: str, where: str) -> MissingError:
    """What to say of *path* (absolute: *where*), which is in no running mount."""
    served = _serving(where)
    if served:
        what = "is" if served[0].store == where else "is in"
        mountpoints = ", ".join(info.mountpoint for info in served if info.mountpoint)
        how = f"mounted on {mountpoints}" if mountpoints else "served without a mount"
        msg = f"{path} {what} a store, {how}"
        return MissingError(msg, subject=path, hint=_name_in(served, where))
    if is_url(where):
        msg = f"no mount on this machine serves {where}"
        return MissingError(msg, subject=path, hint="ckptgate status lists the mounts")
    _refuse_dead(path, where)
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
