"""Reclaiming in the store: what of a run nothing refers to any more is removed, after its grace.

It owns the order of it, in which a crash at any point leaves nothing visible broken: what is dead
is so by the log (an attempt that nobody will ever seal is aborted there first), the grace passes, a
RECLAIM is appended for what was committed once, and only then is anything removed, the published
directories first and the manifest last. `model.reclaim` decides what may go; why no plan can be too
old to carry out is said there.

Thread rule: one thread at a time; `Reclaimer` guards it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptgate.engine.lost import Lost
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.node import Node
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.sightings import Graces, Reclaimed, Sightings
from ckptgate.errors import CkptError, IntegrityError
from ckptgate.model.entries import Entry, Reclaim
from ckptgate.model.layout import join_key
from ckptgate.model.reclaim import Part, Why, doomed, garbage, named_by, revisions_of, standing
from ckptgate.model.rules import AttemptView, RunState
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import ROOT_INO, NodeKind

__all__ = ["StoreReclaimer"]

_log = logging.getLogger(__name__)

RELOOK_S: Final = 24 * 3600.0
"""Between looks at an attempt that was found clean: a late writer may have come back."""
LIST_INTERVAL_S: Final = 3600.0
"""Between listings of a run's attempts."""
MANIFESTS_KEPT: Final = 4
PIECE: Final = 64
"""Parts that are removed in one go."""
DIRECTORIES_MAX: Final = 1000
"""Plain directories that one round looks through for unfinished writes."""


@dataclass(slots=True)
class _Look:
    """One round over one run."""

    log: RunLog
    sightings: Sightings
    graces: Graces
    is_dry: bool
    is_full: bool
    gone: set[str] = field(default_factory=set[str])


