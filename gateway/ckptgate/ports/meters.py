"""Meters: numbers that the gateway counts while it works, and the list of all of them.

It owns the list: names follow Prometheus' conventions, labels have closed sets of values, so that
no name of a user, run or file ever makes a new time series. Counting never fails and never waits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

from ckptgate.errors import ErrorKind
from ckptgate.model.incidents import INCIDENTS

__all__ = [
    "COMMITTED_BYTES",
    "DIGESTED_BYTES",
    "DIGESTED_FILES",
    "HOOK_RUNS",
    "INCIDENTS_TOLD",
    "METERS",
    "NO_METERS",
    "OTHER",
    "PASSTHROUGH",
    "PHASES",
    "PHASE_SECONDS",
    "REQUEST_KINDS",
    "REQUEST_SECONDS",
    "SAVES",
    "SAVE_RESULTS",
    "UPLOADED_BYTES",
    "UPLOADED_FILES",
    "UPLOAD_ERRORS",
    "WAITING_SINCE",
    "Meter",
    "MeterKind",
    "Meters",
    "NoMeters",
]

OTHER: Final = "other"
"""The label's value for what a newer release may bring."""


class MeterKind(enum.Enum):
    """How it counts."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """One meter.

    Attributes:
        name: as Prometheus sees it.
        help: one line.
        kind: how it counts.
        label: its one label, "" for none.
        values: all that the label can be.
        buckets: upper bounds of a histogram's, in its unit.
    """

    name: str
    help: str
    kind: MeterKind
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, label: str = "", values: tuple[str, ...] = ("",)) -> Meter:
    return Meter(name=name, help=text, kind=MeterKind.COUNTER, label=label, values=values)


def _gauge(name: str, text: str) -> Meter:
    return Meter(name=name, help=text, kind=MeterKind.GAUGE)


def _histogram(
    name: str, text: str, label: str, values: tuple[str, ...], buckets: tuple[float, ...]
) -> Meter:
    kind = MeterKind.HISTOGRAM
    return Meter(name=name, help=text, kind=kind, label=label, values=values, buckets=buckets)


REQUEST_KINDS: Final = ("look", "change", "read", "write")
SAVE_RESULTS: Final = ("committed", "aborted", "abandoned", "late", "cancelled")
PHASES: Final = ("staging", "digest", "upload", "vote", "commit")
"""Of a save, in order: each is the time from the end of the one before to its own."""
_WAITS_S: Final = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
_SAVES_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)

REQUEST_SECONDS: Final = _histogram(
    "ckptgate_request_seconds",
    "How long the mount took to answer the kernel's requests; passed-through I/O has none.",
    "kind",
    REQUEST_KINDS,
    _WAITS_S,
)
WAITING_SINCE: Final = _gauge(
    "ckptgate_request_waiting_since_seconds",
    "Monotonic clock when the oldest request that waits for the store or the disk came.",
)
PASSTHROUGH: Final = _gauge(
    "ckptgate_passthrough", "Whether the kernel reads and writes staged files itself."
)
SAVES: Final = _counter(
    "ckptgate_saves_total", "Checkpoints of this node by how they ended.", "result", SAVE_RESULTS
)
PHASE_SECONDS: Final = _histogram(
    "ckptgate_save_phase_seconds",
    "Of committed checkpoints, what each phase added after the one before had ended.",
    "phase",
    PHASES,
    _SAVES_S,
)
COMMITTED_BYTES: Final = _counter(
    "ckptgate_committed_bytes_total", "Bytes of this node in committed checkpoints."
)
DIGESTED_BYTES: Final = _counter("ckptgate_digested_bytes_total", "Bytes that were digested.")
DIGESTED_FILES: Final = _counter("ckptgate_digested_files_total", "Files that were digested.")
UPLOADED_BYTES: Final = _counter(
    "ckptgate_uploaded_bytes_total", "Bytes that the store has been proved to have."
)
UPLOADED_FILES: Final = _counter(
    "ckptgate_uploaded_files_total", "Files that the store has been proved to have."
)
UPLOAD_ERRORS: Final = _counter(
    "ckptgate_upload_errors_total",
    "Failed uploads by kind of the error; each is tried again.",
    "kind",
    (*(str(kind) for kind in ErrorKind), OTHER),
)
INCIDENTS_TOLD: Final = _counter(
    "ckptgate_incidents_total",
    "Incidents by kind, see EVENTS.md.",
    "kind",
    (*sorted(INCIDENTS), OTHER),
)
HOOK_RUNS: Final = _counter(
    "ckptgate_hook_runs_total",
    "Runs of the incidents' command by how they ended.",
    "result",
    ("ok", "failed", "timeout", "suppressed"),
)

METERS: Final = (
    REQUEST_SECONDS,
    WAITING_SINCE,
    PASSTHROUGH,
    SAVES,
    PHASE_SECONDS,
    COMMITTED_BYTES,
    DIGESTED_BYTES,
    DIGESTED_FILES,
    UPLOADED_BYTES,
    UPLOADED_FILES,
    UPLOAD_ERRORS,
    INCIDENTS_TOLD,
    HOOK_RUNS,
)


class Meters(Protocol):
    """Where it is counted. Any thread; no call fails, waits, or costs more than a microsecond."""

    def add(self, meter: Meter, amount: float = 1.0, label: str = "") -> None:
        """Count *amount* more; a label's value that isn't listed counts as `OTHER`."""
        ...

    def set(self, meter: Meter, value: float) -> None:
        """A gauge's value now."""
        ...

    def observe(self, meter: Meter, value: float, label: str = "") -> None:
        """One more measurement of a histogram."""
        ...


class NoMeters:
    """Counts nothing: for commands, and where the file of the numbers can't be had."""

    def add(self, meter: Meter, amount: float = 1.0, label: str = "") -> None:
        """Nothing."""

    def set(self, meter: Meter, value: float) -> None:
        """Nothing."""

    def observe(self, meter: Meter, value: float, label: str = "") -> None:
        """Nothing."""


NO_METERS: Final[Meters] = NoMeters()
