"""What a store says of its runs, without any node's spool: for people where no daemon serves it.

It reads logs, lists of members and their votes, and writes nothing. What a node has staged and not
sent yet only its own daemon knows.

Thread rule: any thread; no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from ckptgate.engine.rolls import Rolls
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.status import RunStatus, run_status
from ckptgate.errors import MissingError
from ckptgate.model.ids import is_attempt_id, split_attempt_id
from ckptgate.model.layout import attempts_prefix, join_key
from ckptgate.model.rules import AttemptPhase, AttemptView, RunState
from ckptgate.model.states import AttemptState
from ckptgate.ports.store import PlainKind, Store

__all__ = ["AttemptOverview", "Overview", "find_runs", "overview"]

DIRECTORIES_MAX: Final = 1000
"""Plain directories that are looked through for runs."""
DECIDED_MAX: Final = 20
"""Attempts of a run that are decided and still told, newest last."""
OPEN: Final = str(AttemptState.OPEN)
"""The state of an attempt that no log speaks of."""
SEALED: Final = str(AttemptState.SEALED)
REPLACED: Final = str(AttemptState.REPLACED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOverview:
    """One attempt.

    Attributes:
        run, name, attempt: where and which.
        state: `open`, `sealed`, `committed`, `replaced` or `aborted`.
        members: that registered, of one that is undecided.
        missing: what is owed and by whom, one line each.
        reason: why it was aborted.
    """

    run: str
    name: str
    attempt: str
    state: str
    members: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All of it."""

    runs: tuple[RunStatus, ...]
    attempts: tuple[AttemptOverview, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def find_runs(store: Store) -> list[str]:
    """Paths of the runs in a store: directories that hold the gateway's own, root first.

    Raises:
        TransientStoreError, UnusableError: the store failed.
    """
    found: list[str] = []
    directories = [""]
    for looked in range(DIRECTORIES_MAX):
        if looked >= len(directories):
            break
        path = directories[looked]
        try:
            entries = store.plain_list(path)
        except MissingError:
            continue
        if not path and store.plain_stat("").has_runs:
            found.append("")
        for entry in entries:
            if entry.kind is not PlainKind.DIR or entry.is_managed:
                continue
            below = join_key(path, entry.name)
            directories.append(below)
            if entry.has_runs:
                found.append(below)
    return found


def overview(
    store: Store, run: str, log_of: Callable[[str], RunLog], *, name: str = ""
) -> Overview:
    """What the store says of a run, if *run* is one, and of those below it.

    Args:
        store: where it is.
        run: its path.
        log_of: the log of a run.
        name: of the only checkpoint of that run that is wanted; "" for all, and for all runs.

    Raises:
        MissingError: nothing was ever decided there, or there is nothing of that name.
        IntegrityError: a log, member or vote is damaged; names it.
        TransientStoreError, UnusableError: the store failed.
    """
    paths = [run] if name else [run, *find_runs(store)]
    logs = [log for path in paths if (log := log_of(path)).refresh().length]
    unique = {log.run: log for log in logs}
    if not unique:
        msg = f"{store.url} holds no run: nothing was ever decided in it"
        raise MissingError(msg, subject=store.url, hint="name the directory of the checkpoints")
    rolls = Rolls(store)
    rows = tuple(row for log in unique.values() for row in _attempts(store, log, rolls, name))
    if name and not rows:
        msg = f"the run {run or '/'!r} in {store.url} has no checkpoint {name!r}"
        raise MissingError(msg, subject=name, hint="ckptgate status RUN")
    return Overview(runs=tuple(run_status(log) for log in unique.values()), attempts=rows)


def _attempts(store: Store, log: RunLog, rolls: Rolls, name: str) -> Iterator[AttemptOverview]:
    views = log.look(lambda state: list(state.attempts.values()))
    known = {view.attempt for view in views}
    views = [view for view in views if name in ("", view.name)]
    decided = [view for view in views if view.decision_index >= 0]
    decided.sort(key=lambda view: view.decision_index)
    for view in decided[-DECIDED_MAX:]:
        yield _decided(log, view)
    for view in views:
        if view.decision_index < 0:
            yield _undecided(log, rolls, view.attempt, view.name, SEALED)
    for attempt in store.children(attempts_prefix(log.run)):
        if attempt in known or not is_attempt_id(attempt):
            continue
        of = split_attempt_id(attempt)[0]
        if name in ("", of):
            yield _undecided(log, rolls, attempt, of, OPEN)


def _decided(log: RunLog, view: AttemptView) -> AttemptOverview:
    def is_current(state: RunState) -> bool:
        return state.current.get(view.name) == view.attempt

    is_replaced = view.state is AttemptPhase.COMMITTED and not log.look(is_current)
    return AttemptOverview(
        run=log.run,
        name=view.name,
        attempt=view.attempt,
        state=REPLACED if is_replaced else str(view.state),
        missing=view.missing,
        reason=view.reason,
    )


def _undecided(log: RunLog, rolls: Rolls, attempt: str, name: str, state: str) -> AttemptOverview:
    members = rolls.member_ids(log.run, attempt)
    votes = rolls.newest_votes(log.run, attempt, members)
    rolls.forget(log.run, attempt)
    missing: list[str] = []
    for member in members:
        vote = votes.get(member)
        if vote is None:
            missing.append(f"{member}: has said nothing of its files yet")
        elif not vote.is_final:
            missing.append(f"{member}: {len(vote.entries)} entries so far, not all of its own")
    return AttemptOverview(
        run=log.run,
        name=name,
        attempt=attempt,
        state=state,
        members=tuple(members),
        missing=tuple(missing),
    )
