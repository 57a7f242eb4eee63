"""What the publisher's parts work with: one node's ports and settings, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptgate.engine.events import Events
from ckptgate.engine.membership import Membership
from ckptgate.engine.phases import PhaseClock
from ckptgate.engine.progress import Progress
from ckptgate.engine.runlog import RunLogs
from ckptgate.engine.settings import PublisherSettings
from ckptgate.engine.turns import Turns
from ckptgate.ports.catalog import Invalidations
from ckptgate.ports.clock import Clock
from ckptgate.ports.meters import Meters
from ckptgate.ports.spool import Spool
from ckptgate.ports.store import Store

__all__ = ["Node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node.

    Attributes:
        store: where checkpoints go.
        spool: where they are staged.
        logs: the runs' decision logs.
        membership: this member's part in attempts.
        clock: time.
        member: this member's id.
        events: where incidents are recorded.
        invalidations: what the kernel must forget.
        settings: how long things may take.
        turns: whose turn it is to do what any member may do.
        meters: where it is counted.
        phases: when the phases of saves ended.
        progress: how fast saves go.
        wake: ends the publisher's pause between two passes; any thread.
    """

    store: Store
    spool: Spool
    logs: RunLogs
    membership: Membership
    clock: Clock
    member: str
    events: Events
    invalidations: Invalidations
    settings: PublisherSettings
    turns: Turns
    meters: Meters
    phases: PhaseClock
    progress: Progress
    wake: Callable[[], None]
