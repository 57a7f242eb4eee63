"""What can be done with a store that no daemon on this machine serves: look, and pin.

It owns the rule what that is. A pin is a record in the run's log, as any node appends them, so it
needs the store alone, if that has put-if-absent. What could be removed can be told, and isn't
removed: how old it is only a daemon knows, which has seen it all the time. What a node has staged
is in its spool, so `commit`, `abort` and `wait` need its daemon.
"""

from __future__ import annotations

import os
import tempfile

from ckptgate.app.build import build_parts, build_publisher
from ckptgate.app.config import Config
from ckptgate.app.locate import Place
from ckptgate.engine.overview import Overview, find_runs, overview
from ckptgate.engine.pins import set_pin
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.sightings import Reclaimed
from ckptgate.errors import MissingError, UsageError
from ckptgate.ports.store import Store
from ckptgate_adapters.sqlite_spool import SqliteSpool, make_member_id
from ckptgate_adapters.system_clock import SystemClock, SystemIds

__all__ = ["overview_of", "pin_in", "would_go"]


class _NoMount:
    """`ports.catalog.Invalidations` where no kernel knows anything."""

    def name(self, parent: int, name: str) -> None:
        """Nobody needs to know."""

    def node(self, ino: int) -> None:
        """Nobody needs to know."""


def _log(store: Store, run: str, *, member: str = "") -> RunLog:
    return RunLog(store, run, clock=SystemClock(), ids=SystemIds(), member=member)


def overview_of(place: Place) -> Overview:
    """What the store says of the place's run, or of all runs in it. Raises as `overview`."""
    with place.opened() as store:
        return overview(store, place.run, lambda run: _log(store, run))


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
