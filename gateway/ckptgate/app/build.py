"""The composition root: which adapter stands behind which port. Nothing else knows both sides."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptgate.app.addresses import is_url
from ckptgate.app.config import Config
from ckptgate.app.stores import open_store
from ckptgate.app.units import parse_seconds
from ckptgate.engine.catalog import StoreCatalog
from ckptgate.engine.events import EVENTS_FILE, Events
from ckptgate.engine.membership import Membership
from ckptgate.engine.publisher import Publisher
from ckptgate.engine.runlog import RunLogs
from ckptgate.engine.settings import PublisherSettings
from ckptgate.model.states import UNDECIDED
from ckptgate.ports.catalog import Invalidations
from ckptgate.ports.meters import Meters
from ckptgate.ports.spool import PendingKind, Spool
from ckptgate.ports.store import Store, VerifyMode
from ckptgate.vfs.identify import Identify
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.channels import DatagramWaker
from ckptgate_adapters.metrics.mapped import open_meters
from ckptgate_adapters.proc_identity import ProcIdentity
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.system_clock import SystemClock, SystemIds

__all__ = [
    "Parts",
    "build_parts",
    "build_publisher",
    "build_vfs",
    "has_work",
    "publisher_settings",
    "raise_file_limit",
]

_CLOSE_DELAY_S = 0.005
_CONTACT_INTERVAL_S: Final = 30.0
_OPEN_FILES: Final = 1 << 20
_FILES_TO_DIRECTORY: Final = 2
_FILES_TO_BUCKET: Final = 8
"""Sent at once: what a file waits for beside its parts is others' time. Their memory is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What both processes need."""

    config: Config
    store: Store
    spool: Spool
    logs: RunLogs
    membership: Membership
    events: Events
    clock: SystemClock
    ids: SystemIds
    member: str
    meters: Meters


def build_parts(config: Config, *, process: str, store: Store | None = None) -> Parts:
    """Open the (existing) spool of a mount for one of its processes; and its store, but *store*."""
    store = store or open_store(config.store, config.s3)
    spool = SqliteSpool.attach(config.spool)
    clock, ids = SystemClock(), SystemIds()
    member = spool.get_meta("member") or ""
    logs = RunLogs(store, clock=clock, ids=ids, member=member)
    meters = open_meters(config.spool, process)
    events = Events(os.path.join(config.spool, EVENTS_FILE), clock=clock, meters=meters)
    membership = Membership(
        store=store,
        spool=spool,
        logs=logs,
        clock=clock,
        ids=ids,
        member=member,
        host=os.uname().nodename,
        events=events,
        is_alive=ProcIdentity().is_alive,
    )
    return Parts(
        config=config,
        store=store,
        spool=spool,
        logs=logs,
        membership=membership,
        events=events,
        clock=clock,
        ids=ids,
        member=member,
        meters=meters,
    )


def publisher_settings(config: Config) -> PublisherSettings:
    """The publisher's settings from the configuration."""
    commit = config.commit
    return PublisherSettings(
        commit_deadline_s=commit.deadline_s,
        quiescence_s=commit.quiescence_s,
        abandon_after_s=commit.abandon_after_s,
        survivor_delay_s=commit.survivor_delay_s,
        live_interval_s=commit.live_interval_s,
        idle_interval_s=commit.idle_interval_s,
        spool_free_min_share=config.room.free_min_share,
        spool_free_target_share=config.room.free_target_share,
        spool_max_bytes=config.room.spool_max_bytes,
        reclaim_grace_s=parse_seconds(config.reclaim.grace),
        keep_aborted_s=parse_seconds(config.reclaim.keep_aborted),
        lost_after_s=parse_seconds(config.reclaim.lost_after),
        contact_interval_s=_CONTACT_INTERVAL_S,
        upload_threads=_FILES_TO_BUCKET if is_url(config.store) else _FILES_TO_DIRECTORY,
        verify=VerifyMode(config.verify) if config.verify else None,
        patterns=config.names.patterns(),
    )


def build_publisher(
    parts: Parts, invalidations: Invalidations, wake: Callable[[], None] = lambda: None
) -> Publisher:
    """The publisher of a mount.

    Args:
        parts: what it works with.
        invalidations: tell the mount what its kernel must forget.
        wake: ends the pause of the loop that runs it.
    """
    return Publisher(
        store=parts.store,
        spool=parts.spool,
        logs=parts.logs,
        membership=parts.membership,
        clock=parts.clock,
        ids=parts.ids,
        member=parts.member,
        events=parts.events,
        invalidations=invalidations,
        settings=publisher_settings(parts.config),
        meters=parts.meters,
        wake=wake,
    )


def build_vfs(parts: Parts, invalidations: Invalidations, identity: Identify) -> Vfs:
    """The name space of a mount; *identity* knows who asks."""
    config = parts.config
    catalog = StoreCatalog(
        store=parts.store,
        spool=parts.spool,
        logs=parts.logs,
        membership=parts.membership,
        clock=parts.clock,
        events=parts.events,
        invalidations=invalidations,
    )
    return Vfs(
        spool=parts.spool,
        catalog=catalog,
        waker=DatagramWaker(config.spool),
        clock=parts.clock,
        patterns=config.names.patterns(),
        identify=identity,
        invalidations=invalidations,
        settings=VfsSettings(
            default_job_key=config.job,
            decision_wait_s=config.commit.decision_wait_s,
            resume_wait_s=config.commit.resume_wait_s,
            room_wait_s=config.room.wait_s,
            spool_max_bytes=config.room.spool_max_bytes,
            close_delay_s=_CLOSE_DELAY_S,
        ),
    )


def has_work(spool: Spool) -> bool:
    """Whether anything is undecided, or on its way into the store."""
    return bool(spool.attempts(states=UNDECIDED) or spool.plain_ops()) or any(
        row.kind is PendingKind.WHOLE for row in spool.pending()
    )


def raise_file_limit() -> None:
    """Each open handle takes a descriptor; a trainer may hold many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
