"""What can be done with a store that no daemon on this machine serves: look, wait, and pin.

It owns the rule what that is. What is decided is in the runs' logs, so all can see it, and wait for
it. A pin is a record in the run's log, as any node appends them, so it needs the store alone, if
that has put-if-absent. What could be removed can be told, and isn't removed: how old it is only a
daemon knows, which has seen it all the time. What a node has staged is in its spool, so `commit`
and `abort` need its daemon, and nobody else can wait for what the store doesn't know of yet.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Generator

from ckptgate.app.addresses import split_address
from ckptgate.app.build import build_parts, build_publisher
from ckptgate.app.config import Config
from ckptgate.app.locate import Place, locate_checkpoint, locate_unserved
from ckptgate.app.sections import S3Section
from ckptgate.engine.overview import Overview, find_runs, overview
from ckptgate.engine.pins import set_pin
from ckptgate.engine.runlog import RunLog, RunLogs
from ckptgate.engine.sightings import Reclaimed
from ckptgate.errors import MissingError, UsageError
from ckptgate.ports.store import Store
from ckptgate_adapters.sqlite_spool import SqliteSpool, make_member_id
from ckptgate_adapters.system_clock import SystemClock, SystemIds

__all__ = ["looks", "pin_in", "seen_unserved", "would_go"]


class _NoMount:
    """`ports.catalog.Invalidations` where no kernel knows anything."""

    def name(self, parent: int, name: str) -> None:
        """Nobody needs to know."""

    def node(self, ino: int) -> None:
        """Nobody needs to know."""


def _log(store: Store, run: str, *, member: str = "") -> RunLog:
    return RunLog(store, run, clock=SystemClock(), ids=SystemIds(), member=member)


def seen_unserved(path: str, s3: S3Section) -> tuple[Place, Overview] | None:
    """What *path* names in a store that no daemon here serves, and what the store says of it.

    That is all of its runs, a run, or a checkpoint; None if a daemon here serves it, or if it is in
    no store.

    Raises:
        MissingError: nothing was ever decided there.
        CkptError: the store failed.
    """
    place = locate_unserved(path, s3)
    nothing: MissingError | None = None
    if place is not None:
        try:
            return place, _overview_of(place)
        except MissingError as exc:
            nothing = exc
    # What lies above may hold runs without being one: then *path* is no checkpoint either.
    with contextlib.suppress(MissingError, UsageError):
        if locate_unserved(split_address(path)[0], s3) is not None:
            one = locate_checkpoint(path, s3)
            return one, _overview_of(one)
    if nothing is not None:
        raise nothing
    return None


def _overview_of(place: Place) -> Overview:
    with looks(place) as look:
        return look()


@contextlib.contextmanager
def looks(place: Place) -> Generator[Callable[[], Overview]]:
    """What the store says of a place, as often as it is asked; of logs only what is new is read."""
    with place.opened() as store:
        logs = RunLogs(store, clock=SystemClock(), ids=SystemIds(), member="")

        def look() -> Overview:
            return overview(store, place.run, logs.get, name=place.name)

        yield look


def pin_in(place: Place, *, is_on: bool, reason: str) -> None:
    """Pin a checkpoint, or end that, in the log of its run.

    Raises:
        UsageError: only one writer may write there.
        MissingError: no such checkpoint is committed.
        UnusableError, TransientStoreError: the store failed, or has no put-if-absent.
    """
    if place.s3.single_writer:
        msg = f"{place.store} has a single writer: only its daemon may write there"
        raise UsageError(msg, subject=place.store, hint="name a path in the mount")
    with place.opened() as store:
        # Whose log is there must not be overwritten by a store that can't do better.
        if not _log(store, place.run).refresh().length:
            msg = f"{place.store} is not a run: nothing was ever decided in it"
            raise MissingError(msg, subject=place.store, hint="name a checkpoint in a run")
        store.probe()
        member = make_member_id(os.uname().nodename)
        set_pin(_log(store, place.run, member=member), place.name, is_on=is_on, reason=reason)


def would_go(place: Place) -> list[Reclaimed]:
    """What nothing refers to any more, in the place's run or in all runs in it; changes nothing.

    Raises:
        MissingError: there is no run.
        CkptError: the store failed.
    """
    with tempfile.TemporaryDirectory(prefix="ckptgate-gc-") as base:
        spool = os.path.join(base, "spool")
        made = SqliteSpool.create_or_open(spool, store_url=place.store, host=os.uname().nodename)
        made.close()
        parts = build_parts(
            Config(store=place.store, spool=spool, mountpoint="", s3=place.s3), process="publisher"
        )
        try:
            publisher = build_publisher(parts, _NoMount())
            runs = {
                run: None
                for run in (place.run, *find_runs(parts.store))
                if parts.logs.get(run).refresh().length
            }
            if not runs:
                msg = f"{place.store} holds no run: nothing was ever decided in it"
                raise MissingError(msg, subject=place.store)
            return [
                found
                for run in runs
                for found in publisher.sweep(run, grace_s=0.0, is_dry=True)
                if found.place == "store"
            ]
        finally:
            parts.spool.close()
            parts.store.close()
