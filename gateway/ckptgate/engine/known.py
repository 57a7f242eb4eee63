"""Whether anything is at a path of a mount: for people who may have mistyped it.

It owns the order in which that is asked: what this spool has, what the store has, what logs say.
Where the store can't tell, the path is believed. It changes nothing. Any thread.
"""

from __future__ import annotations

from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.verify import fold_log
from ckptgate.errors import CkptError, ErrorKind, InvalidNameError, MissingError
from ckptgate.model.layout import join_key
from ckptgate.ports.spool import ROOT_INO, AttemptRow, Spool
from ckptgate.ports.store import Store

__all__ = ["is_known"]


def is_known(spool: Spool, store: Store, path: str) -> bool:
    """Whether *path*, below the mount point, is anything: a run, a checkpoint, a name in one.

    Args:
        spool: this node's.
        store: asked only for what the spool doesn't know.
        path: without links.
    """
    if _is_in_spool(spool, path):
        return True
    try:
        return _is_in_store(store, path) or _is_committed(store, path)
    except (MissingError, InvalidNameError):
        return False
    except CkptError as exc:
        return exc.kind is not ErrorKind.USAGE


def _is_in_spool(spool: Spool, path: str) -> bool:
    if any(_is_at_or_below(run, path) for run in spool.watched_runs()):
        return True
    rows = spool.attempts()
    if any(_is_at_or_below(join_key(row.run, row.name), path) for row in rows):
        return True
    around = [row for row in rows if _is_at_or_below(path, join_key(row.run, row.name))]
    if any(_has(spool, row, path) for row in around):
        return True
    return not around and _has_name(spool, ROOT_INO, path.split("/"))


def _is_at_or_below(path: str, top: str) -> bool:
    return f"{path}/".startswith(f"{top}/")


def _has(spool: Spool, row: AttemptRow, path: str) -> bool:
    """Whether the attempt's tree has what is below its own path; one that isn't here may."""
    if row.is_root_only:
        return False
    inside = path[len(join_key(row.run, row.name)) + 1 :]
    return _has_name(spool, row.root, inside.split("/"))


def _has_name(spool: Spool, ino: int, parts: list[str]) -> bool:
    """Whether a path leads anywhere here, as anybody may see it."""
    for index, part in enumerate(parts):
        child = spool.child(ino, part)
        if child is None:
            held = [row.ino for row in spool.pending(parent=ino, name=part)]
            return index == len(parts) - 1 and any(number is not None for number in held)
        ino = child.ino
    return True


def _is_in_store(store: Store, path: str) -> bool:
    try:
        store.plain_stat(path)
    except MissingError:
        return False
    return True


def _is_committed(store: Store, path: str) -> bool:
    """Whether a log knows it: a bucket has no directory of a checkpoint's name."""
    parts = path.split("/")
    for at in range(len(parts)):
        run, name, inside = "/".join(parts[:at]), parts[at], "/".join(parts[at + 1 :])
        state = fold_log(store, run)
        attempt = state.current.get(name)
        if attempt is None:
            continue
        manifest = load_manifest(store, run, attempt, state.attempts[attempt].manifest)
        paths = {f"{entry.path}/" for entry in manifest.entries}
        return not inside or any(found.startswith(f"{inside}/") for found in paths)
    return bool(fold_log(store, path).length)
