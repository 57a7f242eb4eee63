"""A spool's first and last moments: nobody else has it open then, the supervisor sees to that."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from ckptgate.engine.events import EVENTS_FILE, Events
from ckptgate.engine.hosts import note_host
from ckptgate.engine.powerloss import begin_boot, end_clean
from ckptgate.errors import CkptError
from ckptgate.ports.rows import STOP_META
from ckptgate_adapters.fsspec_ckpt.journal import JOURNAL_FILE
from ckptgate_adapters.metrics.mapped import open_meters
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.system_clock import SystemClock

__all__ = ["begin_spool", "end_spool"]

_log = logging.getLogger(__name__)

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


def begin_spool(path: str) -> None:
    """See to what a power loss or a crash left in the spool *path*."""
    spool = SqliteSpool.attach(path)
    with contextlib.closing(spool):
        meters = open_meters(path, "supervisor")
        events = Events(os.path.join(path, EVENTS_FILE), clock=SystemClock(), meters=meters)
        note_host(spool, os.uname().nodename, events)
        begin_boot(spool, _boot_id(), events)
        spool.drop_meta(STOP_META)
        spool.clear_handles()
        # Nothing is left of what clients had open.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, JOURNAL_FILE))
        spool.drop_orphans()


def end_spool(path: str) -> None:
    """Have everything on disk, or leave it to the next start."""
    try:
        with contextlib.closing(SqliteSpool.attach(path)) as spool:
            end_clean(spool)
    except (CkptError, OSError) as exc:
        _log.warning("spool-not-synced spool=%s error=%s", path, exc)


def _boot_id() -> str:
    """Of the running kernel; "" where there is none."""
    try:
        with open(_BOOT_ID, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""
