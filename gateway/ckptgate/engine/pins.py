"""Pinning: a decision in a run's log that keeps a committed checkpoint, whoever deletes it.

Thread rule: any thread; no state.
"""

from __future__ import annotations

from ckptgate.engine.runlog import RunLog
from ckptgate.errors import MissingError
from ckptgate.model.entries import Entry, Pin
from ckptgate.model.rules import RunState

__all__ = ["set_pin"]


def set_pin(log: RunLog, name: str, *, is_on: bool, reason: str) -> None:
    """Have the log say that the checkpoint is pinned, or that it isn't; it may say so already.

    Raises:
        MissingError: no such checkpoint is committed.
        CkptError: as `RunLog.append`.
    """

    def decide(state: RunState) -> Entry | None:
        if name not in state.current:
            msg = f"no committed checkpoint {name!r} in the run {log.run or '/'!r}"
            raise MissingError(msg, subject=name, hint="ckptgate ls RUN")
        if (name in state.pins) is is_on:
            return None
        return Pin(name=name, is_on=is_on, reason=reason)

    log.append(decide)
