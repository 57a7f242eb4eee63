"""What the daemon answers on its control socket. Called from the socket's threads."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import asdict
from typing import Any, Final

import msgspec

from ckptgate.app.build import Parts
from ckptgate.app.seeing import Seeing
from ckptgate.engine.attempt_status import torn_files, why_hidden, writers_of
from ckptgate.engine.known import is_known
from ckptgate.engine.pins import set_pin
from ckptgate.engine.publisher import Publisher
from ckptgate.engine.run_state import run_state
from ckptgate.errors import CkptError, MissingError, RefusedError, UsageError
from ckptgate.model.states import CANCELLED, UNDECIDED, AttemptState
from ckptgate.ports.explicit import record_explicit_commit
from ckptgate.ports.recording import REASON_CHARS_MAX
from ckptgate.ports.rows import CONTACT_META, STOP_META, Contact, StopNotice
from ckptgate.ports.spool import AttemptRow, PendingKind
from ckptgate_adapters.channels import DatagramWaker
from ckptgate_adapters.proc_identity import ProcIdentity

__all__ = ["Control"]

_log = logging.getLogger(__name__)

_SOON_S: Final = 5.0
"""A file that was quiet for almost long enough is worth waiting for."""


class Control:
    """Answers what the command line asks of the daemon."""

    def __init__(self, parts: Parts, publisher: Publisher, seeing: Seeing) -> None:
        self._parts = parts
        self._seeing = seeing
        self._publisher = publisher
        self._identity = ProcIdentity()
        self._waker = DatagramWaker(parts.config.spool)
        self.drain_timeout_s = parts.config.stop.timeout_s
        self._answers = {
            "status": self._status,
            "commit": self._commit,
            "abort": self._abort,
            "state": self._state,
            "drain": self._drain,
            "hold": self._hold,
            "left": self._left,
            "budget": self._budget,
            "run": self._run,
            "gc": self._gc,
            "pin": self._pin,
        }

    def wake(self) -> None:
        """Wake the publisher's loop."""
        self._waker.wake()

    def answer(self, request: dict[str, Any]) -> Any:
        """The result of one request; raises CkptError."""
        op = request.get("op")
        if op not in self._answers:
            msg = f"unknown request {op!r}"
            raise UsageError(msg, hint="daemon and command line are of different releases")
        return self._answers[op](request)

    def report(self) -> dict[str, Any]:
        """The status report as JSON values."""
        return self._seeing.report().to_json()

    def left(self) -> list[dict[str, Any]]:
        """Work that isn't finished: attempts, and plain names not yet in the store."""
        if not self._has_attempts() and not self._has_plain_work():
            return []
        rows = [row for row in self.report()["attempts"] if row["state"] in UNDECIDED]
        if self._has_plain_work():
            rows.append({"name": "plain files", "state": "pending", "missing": []})
        return rows

    def is_left(self) -> bool:
        """Whether `left` would name anything; cheap."""
        return self._has_attempts() or self._has_plain_work()

    def is_decidable(self) -> bool:
        """Whether waiting can still help: something is sealed, or plain work is left."""
        return self._has_plain_work() or bool(
            self._parts.spool.attempts(states=(AttemptState.SEALED,))
        )

    def is_moving(self) -> bool:
        """Whether waiting can help before the unmount: a save may still be going on, too."""
        parts, is_away = self._parts, self.is_away()
        if self.is_decidable() and not is_away:
            return True
        quiet_s = parts.config.commit.quiescence_s + _SOON_S
        for row in parts.spool.attempts(states=(AttemptState.OPEN,)):
            silent_s = (parts.clock.now_ns() - max(row.write_ns, row.created_ns)) / 1e9
            if (silent_s < quiet_s and not is_away) or self._is_written(row):
                return True
        return False

    def is_away(self) -> bool:
        """Whether the store is known not to answer."""
        return bool(Contact.parse(self._parts.spool.get_meta(CONTACT_META)).away_ns)

    def _is_written(self, row: AttemptRow) -> bool:
        """Whether a process that writes it lives."""
        spool, is_alive = self._parts.spool, self._identity.is_alive
        open_by = {(h.pid, h.start) for h in spool.handles_of_attempt(row.id) if not h.is_closed}
        return any(is_alive(pid, start) for pid, start in {*open_by, *writers_of(spool, row)})

    def _has_attempts(self) -> bool:
        return bool(self._parts.spool.attempts(states=UNDECIDED))

    def _has_plain_work(self) -> bool:
        spool = self._parts.spool
        return bool(spool.plain_ops()) or any(
            row.kind is PendingKind.WHOLE for row in spool.pending()
        )

    def _status(self, request: dict[str, Any]) -> Any:
        config, path = self._parts.config, str(request.get("path") or "")
        if path and not is_known(self._parts.spool, self._parts.store, path):
            msg = f"nothing is at {path!r} in the mount {config.mountpoint}"
            hint = f"ckptgate status {config.mountpoint}; ckptgate ls RUN has what is committed"
            raise MissingError(msg, subject=path, hint=hint)
        return self._seeing.document()

    def _find(self, request: dict[str, Any], *, undecided: bool) -> AttemptRow:
        run, name = str(request["run"]), str(request["name"])
        rows = self._parts.spool.attempts(run=run, name=name)
        if undecided:
            rows = [row for row in rows if row.state in UNDECIDED]
        if not rows:
            kind = "open checkpoint" if undecided else "checkpoint"
            msg = f"no {kind} {name!r} in the run {run or '/'!r} is known on this node"
            raise MissingError(msg, subject=name, hint="ckptgate status")
        return rows[-1]

    def _commit(self, request: dict[str, Any]) -> Any:
        row = self._find(request, undecided=False)
        torn = torn_files(self._parts.spool, row, self._identity.is_alive)
        record_explicit_commit(
            self._parts.spool,
            row.id,
            rank=request.get("rank"),
            world_size=request.get("world_size"),
            is_all=bool(request.get("all")),
            now_ns=self._parts.clock.now_ns(),
        )
        self.wake()
        is_undecided = row.state in UNDECIDED
        return {
            "run": row.run,
            "name": row.name,
            "attempt": row.attempt,
            # What a container proves is whole, whoever died.
            "torn": [path for path, file in torn if is_undecided and not file.evidence.is_valid],
        }

    def _abort(self, request: dict[str, Any]) -> Any:
        row = self._find(request, undecided=True)
        who, why = str(request.get("by") or "somebody"), str(request.get("reason") or "")
        reason = f"{CANCELLED}{who} on {os.uname().nodename}" + (f": {why}" if why else "")
        self._publisher.request_abort(row.id, reason[:REASON_CHARS_MAX])
        row = self._parts.spool.attempt(row.id) or row
        if row.state is AttemptState.COMMITTED:
            msg = f"{row.name!r} is committed already"
            raise RefusedError(msg, subject=row.name)
        return {"run": row.run, "name": row.name, "attempt": row.attempt, "state": row.state}

    def _state(self, request: dict[str, Any]) -> Any:
        row = self._find(request, undecided=False)
        return {
            "run": row.run,
            "name": row.name,
            "attempt": row.attempt,
            "state": str(row.state),
            "reason": row.reason or why_hidden(self._parts.spool, row, self._identity.is_alive),
            "missing": list(row.missing),
        }

    def _gc(self, request: dict[str, Any]) -> Any:
        run, grace_s = request.get("run"), request.get("grace_s")
        if run is not None and not self._parts.logs.get(str(run)).refresh().length:
            msg = f"{run!r} is not a run: nothing was ever decided in it"
            raise MissingError(msg, subject=str(run), hint="name the directory of the checkpoints")
        found = self._publisher.sweep(
            None if run is None else str(run),
            grace_s=None if grace_s is None else float(grace_s),
            is_dry=bool(request.get("dry_run")),
        )
        self.wake()
        return {
            "dry_run": bool(request.get("dry_run")),
            "files": sum(item.count for item in found),
            "bytes": sum(item.size for item in found),
            "removed": [asdict(item) for item in found],
        }

    def _pin(self, request: dict[str, Any]) -> Any:
        run, name = str(request["run"]), str(request["name"])
        is_on, reason = bool(request["is_on"]), str(request.get("reason") or "")
        set_pin(self._parts.logs.get(run), name, is_on=is_on, reason=reason)
        return {"run": run, "name": name, "is_pinned": is_on}

    def _drain(self, request: dict[str, Any]) -> Any:
        self.drain_timeout_s = float(request["timeout_s"])
        return {"left": self.left()}

    def _hold(self, request: dict[str, Any]) -> Any:
        """Finish what is under way from now on, or no more; mostly nothing new is begun then."""
        spool, for_s, why = self._parts.spool, request.get("for_s"), str(request["why"])
        refuses, now_ns = bool(request["refuses"]), self._parts.clock.now_ns()
        is_over = why == "drain" and not refuses
        budget_s = float(request.get("timeout_s", for_s or self.drain_timeout_s))
        with spool.transaction():
            present = StopNotice.parse(spool.get_meta(STOP_META))
            # The end of the mount is not undone by the end of a drain.
            is_mine = present.why in {"", "drain", why}
            if is_over and is_mine:
                spool.drop_meta(STOP_META)
            elif is_mine:
                notice = StopNotice(
                    refuses=refuses,
                    until_ns=0 if for_s is None else now_ns + int(for_s * 1e9),
                    why=why,
                    deadline_ns=now_ns + int(budget_s * 1e9),
                )
                spool.set_meta(STOP_META, msgspec.json.encode(notice).decode())
        if is_over:
            _log.info("drain-ended spool=%s", spool.path)
        elif why == "drain":
            _log.info("draining spool=%s budget_s=%.0f", spool.path, budget_s)
        self.wake()
        return {"timeout_s": self.drain_timeout_s}

    def begin_end(self) -> None:
        """Say that the publisher ends, with what it has for that."""
        spool, now_ns = self._parts.spool, self._parts.clock.now_ns()
        deadline_ns = now_ns + int(self.drain_timeout_s * 1e9)
        with contextlib.suppress(CkptError), spool.transaction():
            notice = StopNotice.parse(spool.get_meta(STOP_META))
            if notice.why == "stop":
                notice = msgspec.structs.replace(notice, deadline_ns=deadline_ns)
            else:
                notice = StopNotice(until_ns=deadline_ns, why="end", deadline_ns=deadline_ns)
            spool.set_meta(STOP_META, msgspec.json.encode(notice).decode())

    def _left(self, request: dict[str, Any]) -> Any:
        del request
        return {
            "left": self.left(),
            "is_moving": self.is_moving(),
            "is_away": self.is_away(),
            "timeout_s": self.drain_timeout_s,
        }

    def _budget(self, request: dict[str, Any]) -> Any:
        del request
        return {"timeout_s": self.drain_timeout_s}

    def _run(self, request: dict[str, Any]) -> Any:
        """What is undecided in a run, or below it, and what was decided last in each."""
        path = str(request["path"])
        return run_state(self._parts.spool, path, is_alive=self._identity.is_alive)
