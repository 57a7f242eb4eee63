"""What Prometheus is told: the meters of all processes, and gauges of the report as of now.

It owns the number of time series: labels have closed sets of values, and of runs, whose names are
the users', a few are told, those where something happened last. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ckptgate.engine.contact import Reached
from ckptgate.engine.status import RunStatus, StatusReport
from ckptgate.ports.meters import (
    INCIDENTS_TOLD,
    METERS,
    REQUEST_SECONDS,
    WAITING_SINCE,
    Meter,
    MeterKind,
)
from ckptgate_adapters.metrics.mapped import Reading

__all__ = ["CONTENT_TYPE", "RUNS_MAX", "Seen", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
RUNS_MAX: Final = 32
"""Runs that have time series of their own."""
_Readings: TypeAlias = Mapping[str, Mapping[str, Reading]]
_VERIFY_KINDS: Final = {"read": "verify-failed", "upload": "upload-mismatch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that is told.

    Attributes:
        readings: of the meters, see `read_meters`.
        report: of attempts, runs, queue, incidents.
        contact: with the store.
        is_mount_usable: it answers.
        version, mountpoint, store, member: what this is.
        spool_bytes: what the spool takes of its disk.
        disk_bytes, disk_free_bytes: of the spool's disk.
        now_s: seconds since the epoch.
        monotonic_s: of the clock that `WAITING_SINCE` is told by.
    """

    readings: _Readings
    report: StatusReport
    contact: Reached
    is_mount_usable: bool
    version: str
    mountpoint: str
    store: str
    member: str
    spool_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    now_s: float
    monotonic_s: float


