"""What the daemon shows of itself: the status report, metrics and health, for all who ask.

It owns what looking costs: a report is made anew only when something changed, and then no more
often than keeps it to a small share of one core, however many look. Any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from ckptgate import __version__
from ckptgate.app.build import Parts
from ckptgate.engine.attempt_status import Reader, time_text
from ckptgate.engine.contact import StoreContact
from ckptgate.engine.events import EVENTS_FILE
from ckptgate.engine.evict import room_of
from ckptgate.engine.progress import Progress
from ckptgate.engine.status import StatusReport, status
from ckptgate.errors import CkptError
from ckptgate.ports.meters import PASSTHROUGH
from ckptgate_adapters.metrics.mapped import read_meters
from ckptgate_adapters.mount_probe import MountProbe
from ckptgate_adapters.proc_identity import ProcIdentity

__all__ = ["SCHEMA", "Document", "Seeing"]

SCHEMA: Final = 1
"""Of the JSON report: keys are only ever added to it; see STATUS.md."""
_SHARE: Final = 0.001
"""Of one core, for reports that many look at."""
_AGE_MAX_S: Final = 10.0
"""What changes without the spool (who lives, how fast it goes) is at most so old."""
_PAUSE_MAX_S: Final = 30.0
_SPOOL_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Document:
    """A report as it is sent: its bytes, and a name for just these."""

    body: bytes
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A report that many get.

    Attributes:
        report, tag: itself, and a name of what there is to be seen in it.
        of: what it was made of, see `Seeing._version`.
        at_s, due_at_s: when it was made, and when the next one may be (monotonic).
    """

    report: StatusReport
    tag: str
    of: object
    at_s: float
    due_at_s: float


class _Undone(Exception):  # noqa: N818 -- it tells of no error
    """Ends a transaction that was only to be begun."""


class Seeing:
    """Reports of one mount's daemon."""

    def __init__(self, parts: Parts, progress: Progress, contact: StoreContact) -> None:
        self._parts = parts
        self._reader = Reader(
            spool=parts.spool,
            membership=parts.membership,
            progress=progress,
            is_alive=ProcIdentity().is_alive,
        )
        self._contact = contact
        # A daemon without a mount has nothing that could stand still.
        mountpoint = parts.config.mountpoint
        self._probe = MountProbe(mountpoint) if mountpoint else None
        self._lock = threading.Lock()
        self._last: _Shown | None = None
        self.page = ""
        """Where the status page is, "" for nowhere but the socket in the spool."""

    def report(self) -> StatusReport:
        """As of now."""
        parts = self._parts
        with self._lock:
            return status(
                parts.spool,
                parts.logs,
                parts.events,
                reader=self._reader,
                now_ns=parts.clock.now_ns(),
            )

    def shown(self) -> StatusReport:
        """As of a moment ago: the same one as long as nothing changed."""
        return self._look().report

    def _look(self) -> _Shown:
        of, now_s = self._version(), time.monotonic()
        last = self._last
        if last is not None:
            is_same = of == last.of and now_s - last.at_s < _AGE_MAX_S
            if is_same or now_s < last.due_at_s:
                return last
        began_s = time.thread_time()
        made = self.report()
        took_s = time.thread_time() - began_s
        due_at_s = now_s + min(took_s / _SHARE, _PAUSE_MAX_S)
        shown = _Shown(report=made, tag=_tag_of(made), of=of, at_s=now_s, due_at_s=due_at_s)
        # One value, so that nobody gets one report with another one's tag.
        self._last = shown
        return shown

    def document(self, report: StatusReport | None = None) -> dict[str, Any]:
        """The report as JSON values, with all that STATUS.md lists."""
        parts = self._parts
        config = parts.config
        made = report or self.report()
        contact = self._contact.look()
        disk = room_of(config.spool)
        now_ns = parts.clock.now_ns()
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "version": __version__,
            "at": time_text(now_ns),
            "store": config.store,
            "mountpoint": config.mountpoint,
            "spool": config.spool,
            "member": parts.member,
            "page": self.page,
            "contact": {
                "is_reached": contact.is_reached,
                "age_s": contact.age_s,
                "error": contact.error,
            },
            "passthrough": self._has_passthrough(),
            "disk": {"total": disk.total, "free": disk.free},
            **made.to_json(),
        }
        if made.finishing is not None:
            found["finishing"]["left_s"] = made.finishing.left_s(now_ns)
        return found

    def encoded(self, known: str = "") -> Document:
        """The document for the page; its tag changes only if something to be seen did.

        Args:
            known: a tag that whoever asks has the document of; then there is no body.
        """
        last = self._look()
        tag = f'"{last.tag}{self._contact.look().is_reached:d}{self._has_passthrough():d}"'
        if tag == known:
            return Document(b"", tag)
        return Document(json.dumps(self.document(last.report)).encode(), tag)

    def metrics(self) -> bytes:
        """What a scrape gets."""
        # Half of a library is loaded where somebody scrapes, and nowhere else.
        from ckptgate_adapters.metrics.exposition import Seen, exposition  # noqa: PLC0415

        parts = self._parts
        config = parts.config
        disk = room_of(config.spool)
        return exposition(
            Seen(
                readings=read_meters(config.spool),
                report=self.shown(),
                contact=self._contact.look(),
                is_mount_usable=self._is_mount_usable(),
                version=__version__,
                mountpoint=config.mountpoint,
                store=config.store,
                member=parts.member,
                spool_bytes=parts.spool.allocated(),
                disk_bytes=disk.total,
                disk_free_bytes=disk.free,
                now_s=parts.clock.now_ns() / 1e9,
                monotonic_s=parts.clock.monotonic(),
            )
        )

    def ready(self) -> dict[str, str]:
        """What is wrong with the mount, the spool and the store, by name; {} if all can be used."""
        found: dict[str, str] = {}
        if not self._is_mount_usable():
            found["mount"] = "does not answer"
        problem = self._spool_problem()
        if problem:
            found["spool"] = problem
        contact = self._contact.look()
        if not contact.is_reached:
            found["store"] = contact.error or "does not answer"
        return found

    def _is_mount_usable(self) -> bool:
        return self._probe is None or self._probe.is_usable()

    def _has_passthrough(self) -> bool:
        meters = read_meters(self._parts.config.spool, ("mount",), (PASSTHROUGH,))
        return bool(meters[PASSTHROUGH.name][""].value)

    def _spool_problem(self) -> str:
        spool = self._parts.spool
        try:
            with (
                contextlib.suppress(_Undone),
                spool.patience(_SPOOL_WAIT_S),
                spool.transaction(),
            ):
                # Nothing is committed: that would have the mount read its rows anew.
                raise _Undone
            if not room_of(spool.path).free:
                return "its disk is full"
        except (CkptError, OSError) as exc:
            return str(exc)
        return "is full" if self.shown().room.is_full else ""

    def _version(self) -> object:
        """Another value whenever the report would be another one, but for ages and rates."""
        parts = self._parts
        logs = tuple((log.run, log.state.length, log.is_in_doubt) for log in parts.logs.known())
        try:
            events = os.stat(os.path.join(parts.config.spool, EVENTS_FILE)).st_size
        except OSError:
            events = 0
        return parts.spool.version(), logs, events


def _tag_of(report: StatusReport) -> str:
    """A name of what there is to be seen in the report; how old the logs are is not."""
    found = report.to_json()
    found["runs"] = [{**run, "age_s": None} for run in found["runs"]]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]
