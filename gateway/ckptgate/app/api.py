"""The public Python API: save a checkpoint exactly, wait for it, and find the newest one.

It speaks to the gateway through the checkpoint's directory alone (see `ckptgate_adapters.hooks`),
so it needs nothing but a path on a mount or a `ckpt://` URL. Any thread; a `checkpoint` block is
one thread's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping
from typing import Any, Final

from ckptgate.errors import UsageError
from ckptgate_adapters.hooks.part import COMMIT, STATE, Part, giving_up, ranks_of
from ckptgate_adapters.hooks.place import place_of

__all__ = [
    "COMMIT_XATTR",
    "STATE_XATTR",
    "abort",
    "annotate",
    "checkpoint",
    "commit",
    "latest",
    "state",
    "wait",
]

COMMIT_XATTR: Final = COMMIT
STATE_XATTR: Final = STATE
_LATEST: Final = "user.ckptgate.latest"
_POLL_S: Final = 0.1


@contextlib.contextmanager
def checkpoint(
    run: str | os.PathLike[str],
    step: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    saved_by: Mapping[str, Any] | None = None,
    durable: bool = False,
) -> Generator[str]:
    """Save a checkpoint: `with ckptgate.checkpoint(run, step) as path: ...` on every rank.

    Gives the directory `RUN/step-N`, in which this rank writes its files. At the end of the block
    this rank commits; once all have, and every byte is proved to be in the store, the checkpoint
    is visible, all of it at once. If the block raises, nothing of it ever is: the attempt is given
    up for all ranks, and those that commit it later, on a node that has heard of it, get a
    RefusedError. The same step may then be saved again; what is left of the earlier try has no part
    in it.

    Args:
        run: directory of the run's checkpoints, on a mount or as a `ckpt://` URL.
        step: at least 0; it names the checkpoint.
        rank: this process's rank; by default from the launcher's environment.
        world_size: how many ranks there are; likewise. With neither, this process is all there is.
        saved_by: what else is to be recorded of how it is saved, such as `data_version` and
            `layout` (see FORMAT.md); step, world size and loaded versions are recorded anyway.
        durable: wait at the end until it is committed.

    Yields:
        The directory's path, or URL.

    Raises:
        ExistsError: that step is committed already.
        RefusedError: another rank gave it up; with *durable* also if it was aborted.
        PendingError: an earlier try of this rank is still undecided.
        UsageError: *run* isn't on a ckptgate mount, or the numbers or the record are wrong.
    """
    rank, world_size = ranks_of(rank, world_size)
    if type(step) is not int or step < 0:
        msg = f"step is {step!r}, not a number of at least 0"
        raise UsageError(msg)
    place = place_of(run).below(f"step-{step}")
    part = Part(place.address, rank=rank, world_size=world_size)
    part.begin(is_new=True)
    try:
        with giving_up(part):
            part.record({"step": step, **(saved_by or {})})
            yield part.address
            part.commit()
        if durable:
            part.wait()
    finally:
        part.release()


def latest(run: str | os.PathLike[str], *, wait_s: float = 0.0) -> str | None:
    """The newest committed checkpoint of a run, None if there is none.

    The run's decision log says which that is: never one that isn't committed, nor what a pointer's
    file happens to hold.

    Args:
        run: directory of the run's checkpoints, on a mount or as a `ckpt://` URL.
        wait_s: wait at most that long for those that are just being committed.

    Returns:
        Its path (or URL), below *run*.

    Raises:
        UsageError: *run* isn't on a ckptgate mount.
        OSError: EIO, the store doesn't answer.
    """
    place = place_of(run)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = place.ask(_LATEST)
        except FileNotFoundError:
            return None
        if not found["undecided"] or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    name: str | None = found["name"]
    return None if name is None else place.below(name).address


def commit(
    path: str | os.PathLike[str],
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Say that this rank wrote all that it has to write to the checkpoint directory *path*.

    The checkpoint becomes visible once every rank said so and every byte is proved to be in the
    store; this call doesn't wait for that (see `wait`).

    Args:
        path: the checkpoint directory, on a ckptgate mount or as a `ckpt://` URL.
        rank: this process's rank; by default from the launcher's environment.
        world_size: how many ranks there are; likewise. With neither, the call commits for all: a
            program of several processes without a launcher must say which rank it is.

    Raises:
        UsageError: the path isn't a checkpoint on a ckptgate mount, or the numbers are wrong.
        RefusedError: it was given up.
    """
    rank, world_size = ranks_of(rank, world_size)
    Part(path, rank=rank, world_size=world_size).commit()


def abort(path: str | os.PathLike[str], reason: str = "aborted by its writer") -> None:
    """Give the checkpoint at *path* up, for all its ranks; its bytes stay in the spool.

    Raises:
        UsageError: the path isn't a checkpoint on a ckptgate mount.
        FileNotFoundError: it is not there, or not visible to this process.
        PermissionError: it is committed.
    """
    state(path)
    Part(path).abort(reason)


def annotate(path: str | os.PathLike[str], saved_by: Mapping[str, Any]) -> None:
    """Record how this rank saves the checkpoint at *path*; before it is committed.

    What it recorded before is replaced. `saved_by` may be any JSON object of up to 16 KiB; its
    `rank` says whose it is, by default what the launcher's environment says.

    Raises:
        UsageError: it is no such object, or the path isn't a checkpoint on a ckptgate mount.
        OSError: EPERM, EBUSY: the checkpoint is decided, or just being decided.
    """
    state(path)
    known = ranks_of(None, None)[0]
    rank = saved_by.get("rank", known)
    own = {key: value for key, value in saved_by.items() if key != "rank"}
    part = Part(path, rank=rank, world_size=own.get("world_size"))
    part.record(own)


def state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is known of the checkpoint: name, attempt, state, reason, missing.

    Raises:
        UsageError: the path isn't a checkpoint on a ckptgate mount.
        FileNotFoundError: it is not there, or not visible to this process.
    """
    return place_of(path).ask(STATE)


def wait(path: str | os.PathLike[str], timeout_s: float | None = None) -> None:
    """Return when the checkpoint at *path* is committed.

    Raises:
        RefusedError: it was aborted; the message says why.
        PendingError: *timeout_s* passed.
        UsageError, FileNotFoundError: as `state`.
    """
    Part(path).wait(timeout_s)
