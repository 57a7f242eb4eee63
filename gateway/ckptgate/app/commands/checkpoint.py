"""The run or checkpoint that a command is about, as its store has it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from typing import Any

import msgspec

from ckptgate.app.commands.options import store_options
from ckptgate.app.locate import Place, locate_checkpoint, locate_run
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.runlog import RunLog
from ckptgate.errors import MissingError, UsageError
from ckptgate.model.documents import Manifest
from ckptgate.model.layout import join_key, log_key
from ckptgate.ports.store import Store
from ckptgate_adapters.system_clock import SystemClock, SystemIds

__all__ = ["committed", "locate", "log_of", "record_at"]


def log_of(store: Store, place: Place) -> RunLog:
    """The run's log, read to its end.

    Raises:
        MissingError: nothing was ever decided there.
    """
    log = RunLog(store, place.run, clock=SystemClock(), ids=SystemIds(), member="")
    if not log.refresh().length:
        what = _where(place)
        if place.name:
            msg = f"no committed checkpoint {place.name!r} in {what}: nothing was decided there"
            raise MissingError(msg, subject=place.name, hint="ckptgate status")
        msg = f"{what} is not a run: nothing was ever decided in it"
        raise MissingError(msg, subject=place.run, hint="name the directory of the checkpoints")
    return log


def _where(place: Place) -> str:
    """The run, by what the user named it with: a path in a mount, or a place in a store."""
    return repr(place.run or "/") if place.mount else place.store


def record_at(store: Store, place: Place, index: int) -> dict[str, Any]:
    """One record of the log as JSON values."""
    data = store.get(log_key(place.run, index))
    record: dict[str, Any] = msgspec.json.decode(data)
    return record


def locate(args: argparse.Namespace) -> Place:
    """The checkpoint that the argument names; a run in its place is called one."""
    path, s3 = args.path, store_options(args)
    try:
        place = locate_checkpoint(path, s3)
    except MissingError:
        with contextlib.suppress(MissingError):
            _refuse_run(path, locate_run(path, s3))
        raise
    _refuse_run(path, dataclasses.replace(place, run=join_key(place.run, place.name)))
    return place


def _refuse_run(path: str, place: Place) -> None:
    with place.opened() as store:
        log = RunLog(store, place.run, clock=SystemClock(), ids=SystemIds(), member="")
        if log.refresh().length:
            msg = f"{path} is a run: name a checkpoint in it"
            raise UsageError(msg, subject=path, hint=f"ckptgate ls {path}")


def committed(args: argparse.Namespace, store: Store, place: Place) -> tuple[Manifest, str]:
    """The manifest, and when it was committed."""
    log = log_of(store, place)
    attempt = log.state.current.get(place.name)
    if attempt is None:
        msg = f"no committed checkpoint {place.name!r} in {_where(place)}"
        hint = f"ckptgate ls {os.path.dirname(args.path.rstrip('/'))}"
        raise MissingError(msg, subject=args.path, hint=hint)
    view = log.state.attempts[attempt]
    manifest = load_manifest(store, place.run, attempt, view.manifest)
    return manifest, str(record_at(store, place, view.decision_index)["at"])