class StoreReclaimer:
    """Reclaims one run after the other."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store = node.store
        self._spool = node.spool
        self._sightings: dict[str, Sightings] = {}
        self._manifests: OrderedDict[tuple[str, str], frozenset[str]] = OrderedDict()
        self._lost = Lost(node)
        self._listed_s: dict[str, float] = {}

    def round(
        self, run: str, graces: Graces, *, is_dry: bool = False, is_full: bool = False
    ) -> Iterator[Reclaimed]:
        """One round over a run; yields after each bounded piece of work what that was.

        Args:
            run: its path.
            graces: how long what is dead is kept.
            is_dry: change nothing, say what would go.
            is_full: look at everything, also at what was found clean lately.

        Raises:
            CkptError: the store failed; the next round goes on.
        """
        log = self._node.logs.get(run)
        log.refresh()
        look = _Look(log, self._sightings_of(f"run:{run}"), graces, is_dry, is_full)
        look.sightings.begin_round()
        self._ages(look)
        is_listed = is_full or self._is_list_due(f"run:{run}")
        if log.look(lambda state: state.is_held):
            look.sightings.save()
            return
        unlogged = self._lost.unlogged(log) if is_listed else []
        for done in self._lost.abort(log, unlogged, look.sightings, graces, is_dry=is_dry):
            unlogged.remove(done.what)
            yield done
        ages = self._ages(look)
        self._doom(look, ages, self._kept(log, unlogged))
        for attempt in log.look(lambda state: list(state.attempts)):
            if self._is_due(look, ages, attempt):
                yield from self._try_empty(look, attempt)
        if is_listed:
            yield from self._drop_unfinished(look, run, run)
            look.sightings.end_round()
        else:
            look.sightings.save()

    def plain_round(
        self, graces: Graces, *, is_dry: bool = False, is_full: bool = False
    ) -> Iterator[Reclaimed]:
        """Unfinished writes in the plain directories that this node knows; arguments as `round`.

        Raises:
            CkptError: the store failed; the next round goes on.
        """
        if not is_full and not self._is_list_due("plain"):
            return
        log = self._node.logs.get("")
        look = _Look(log, self._sightings_of("plain"), graces, is_dry, is_full=True)
        look.sightings.begin_round()
        for directory in self._plain_directories():
            yield from self._drop_unfinished(look, "", directory)
        look.sightings.end_round()

    def _sightings_of(self, scope: str) -> Sightings:
        if scope not in self._sightings:
            self._sightings[scope] = Sightings(self._spool, self._node.clock, scope)
        return self._sightings[scope]

    def _is_list_due(self, scope: str) -> bool:
        """Whether it may be listed again, the first time an hour after the start; notes it."""
        now_s = self._node.clock.monotonic()
        if now_s - self._listed_s.setdefault(scope, now_s) < LIST_INTERVAL_S:
            return False
        self._listed_s[scope] = now_s
        return True

    def _ages(self, look: _Look) -> dict[str, float]:
        """Attempt -> how long it was seen to stand as it does, of all that are decided."""

        def read(state: RunState) -> dict[str, Why]:
            return {attempt: standing(state, attempt) for attempt in state.attempts}

        return {
            attempt: look.sightings.age_s(f"stands:{attempt}", str(why))
            for attempt, why in look.log.look(read).items()
            if why is not Why.UNDECIDED
        }

    # Attempts that were committed

    def _kept(self, log: RunLog, unlogged: Collection[str]) -> set[str]:
        """Attempts that somebody is known to revise, or has open on this node."""
        kept: set[str] = set()
        undecided = log.look(lambda state: state.undecided())
        for attempt in (*undecided, *unlogged):
            intent = self._lost.intent(log.run, attempt)
            if intent is not None and intent.base:
                kept.add(intent.base)
        for row in self._spool.attempts(run=log.run):
            if row.state in UNDECIDED and row.base is not None:
                base = self._spool.attempt(row.base)
                kept.add("" if base is None else base.attempt)
            elif row.state is AttemptState.REPLACED and self._spool.handles_of_attempt(row.id):
                kept.add(row.attempt)
        return kept

    def _doom(self, look: _Look, ages: dict[str, float], kept: Collection[str]) -> None:
        """Have the log say of what is old enough that its bytes go from now on."""

        def due(state: RunState) -> tuple[str, ...]:
            return doomed(state, ages, look.graces.grace_s, kept)

        found = look.log.look(due)
        look.gone.update(found)
        if not found or look.is_dry:
            return

        def decide(state: RunState) -> Entry | None:
            # Of the newest state: what was pinned or held meanwhile isn't among it any more.
            attempts = tuple(attempt for attempt in due(state) if attempt in found)
            reason = f"replaced or retired for {look.graces.grace_s:g} s"
            return Reclaim(attempts=attempts, reason=reason) if attempts else None

        look.log.append(decide)
        look.gone.clear()
        _log.info("reclaim run=%s attempts=%s", look.log.run, ",".join(found))

    def _is_due(self, look: _Look, ages: dict[str, float], attempt: str) -> bool:
        if ages.get(attempt, -1.0) < look.graces.grace_s:
            return False
        clean_s = look.sightings.known_s(f"clean:{attempt}", self._stamp(look, attempt))
        return look.is_full or clean_s is None or clean_s >= RELOOK_S

    @staticmethod
    def _stamp(look: _Look, attempt: str) -> str:
        """Differs where more may go of the attempt than before."""

        def read(state: RunState) -> str:
            is_reclaimed = state.attempts[attempt].is_reclaimed
            return f"{standing(state, attempt)} {is_reclaimed}"

        return look.log.look(read)

    # Removing

    def _try_empty(self, look: _Look, attempt: str) -> Iterator[Reclaimed]:
        """As `_empty`; what is damaged is left as it is, and keeps nothing else from going."""
        try:
            yield from self._empty(look, attempt)
        except IntegrityError as exc:
            _log.warning("not-reclaimed run=%s attempt=%s error=%s", look.log.run, attempt, exc)

    def _empty(self, look: _Look, attempt: str) -> Iterator[Reclaimed]:
        """Remove what may go of an attempt."""
        run, log = look.log.run, look.log
        parts = self._store.attempt_parts(run, attempt)
        view = log.look(lambda state: state.attempts[attempt])
        is_gone = view.is_reclaimed or attempt in look.gone
        named = frozenset[str]() if not parts else self._named(look, attempt)
        found = log.look(lambda state: garbage(state, attempt, parts, named, gone=look.gone))
        why = _say_why(log.look(lambda state: standing(state, attempt)), is_gone=is_gone)
        if is_gone and not look.is_dry:
            self._hide(log, view)
        refused: dict[str, CkptError] = {}
        for at in range(0, len(found), PIECE):
            piece = found[at : at + PIECE]
            done = Reclaimed(place="store", run=run, what=attempt, why=why)
            if look.is_dry:
                done.count, done.size = len(piece), sum(part.size for part in piece)
            else:
                log.refresh()
                if log.look(lambda state: state.is_held):
                    return
                won = self._store.reclaim_all(run, piece)
                refused.update(won.refused)
                done.count, done.size = len(piece) - len(won.refused), won.size
            if done.count:
                yield done
        if found and not look.is_dry:
            self._store.tidy(run, attempt)
        if refused:
            self._tell_refused(run, attempt, refused)
        if not found or refused:
            # What the store doesn't let go is asked for again when others are looked at again.
            look.sightings.note(f"clean:{attempt}", self._stamp(look, attempt))

    def _tell_refused(self, run: str, attempt: str, refused: Mapping[str, CkptError]) -> None:
        key, error = min(refused.items())
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        self._node.events.record("not-reclaimed", join_key(run, attempt), f"{key}: {error}{more}")
        _log.warning("not-reclaimed run=%s attempt=%s key=%s error=%s", run, attempt, key, error)

    def _hide(self, log: RunLog, view: AttemptView) -> None:
        """Nobody may find a published directory of what goes."""
        if self._store.published_attempt(log.run, view.name) != view.attempt:
            return
        with self._store.lock_run(log.run):
            log.refresh()
            if log.look(lambda state: state.current.get(view.name)) != view.attempt:
                self._store.unpublish(log.run, view.name, view.attempt)

    def _named(self, look: _Look, attempt: str) -> frozenset[str]:
        """Keys that manifests of unreclaimed attempts name, of those that may name this one's."""
        views = look.log.look(lambda state: revisions_of(state, look.gone).get(attempt, []))
        found: set[str] = set()
        for view in views:
            found |= self._keys_of(look.log.run, view)
        return frozenset(found)

    def _keys_of(self, run: str, view: AttemptView) -> frozenset[str]:
        key = (run, view.attempt)
        if key not in self._manifests:
            manifest = load_manifest(self._store, run, view.attempt, view.manifest)
            self._manifests[key] = named_by([manifest])
            while len(self._manifests) > MANIFESTS_KEPT:
                self._manifests.popitem(last=False)
        return self._manifests[key]

    # Unfinished writes

    def _drop_unfinished(self, look: _Look, run: str, directory: str) -> Iterator[Reclaimed]:
        done = Reclaimed(place="store", run=run, what=directory or "/", why="unfinished writes")
        due: list[Part] = []
        for part in self._store.unfinished(directory):
            key = f"temp:{join_key(directory, part.key)}"
            if look.sightings.age_s(key, part.stamp) >= look.graces.unfinished_s:
                due.append(part)
        if look.is_dry:
            done.count, done.size = len(due), sum(part.size for part in due)
        elif due:
            won = self._store.reclaim_all(directory, due)
            done.count, done.size = len(due) - len(won.refused), won.size
            for part_key, error in won.refused.items():
                _log.warning("not-reclaimed key=%s error=%s", part_key, error)
        if done.count:
            yield done

    def _plain_directories(self) -> Iterator[str]:
        """Plain directories that this node knows; runs among them have their own rounds, too."""
        inos = [ROOT_INO]
        count = 0
        yield ""
        while inos and count < DIRECTORIES_MAX:
            for _, child in self._spool.children(inos.pop()):
                if child.kind is NodeKind.DIR and child.plain_path:
                    count += 1
                    inos.append(child.ino)
                    yield child.plain_path


def _say_why(why: Why, *, is_gone: bool) -> str:
    return str(why) if is_gone or why is Why.ABORTED else "not in any manifest"
