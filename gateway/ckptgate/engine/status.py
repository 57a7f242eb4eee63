"""What is under way on this node and what is committed, as one value for people and programs.

It reads the spool and what the logs' last refresh folded, and never the store: `status` answers
while the store is away. Any thread.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from ckptgate.engine.attempt_status import AttemptStatus, Reader, time_text
from ckptgate.engine.events import Event, Events
from ckptgate.engine.phases import FINISHED_MAX
from ckptgate.engine.runlog import RunLog, RunLogs
from ckptgate.model.incidents import incident_kind
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED
from ckptgate.ports.rows import STOP_META, StopNotice
from ckptgate.ports.spool import ROOM_META, PendingKind, Spool, SpoolRoom

__all__ = [
    "Finishing",
    "QueueStatus",
    "RunStatus",
    "StatusReport",
    "run_status",
    "status",
    "step_of",
]

EVENTS_MAX: Final = 20
STEP_DIGITS_MAX: Final = 15
"""A longer number is exact in no metric, and no step."""
_NUMBER: Final = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run as its log says.

    Attributes:
        run: path in the store.
        length: entries folded.
        generation: the newest.
        age_s: since the log was last read, None if never.
        last_committed: name of the newest committed checkpoint, "" for none.
        last_step: the number in that name, None where there is none.
        committed, undecided: how many.
        pointers: pointer -> checkpoint.
        quarantined: name -> reason.
        is_held: whether nothing is retired.
        in_doubt: whether it is unknown what became of the last record that was sent.
    """

    run: str
    length: int
    generation: int
    age_s: float | None
    last_committed: str
    last_step: int | None
    committed: int
    undecided: int
    pointers: dict[str, str]
    quarantined: dict[str, str]
    is_held: bool
    in_doubt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """What waits for the store outside of checkpoints, as numbers of items."""

    plain_ops: int
    pending_whole: int
    pending_pointers: int
    tombstones: int
    name_ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing:
    """That what is under way is being finished, to an end or for a drain.

    Attributes:
        why: `drain`, `stop` or `end`.
        refuses_new: no checkpoint may be begun meanwhile.
        deadline: until when it may take, UTC; "" where that isn't known.
        deadline_ns: the same by the wall clock, 0 where it isn't known.
    """

    why: str
    refuses_new: bool
    deadline: str
    deadline_ns: int

    def left_s(self, now_ns: int) -> float:
        """What is left of the budget."""
        return max(0.0, (self.deadline_ns - now_ns) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """All of it."""

    attempts: tuple[AttemptStatus, ...]
    runs: tuple[RunStatus, ...]
    queue: QueueStatus
    room: SpoolRoom
    events: tuple[Event, ...]
    finishing: Finishing | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "attempts": [_plain(asdict(attempt)) for attempt in self.attempts],
            "runs": [_plain(asdict(run)) for run in self.runs],
            "queue": asdict(self.queue),
            "room": msgspec.to_builtins(self.room),
            "events": [_event(event) for event in self.events],
            "finishing": _finishing(self.finishing),
        }


def status(
    spool: Spool,
    logs: RunLogs,
    events: Events,
    *,
    reader: Reader | None = None,
    now_ns: int = 0,
) -> StatusReport:
    """The report as of now.

    Args:
        spool: this node's.
        logs: of the runs that this process follows.
        events: incidents.
        reader: of attempts; one that is kept reads what is decided only once.
        now_ns: wall clock.
    """
    rows = spool.attempts()
    shown = [row for row in rows if row.state in UNDECIDED]
    finished = [row for row in rows if row.state not in UNDECIDED and row.job_key]
    listed = sorted([*finished[-FINISHED_MAX:], *shown], key=lambda row: row.id)
    # What was removed waits for nothing.
    pending = Counter(row.kind for row in spool.pending() if row.ino is not None)
    return StatusReport(
        attempts=(reader or Reader(spool=spool)).read(listed),
        runs=tuple(run_status(log) for log in sorted(logs.known(), key=lambda log: log.run)),
        queue=QueueStatus(
            plain_ops=len(spool.plain_ops()),
            pending_whole=pending[PendingKind.WHOLE],
            pending_pointers=pending[PendingKind.POINTER],
            tombstones=len(spool.tombstones()),
            name_ops=sum(len(spool.name_ops(row.id)) for row in shown),
        ),
        room=SpoolRoom.parse(spool.get_meta(ROOM_META)),
        events=tuple(events.recent(EVENTS_MAX)),
        finishing=_of_notice(StopNotice.parse(spool.get_meta(STOP_META)), now_ns),
    )


def _of_notice(notice: StopNotice, now_ns: int) -> Finishing | None:
    if not notice.is_on(now_ns):
        return None
    return Finishing(
        why=notice.why,
        refuses_new=notice.refuses,
        deadline=time_text(notice.deadline_ns),
        deadline_ns=notice.deadline_ns,
    )


def run_status(log: RunLog) -> RunStatus:
    """One run as far as its log was read."""
    age_s, in_doubt = log.age_s(), log.is_in_doubt

    def read(state: RunState) -> RunStatus:
        return RunStatus(
            run=log.run,
            length=state.length,
            generation=state.generation,
            age_s=age_s,
            last_committed=(last := next(reversed(state.current), "")),
            last_step=step_of(last),
            committed=len(state.current),
            undecided=len(state.undecided()),
            pointers={name: folded.value.target for name, folded in state.pointers.items()},
            quarantined=dict(state.quarantined),
            is_held=state.is_held,
            in_doubt=in_doubt,
        )

    return log.look(read)


def step_of(name: str) -> int | None:
    """The last number in a checkpoint's name, None where there is none that could be a step."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= STEP_DIGITS_MAX else None


def _event(event: Event) -> dict[str, str]:
    known = incident_kind(event.kind)
    return {
        "at": event.at,
        "kind": event.kind,
        "severity": str(known.severity),
        "subject": event.subject,
        "detail": event.detail,
        "hint": known.hint,
    }


def _finishing(found: Finishing | None) -> dict[str, Any] | None:
    """What of it doesn't change by the second."""
    if found is None:
        return None
    return {key: value for key, value in asdict(found).items() if key != "deadline_ns"}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON has them."""
    return {
        key: list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
        for key, value in values.items()
    }
