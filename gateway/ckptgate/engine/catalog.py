"""The store's state as the name space asks for it: views of runs, trees, verified bytes.

It only combines what the log, joining, adoption and verified reads do, and remembers views.

Thread rule: any thread; a call may block on the store unless it says otherwise.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from dataclasses import dataclass
from typing import Final

from ckptgate.engine.adopt import Unnamed, adopt, adopt_root, fill, load_manifest, tell_unnamed
from ckptgate.engine.events import Events
from ckptgate.engine.fetch import Fetcher
from ckptgate.engine.membership import Membership
from ckptgate.engine.runlog import RunLog, RunLogs
from ckptgate.errors import MissingError, TransientStoreError
from ckptgate.model.rules import AttemptView, RunState
from ckptgate.model.states import AttemptState
from ckptgate.ports.catalog import Invalidations, RunView
from ckptgate.ports.clock import Clock
from ckptgate.ports.spool import AttemptRow, LocalBytes, Spool
from ckptgate.ports.store import PlainEntry, Store

__all__ = ["StoreCatalog"]

_log = logging.getLogger(__name__)

PLAIN_PIECE_BYTES: Final = 4 * 1024 * 1024
LOCKS_COUNT: Final = 64
AWAY_S: Final = 2.0
"""How long a store that did not answer isn't asked for views that are known."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A view, and when the log was read to the end that it shows; monotonic clock, seconds."""

    view: RunView
    read_at_s: float


