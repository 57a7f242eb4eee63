"""Incidents that a person must be able to find later: late members, failed verifications, aborts.

They are one JSON object a line in `<spool>/events.jsonl`, which all processes append to, or a list
in memory. Recording never fails: what cannot be written is logged and kept in memory. Their kinds
are in `model.incidents`.

Thread rule: any thread of any process (one `write` with O_APPEND a line).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import Final

import msgspec

from ckptgate.model.documents import Manifest
from ckptgate.model.incidents import Severity, incident_kind
from ckptgate.model.layout import join_key
from ckptgate.ports.clock import Clock
from ckptgate.ports.meters import INCIDENTS_TOLD, NO_METERS, Meters

__all__ = ["EVENTS_FILE", "Event", "Events", "tell_torn"]

_log = logging.getLogger(__name__)

EVENTS_FILE: Final = "events.jsonl"
"""Its name in the spool."""
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""At this size the file is renamed to `events.jsonl.1` (the previous one goes) and begun anew."""
TAIL_BYTES: Final = 512 * 1024
"""How much of the file's end `recent` looks at."""
DETAIL_CHARS_MAX: Final = 4096
MEMORY_MAX: Final = 1000
_LEVELS: Final = {
    Severity.NOTICE: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An incident.

    Attributes:
        at: UTC, RFC 3339, "" where no clock was given.
        kind: stable name (`late-member`, `verify-failed`, ...).
        subject: what it is about.
        detail: one line for people.
    """

    at: str
    kind: str
    subject: str
    detail: str


class Events:
    """Where incidents are recorded. Any thread."""

    def __init__(
        self,
        path: str | None = None,
        *,
        clock: Clock | None = None,
        meters: Meters = NO_METERS,
    ) -> None:
        self._path = path
        self._clock = clock
        self._meters = meters
        self._lock = threading.Lock()
        self._memory: deque[Event] = deque(maxlen=MEMORY_MAX)

    def record(self, kind: str, subject: str, detail: str) -> None:
        """Record an incident and log it, as gravely as its kind is. Never fails."""
        at = self._clock.now() if self._clock else ""
        event = Event(
            at=at,
            kind=kind,
            subject=_text(subject),
            detail=_text(detail),
        )
        level = _LEVELS[incident_kind(kind).severity]
        _log.log(level, "%s subject=%s detail=%s", kind, event.subject, event.detail)
        self._meters.add(INCIDENTS_TOLD, label=kind)
        with self._lock:
            if self._path is None or not self._write(self._path, event):
                self._memory.append(event)

    def recent(self, n: int) -> list[Event]:
        """The last *n* incidents, oldest first; lines that are torn or edited are left out."""
        with self._lock:
            kept = list(self._memory)
        if self._path is not None:
            kept = [*_read_tail(self._path), *kept]
        return kept[-n:] if n > 0 else []

    @staticmethod
    def _write(path: str, event: Event) -> bool:
        line = msgspec.json.encode(event) + b"\n"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size
                is_whole = os.write(fd, line) == len(line)
            finally:
                os.close(fd)
            if size > FILE_BYTES_MAX:
                os.replace(path, f"{path}.1")
        except OSError as exc:
            # An incident must not hide behind the failure to write it down.
            _log.warning("event-not-written path=%s error=%s", path, exc)
            return False
        return is_whole


def _text(text: str) -> str:
    """As much as is kept; what isn't UTF-8 (a name of the system's) is escaped."""
    return text[:DETAIL_CHARS_MAX].encode(errors="backslashreplace").decode()


def _read_tail(path: str) -> list[Event]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    events: list[Event] = []
    for line in lines[1:] if size > TAIL_BYTES else lines:
        try:
            events.append(msgspec.json.decode(line, type=Event))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return events


def tell_torn(events: Events, manifest: Manifest) -> None:
    """Record which files an explicit commit took as they are, though their writers had died."""
    for entry in manifest.entries:
        if entry.evidence.is_torn and not entry.evidence.is_valid:
            subject = join_key(manifest.run, manifest.name, entry.path)
            what = "its writer died with it open; taken as it is, as the commit was explicit"
            events.record("torn-committed", subject, f"{entry.size} bytes: {what}")
