"""Status reports as the engine makes them, for tests of what shows them."""

from __future__ import annotations

from typing import Any

from ckptgate.engine.attempt_status import AttemptStatus
from ckptgate.engine.events import Event
from ckptgate.engine.status import QueueStatus, RunStatus, StatusReport
from ckptgate.ports.spool import SpoolRoom

__all__ = ["a_report", "a_run", "an_attempt", "an_event"]


def an_attempt(**changes: Any) -> AttemptStatus:
    values: dict[str, Any] = {
        "run": "run", "name": "step-1", "attempt": "step-1.0", "state": "open", "event": "",
        "generation": 0, "job_key": "", "format_name": "", "is_joined": True, "is_voted": False,
        "is_hidden": False, "world_size": None, "files": {}, "size_bytes": 3,
        "digested_bytes": 2, "stored_bytes": 1, "rate_bytes_s": None, "eta_s": None,
        "created_at": "2026-01-01T00:00:00.000Z", "committed_at": "", "phases": {}, "ranks": (),
        "members": (), "writers": (), "missing": (), "reason": "",
    }  # fmt: skip
    return AttemptStatus(**{**values, **changes})


def a_run(name: str, **changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "run": name, "length": 3, "generation": 0, "age_s": None, "last_committed": "step-7",
        "last_step": 7, "committed": 1, "undecided": 0, "pointers": {}, "quarantined": {},
        "is_held": False, "in_doubt": False,
    }  # fmt: skip
    return RunStatus(**{**values, **changes})


def an_event(kind: str = "aborted", subject: str = "run/step-1", detail: str = "why") -> Event:
    return Event(at="2026-01-01T00:00:00.000Z", kind=kind, subject=subject, detail=detail)


def a_report(**changes: Any) -> StatusReport:
    queue = QueueStatus(plain_ops=0, pending_whole=0, pending_pointers=0, tombstones=0, name_ops=0)
    values: dict[str, Any] = {
        "attempts": (), "runs": (), "queue": queue, "room": SpoolRoom(), "events": (),
    }  # fmt: skip
    return StatusReport(**{**values, **changes})
