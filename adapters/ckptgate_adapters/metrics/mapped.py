"""Meters in a file that is mapped: counting costs no system call, and survives kill -9.

Each process has a file of its own and is the only one to write it; whoever is asked for metrics
reads them all. So two processes are one end point, a process that is dead goes on being told, and a
counter isn't set back by a restart. A file of another layout is begun anew, which Prometheus takes
for a restart.

Thread rule: any thread; one lock, held for some memory accesses.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptgate.ports.meters import METERS, NO_METERS, OTHER, Meter, MeterKind, Meters

__all__ = ["MappedMeters", "Reading", "meters_path", "open_meters", "read_meters"]

_log = logging.getLogger(__name__)

_HEAD_BYTES: Final = 64
_WINDOW_S: Final = 60.0
"""The longest measurement is told of this minute and the one before."""
_LONG: Final = 0.05
"""Measurements below it are not looked at for the longest one, which costs more."""
_EXTRA: Final = 5
"""Cells of a histogram beside its buckets: sum, and (which minute, longest) twice."""
PROCESSES: Final = ("supervisor", "mount", "publisher")


def meters_path(spool: str, process: str) -> str:
    """The file of a process."""
    return os.path.join(spool, f"{process}.meters")


def _width(meter: Meter) -> int:
    """Cells for one value of its label."""
    return len(meter.buckets) + 1 + _EXTRA if meter.kind is MeterKind.HISTOGRAM else 1


def _layout() -> tuple[dict[tuple[str, str], int], int, bytes]:
    """First cell by meter and label, how many there are, and what tells this layout."""
    found: dict[tuple[str, str], int] = {}
    at = 0
    for meter in METERS:
        for value in meter.values:
            found[meter.name, value] = at
            at += _width(meter)
    said = repr([(m.name, m.kind.value, m.values, m.buckets) for m in METERS]).encode()
    return found, at, hashlib.sha256(said).digest()


_CELLS, _COUNT, _DIGEST = _layout()
_BYTES: Final = _HEAD_BYTES + 8 * _COUNT


@dataclass(frozen=True, slots=True)
class Reading:
    """What one meter says for one value of its label.

    Attributes:
        value: of a counter or gauge; of a histogram the sum.
        buckets: how many measurements are in each, the last one without a bound.
        longest: of a histogram, in the last minute or two; 0 if none was long.
    """

    value: float
    buckets: tuple[float, ...] = ()
    longest: float = 0.0


class MappedMeters:
    """`ports.meters.Meters` in the file *path*; raises OSError if it can't be mapped."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.pread(fd, len(_DIGEST), 0) != _DIGEST or os.fstat(fd).st_size != _BYTES:
                os.ftruncate(fd, _BYTES)
                # Written, not only made so long: a store into a hole of a full disk is SIGBUS.
                os.pwrite(fd, _DIGEST.ljust(_BYTES, b"\0"), 0)
            self._map = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
        self._cells = memoryview(self._map)[_HEAD_BYTES:].cast("d")
        self._lock = threading.Lock()

    def add(self, meter: Meter, amount: float = 1.0, label: str = "") -> None:
        """See `ports.meters.Meters.add`."""
        at = _CELLS.get((meter.name, label))
        if at is None:
            at = _CELLS[meter.name, OTHER]
        with self._lock:
            self._cells[at] += amount

    def set(self, meter: Meter, value: float) -> None:
        """See `ports.meters.Meters.set`."""
        self._cells[_CELLS[meter.name, ""]] = value

    def observe(self, meter: Meter, value: float, label: str = "") -> None:
        """See `ports.meters.Meters.observe`."""
        at = _CELLS[meter.name, label]
        last = at + len(meter.buckets) + 1
        cells = self._cells
        with self._lock:
            cells[at + bisect.bisect_left(meter.buckets, value)] += 1
            cells[last] += value
            if value >= _LONG:
                self._note_long(last + 1, value)

    def _note_long(self, at: int, value: float) -> None:
        """Keep the longest of this minute; the cells of the one before are every other ones."""
        minute = time.monotonic() // _WINDOW_S
        at += 2 * int(minute % 2)
        if self._cells[at] != minute:
            self._cells[at], self._cells[at + 1] = minute, 0.0
        self._cells[at + 1] = max(self._cells[at + 1], value)

    def close(self) -> None:
        """Unmap it; what is counted from then on is lost."""
        with self._lock:
            mapped, self._cells = self._cells, memoryview(bytearray(8 * _COUNT)).cast("d")
            mapped.release()
            self._map.close()


def open_meters(spool: str, process: str) -> Meters:
    """The meters of a process; where they can't be had (a full disk) it goes on without."""
    path = meters_path(spool, process)
    try:
        return MappedMeters(path)
    except OSError as exc:
        _log.warning("meters-off path=%s error=%s", path, exc)
        return NO_METERS


def read_meters(
    spool: str, processes: Sequence[str] = PROCESSES, meters: Sequence[Meter] = METERS
) -> dict[str, dict[str, Reading]]:
    """Name -> label -> reading, the sum of all processes; gauges are of the one that has set one.

    Files that are missing or of another layout count as zeros.
    """
    files = [_read(meters_path(spool, process)) for process in processes]
    return {
        meter.name: {
            value: _sum(meter, [_one(meter, value, cells) for cells in files])
            for value in meter.values
        }
        for meter in meters
    }


def _read(path: str) -> Sequence[float]:
    try:
        with open(path, "rb") as stream:
            data = stream.read(_BYTES + 1)
    except OSError:
        data = b""
    if len(data) != _BYTES or not data.startswith(_DIGEST):
        data = bytes(_BYTES)
    return memoryview(data)[_HEAD_BYTES:].cast("d")


def _one(meter: Meter, value: str, cells: Sequence[float]) -> Reading:
    at = _CELLS[meter.name, value]
    if meter.kind is not MeterKind.HISTOGRAM:
        return Reading(cells[at])
    end = at + len(meter.buckets) + 1
    minute = time.monotonic() // _WINDOW_S
    recent = [
        cells[i + 1] for i in (end + 1, end + 3) if cells[i + 1] and minute - cells[i] in {0, 1}
    ]
    return Reading(cells[end], tuple(cells[at:end]), max(recent, default=0.0))


def _sum(meter: Meter, readings: Sequence[Reading]) -> Reading:
    if meter.kind is MeterKind.GAUGE:
        return Reading(max(reading.value for reading in readings))
    return Reading(
        sum(reading.value for reading in readings),
        tuple(sum(each) for each in zip(*(reading.buckets for reading in readings), strict=True)),
        max(reading.longest for reading in readings),
    )