class StoreCatalog:
    """`ports.catalog.Catalog` on a store and a spool. Any thread."""

    def __init__(
        self,
        *,
        store: Store,
        spool: Spool,
        logs: RunLogs,
        membership: Membership,
        clock: Clock,
        events: Events,
        invalidations: Invalidations | None = None,
    ) -> None:
        self._store = store
        self._spool = spool
        self._logs = logs
        self._membership = membership
        self._clock = clock
        self._invalidations = invalidations
        self._fetcher = Fetcher(store=store, spool=spool, events=events)
        self._lock = threading.Lock()
        self._views: dict[str, _Known] = {}
        self._run_nodes: dict[str, int] = {}
        self._away_until_s: dict[str, float] = {}
        self._shared: dict[int, tuple[float, bool]] = {}
        self._sharing = [threading.Lock() for _ in range(LOCKS_COUNT)]
        self._adopting = [threading.Lock() for _ in range(LOCKS_COUNT)]

    # Runs

    def is_fresh(self, run: str, max_age_s: float) -> bool:
        """Whether `view(run, max_age_s)` would answer from memory; never blocks."""
        known = self._views.get(run)
        if known is None:
            return False
        return self._is_away(run) or self._clock.monotonic() - known.read_at_s < max_age_s

    def view(self, run: str, max_age_s: float) -> RunView:
        """The run's state; see `ports.catalog.Catalog.view`.

        After the store did not answer, the last known view is given for a while without asking: a
        store that is away must not make each look-up wait. Who wants it as new as can be (with
        *max_age_s* 0) knows of something that the store answered since, and is not put off so.
        """
        log = self._logs.get(run)
        known = self._views.get(run)
        if known is not None and max_age_s > 0 and self.is_fresh(run, max_age_s):
            return self._newest_now(log, known)
        try:
            read = log.read(max_age_s, lambda state: self._made(log, state))
            self._away_until_s.pop(run, None)
        except TransientStoreError as exc:
            if known is None:
                raise
            self._away_until_s[run] = self._clock.monotonic() + AWAY_S
            _log.warning("view-is-old run=%s age_s=%.1f error=%s", run, log.age_s() or 0.0, exc)
            return self._newest_now(log, known)
        return self._kept(read)

    def _is_away(self, run: str) -> bool:
        until_s = self._away_until_s.get(run)
        return until_s is not None and self._clock.monotonic() < until_s

    def _newest_now(self, log: RunLog, known: _Known) -> RunView:
        """What is known without waiting for somebody who reads the log just now."""
        if known.view.length == log.state.length:
            return known.view
        made = log.look_now(lambda state: self._made(log, state))
        return self._kept(known if made is None else made)

    def _made(self, log: RunLog, state: RunState) -> _Known:
        """The view of *state*, which nobody changes meanwhile."""
        known = self._views.get(log.run)
        is_same = known is not None and known.view.length == state.length
        view = known.view if known is not None and is_same else _view(log.run, state)
        age_s = log.age_s()
        return _Known(view, -math.inf if age_s is None else self._clock.monotonic() - age_s)

    def _kept(self, made: _Known) -> RunView:
        """Keep this view, unless another thread folded further meanwhile; returns the newest."""
        run = made.view.run
        with self._lock:
            known = self._views.get(run)
            if known is not None and known.view.length > made.view.length:
                return known.view
            if known is not None:
                made = _Known(made.view, max(made.read_at_s, known.read_at_s))
            self._views[run] = made
        if known is not None and known.view is not made.view:
            self._tell_changes(known.view, made.view)
        return made.view

    def _tell_changes(self, old: RunView, new: RunView) -> None:
        """Have the kernel forget the names whose meaning changed."""
        run_ino = self._run_node(new.run)
        if self._invalidations is None or run_ino is None:
            return
        names = {
            name
            for name in {*old.committed, *new.committed}
            if old.committed.get(name) != new.committed.get(name)
        }
        names |= {
            name
            for name in {*old.pointers, *new.pointers}
            if old.pointers.get(name) != new.pointers.get(name)
        }
        for name in sorted(names):
            self._invalidations.name(run_ino, name)

    def _run_node(self, run: str) -> int | None:
        known = self._run_nodes.get(run)
        if known is None:
            rows = self._spool.attempts(run=run)
            known = rows[-1].run_ino if rows else None
        return known

    # Checkpoints

    def materialise(self, run: str, run_ino: int, name: str) -> AttemptRow:
        """The committed checkpoint's root in the spool; see `ports.catalog.Catalog`."""
        self._run_nodes[run] = run_ino
        log = self._logs.get(run)
        view = log.look(lambda state: _committed(state, name))
        if view is None:
            log.refresh()
            view = log.look(lambda state: _committed(state, name))
        if view is None:
            reason = log.look(lambda state: state.quarantined.get(name))
            why = "is not committed" if reason is None else f"is quarantined: {reason}"
            msg = f"checkpoint {name!r} of run {run!r} {why}"
            raise MissingError(msg, subject=name, hint="see `ckptgate status`")
        present = self._present(run, view)
        if present is not None:
            return present
        with self._adopting[hash(view.attempt) % LOCKS_COUNT]:
            present = self._present(run, view) or adopt_root(self._spool, run, run_ino, view)
            if present is not None:
                return present
            mine = self._spool.attempt_by_id(run, view.attempt)
            if mine is not None:
                # Before the tree becomes the manifest's: a late member keeps its files.
                self._membership.check_late(mine)
            manifest = load_manifest(self._store, run, view.attempt, view.manifest)
            unnamed: list[Unnamed] = []
            row = adopt(
                self._spool,
                run,
                run_ino,
                manifest,
                view.manifest,
                seal_index=view.seal_index,
                unnamed=unnamed,
            )
        if self._invalidations is not None:
            tell_unnamed(self._invalidations, unnamed)
        _log.info("materialised run=%s attempt=%s", run, view.attempt)
        return row

    def fill(self, attempt: int) -> None:
        """The tree below a committed root; see `ports.catalog.Catalog`."""
        row = self._spool.attempt(attempt)
        if row is None or not row.is_root_only:
            return
        with self._adopting[hash(row.attempt) % LOCKS_COUNT]:
            row = self._spool.attempt(attempt)
            if row is None or not row.is_root_only:
                return
            log, id_ = self._logs.get(row.run), row.attempt
            view = log.look(lambda state: state.attempts.get(id_))
            if view is None:
                view = log.refresh().attempts[id_]
            manifest = load_manifest(self._store, row.run, id_, view.manifest)
            fill(self._spool, attempt, manifest, view.manifest)
        _log.info("filled run=%s attempt=%s entries=%d", row.run, id_, len(manifest.entries))

    def _present(self, run: str, view: AttemptView) -> AttemptRow | None:
        row = self._spool.attempt_by_id(run, view.attempt)
        is_here = (
            row is not None
            and row.state is AttemptState.COMMITTED
            and (row.manifest == view.manifest or row.is_root_only)
        )
        return row if is_here else None

    def find_open(self, run: str, run_ino: int, name: str, job_key: str) -> AttemptRow | None:
        """See `Membership.find_open`."""
        self._run_nodes[run] = run_ino
        return self._membership.find_open(run, run_ino, name, job_key)

    def has_others(self, attempt: int) -> bool:
        """See the port."""
        row = self._spool.attempt(attempt)
        return row is not None and len(self._membership.member_ids(row.run, row.attempt)) > 1

    def refresh_shared(self, attempt: int) -> bool:
        """See `Membership.refresh_shared`.

        A call that waited for one that began after it is served by that one's answer.
        """
        asked_s = self._clock.monotonic()
        with self._sharing[attempt % LOCKS_COUNT]:
            last = self._shared.get(attempt)
            if last is not None and last[0] > asked_s:
                return last[1]
            started_s = self._clock.monotonic()
            is_changed = self._membership.refresh_shared(attempt)
            self._shared[attempt] = (started_s, is_changed)
        return is_changed

    def fetch(self, file: int, offset: int, length: int) -> None:
        """See `Fetcher.fetch`."""
        self._fetcher.fetch(file, offset, length)

    def read_ahead(self, file: int, offset: int, length: int) -> None:
        """See `Fetcher.read_ahead`."""
        self._fetcher.read_ahead(file, offset, length)

    def is_fetched(self, file: int, offset: int, length: int) -> bool:
        """See `Fetcher.is_fetched`."""
        return self._fetcher.is_fetched(file, offset, length)

    def is_local(self, file: int) -> bool:
        """See `Fetcher.is_local`."""
        return self._fetcher.is_local(file)

    # Plain names

    def plain_stat(self, path: str) -> PlainEntry | None:
        """A plain name in the store, None if there is none (fresh)."""
        try:
            return self._store.plain_stat(path)
        except MissingError:
            return None

    def plain_list(self, path: str) -> list[PlainEntry]:
        """A plain directory in the store; empty if there is none."""
        try:
            return self._store.plain_list(path)
        except MissingError:
            return []

    def plain_fetch(self, path: str, file: int) -> None:
        """Copy a plain file of the store into the spool file *file*, whole or not at all."""
        target = self._spool.data_path(file)
        partial = f"{target}.partial"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(partial, flags, 0o600)
        try:
            with os.fdopen(fd, "wb") as out:
                offset = 0
                while piece := self._store.plain_read(path, offset, PLAIN_PIECE_BYTES):
                    out.write(piece)
                    offset += len(piece)
            os.replace(partial, target)
        except OSError:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
        self._spool.update_file(file, local=LocalBytes.FULL)

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a plain file in the store."""
        return self._store.plain_read(path, offset, length)


def _view(run: str, state: RunState) -> RunView:
    return RunView(
        run=run,
        length=state.length,
        committed={
            name: attempt
            for name, attempt in state.current.items()
            if name not in state.quarantined
        },
        names=frozenset(state.names),
        pointers={name: folded.value for name, folded in state.pointers.items()},
        undecided=state.undecided(),
        generation=state.generation,
        newest=state.newest(),
    )


def _committed(state: RunState, name: str) -> AttemptView | None:
    attempt = state.current.get(name)
    if attempt is None or name in state.quarantined:
        return None
    return state.attempts[attempt]