class _Collector(Collector):
    """Hands the families to the library, which writes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(seen: Seen) -> bytes:
    """The text that a scrape gets; of the publisher's process there is `process_*`, too."""
    registry = CollectorRegistry(auto_describe=False)
    families = [part for make in _FAMILIES for part in make(seen)]
    registry.register(_Collector(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)


def _labelled(
    name: str, help_text: str, label: str, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for text, value in values:
        family.add_metric([_clean(text)], value)
    return family


def _clean(text: str) -> str:
    """A label's value: UTF-8, and no longer than anybody reads."""
    return text.encode(errors="backslashreplace").decode()[:1024]


def _meters(seen: Seen) -> Iterator[Metric]:
    for meter in METERS:
        if meter is not WAITING_SINCE:
            yield _family(meter, seen.readings[meter.name])


def _family(meter: Meter, readings: Mapping[str, Reading]) -> Metric:
    labels = [meter.label] if meter.label else None
    if meter.kind is MeterKind.HISTOGRAM:
        histogram = HistogramMetricFamily(meter.name, meter.help, labels=labels)
        bounds = [*(str(float(bound)) for bound in meter.buckets), "+Inf"]
        for value, reading in readings.items():
            total, counts = 0.0, list[tuple[str, float]]()
            for bound, count in zip(bounds, reading.buckets, strict=True):
                total += count
                counts.append((bound, total))
            histogram.add_metric([value] if labels else [], counts, reading.value)
        return histogram
    family: CounterMetricFamily | GaugeMetricFamily
    if meter.kind is MeterKind.COUNTER:
        family = CounterMetricFamily(meter.name, meter.help, labels=labels)
    else:
        family = GaugeMetricFamily(meter.name, meter.help, labels=labels)
    for value, reading in readings.items():
        family.add_metric([value] if labels else [], reading.value)
    return family


def _requests(seen: Seen) -> Iterator[Metric]:
    since = seen.readings[WAITING_SINCE.name][""].value
    waited_s = max(0.0, seen.monotonic_s - since) if since else 0.0
    help_text = "How long the oldest request waits by now for the store or the disk, 0 for none."
    yield _gauge("ckptgate_request_oldest_seconds", help_text, waited_s)
    yield _labelled(
        "ckptgate_request_longest_seconds",
        "The longest that a request took in the last minute or two; 0 below 50 ms.",
        "kind",
        ((kind, it.longest) for kind, it in seen.readings[REQUEST_SECONDS.name].items()),
    )
    told = seen.readings[INCIDENTS_TOLD.name]
    family = CounterMetricFamily(
        "ckptgate_verify_failures", "Bytes that were not what their digest says.", labels=["where"]
    )
    for where, kind in _VERIFY_KINDS.items():
        family.add_metric([where], told[kind].value)
    yield family


def _about(seen: Seen) -> Iterator[Metric]:
    yield InfoMetricFamily("ckptgate_build", "What runs.", {"version": seen.version})
    place = {"mountpoint": seen.mountpoint, "store": seen.store, "member": seen.member}
    cleaned = {name: _clean(text) for name, text in place.items()}
    yield InfoMetricFamily("ckptgate_mount", "Which mount this is.", cleaned)
    yield _gauge("ckptgate_mount_usable", "Whether the mount answers.", seen.is_mount_usable)
    help_text = "Whether the store answered in the last 15 s, or does now."
    yield _gauge("ckptgate_store_reachable", help_text, seen.contact.is_reached)
    age_s = seen.contact.age_s
    yield _gauge(
        "ckptgate_store_last_contact_timestamp_seconds",
        "When the store last answered; 0 if it never did.",
        0.0 if age_s is None else seen.now_s - age_s,
    )


def _spool(seen: Seen) -> Iterator[Metric]:
    room = seen.report.room
    yield _gauge("ckptgate_spool_bytes", "What the spool takes of its disk.", seen.spool_bytes)
    yield _gauge("ckptgate_spool_limit_bytes", "room.spool_max, 0 for none.", room.limit)
    yield _gauge("ckptgate_spool_full", "Whether new files are refused for room.", room.is_full)
    yield _gauge("ckptgate_spool_disk_bytes", "Size of the spool's disk.", seen.disk_bytes)
    yield _gauge("ckptgate_spool_disk_free_bytes", "Free on it.", seen.disk_free_bytes)
    help_text = "Bytes of published copies that were given up for room, with a room.spool_max."
    yield CounterMetricFamily("ckptgate_spool_evicted_bytes", help_text, value=room.evicted)


def _saves(seen: Seen) -> Iterator[Metric]:
    under_way = [it for it in seen.report.attempts if it.state in {"open", "sealed"}]
    counts = [(state, sum(it.state == state for it in under_way)) for state in ("open", "sealed")]
    help_text = "Checkpoints of this node that are not decided."
    yield _labelled("ckptgate_undecided_checkpoints", help_text, "state", counts)
    help_text = "Undecided ones that nobody sees, since a writer died with a file open."
    hidden = sum(it.is_hidden for it in under_way)
    yield _gauge("ckptgate_hidden_checkpoints", help_text, hidden)
    waiting = sum(it.size_bytes - it.stored_bytes for it in under_way)
    help_text = "Staged bytes of this node that the store does not have yet."
    yield _gauge("ckptgate_unstored_bytes", help_text, waiting)
    began = [_seconds(it.created_at) for it in under_way]
    age_s = max(0.0, seen.now_s - min(began)) if began else 0.0
    help_text = "Since the oldest undecided checkpoint was begun, 0 for none."
    yield _gauge("ckptgate_oldest_unpublished_age_seconds", help_text, age_s)
    queue = seen.report.queue
    names = ("plain_ops", "pending_whole", "pending_pointers", "tombstones", "name_ops")
    yield _labelled(
        "ckptgate_queued_operations",
        "What waits for the store outside of checkpoints' files.",
        "queue",
        ((name, getattr(queue, name)) for name in names),
    )


def _finishing(seen: Seen) -> Iterator[Metric]:
    found = seen.report.finishing
    why = "" if found is None else found.why
    yield _labelled(
        "ckptgate_finishing",
        "Whether what is under way is being finished, for a drain, a stop or the daemon's end.",
        "why",
        ((name, name == why) for name in ("drain", "stop", "end")),
    )
    left_s = 0.0 if found is None else found.left_s(int(seen.now_s * 1e9))
    help_text = "What is left of the time for that, 0 for none."
    yield _gauge("ckptgate_finishing_left_seconds", help_text, left_s)


def _runs(seen: Seen) -> Iterator[Metric]:
    runs = list(seen.report.runs)
    last = {it.run: i for i, it in enumerate(seen.report.attempts)}
    runs.sort(key=lambda run: last.get(run.run, -1), reverse=True)
    yield _gauge("ckptgate_runs", "Runs that are followed.", len(runs))
    shown = runs[:RUNS_MAX]

    def each(name: str, help_text: str, value: Callable[[RunStatus], float]) -> Metric:
        return _labelled(name, help_text, "run", ((run.run or "/", value(run)) for run in shown))

    yield each("ckptgate_log_entries", "Length of the run's log.", lambda run: run.length)
    help_text = "Whether it is unknown what became of the last record that was sent."
    yield each("ckptgate_log_in_doubt", help_text, lambda run: run.in_doubt)
    help_text = "Committed checkpoints that are there."
    yield each("ckptgate_committed_checkpoints", help_text, lambda run: run.committed)
    help_text = "The number in the newest committed checkpoint's name, -1 where there is none."
    yield each(
        "ckptgate_last_committed_step",
        help_text,
        lambda run: -1 if run.last_step is None else run.last_step,
    )
    times = {it.run: _seconds(it.committed_at) for it in seen.report.attempts if it.committed_at}
    yield _labelled(
        "ckptgate_last_commit_timestamp_seconds",
        "When this node last took a COMMIT over, of the last twenty saves.",
        "run",
        ((run.run or "/", times[run.run]) for run in shown if run.run in times),
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


_FAMILIES: Final = (_about, _meters, _requests, _spool, _saves, _finishing, _runs)
