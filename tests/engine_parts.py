"""The engine of one process, put together as the composition root does; for all test harnesses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ckptgate.engine.catalog import StoreCatalog
from ckptgate.engine.events import Events
from ckptgate.engine.membership import Membership
from ckptgate.engine.publisher import Publisher
from ckptgate.engine.runlog import RunLogs
from ckptgate.engine.settings import PublisherSettings
from ckptgate.ports.catalog import Invalidations
from ckptgate.ports.clock import Clock, Ids
from ckptgate.ports.meters import NO_METERS, Meter, Meters
from ckptgate.ports.spool import Spool
from ckptgate.ports.store import Store

__all__ = ["Counts", "EngineParts", "Forgotten"]


class Forgotten:
    """Invalidations that are remembered."""

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self.nodes: list[int] = []

    def name(self, parent: int, name: str) -> None:
        self.names.append((parent, name))

    def node(self, ino: int) -> None:
        self.nodes.append(ino)


class Counts:
    """Meters that are kept in memory."""

    def __init__(self) -> None:
        self.counted: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.observed: dict[tuple[str, str], list[float]] = {}

    def add(self, meter: Meter, amount: float = 1.0, label: str = "") -> None:
        assert label in meter.values, (meter.name, label)
        self.counted[meter.name, label] += amount

    def set(self, meter: Meter, value: float) -> None:
        self.counted[meter.name, ""] = value

    def observe(self, meter: Meter, value: float, label: str = "") -> None:
        assert label in meter.values, (meter.name, label)
        self.observed.setdefault((meter.name, label), []).append(value)


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What a publisher's and a mount's process share in kind; each process has its own."""

    store: Store
    spool: Spool
    clock: Clock
    ids: Ids
    member: str
    events: Events
    logs: RunLogs
    membership: Membership
    meters: Meters

    @staticmethod
    def build(
        *,
        store: Store,
        spool: Spool,
        clock: Clock,
        ids: Ids,
        member: str,
        host: str,
        is_alive: Callable[[int, int], bool] | None = None,
        meters: Meters = NO_METERS,
    ) -> EngineParts:
        events = Events(meters=meters)
        logs = RunLogs(store, clock=clock, ids=ids, member=member)
        membership = Membership(
            store=store,
            spool=spool,
            logs=logs,
            clock=clock,
            ids=ids,
            member=member,
            host=host,
            events=events,
            is_alive=is_alive,
        )
        return EngineParts(
            store=store,
            spool=spool,
            clock=clock,
            ids=ids,
            member=member,
            events=events,
            logs=logs,
            membership=membership,
            meters=meters,
        )

    def publisher(
        self,
        invalidations: Invalidations,
        settings: PublisherSettings,
        wake: Callable[[], None] = lambda: None,
    ) -> Publisher:
        return Publisher(
            store=self.store,
            spool=self.spool,
            logs=self.logs,
            membership=self.membership,
            clock=self.clock,
            ids=self.ids,
            member=self.member,
            events=self.events,
            invalidations=invalidations,
            settings=settings,
            meters=self.meters,
            wake=wake,
        )

    def catalog(self, invalidations: Invalidations) -> StoreCatalog:
        return StoreCatalog(
            store=self.store,
            spool=self.spool,
            logs=self.logs,
            membership=self.membership,
            clock=self.clock,
            events=self.events,
            invalidations=invalidations,
        )
