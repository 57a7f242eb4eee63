"""What is missing to an attempt: closure over the members' votes, with the format's expected set.

Everything is read from the store, so any survivor comes to the same result. What was read is kept
per attempt, as long as no vote changes.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.runlog import RunLogs
from ckptgate.errors import CkptError, MissingError, TransientStoreError
from ckptgate.formats import registry
from ckptgate.formats.base import FileView
from ckptgate.model.closure import (
    ExpectedSet,
    Missing,
    closure,
    is_edited,
    known_world_size,
    merge_votes,
    stale_rank_files,
)
from ckptgate.model.documents import EntryType, FileEntry, Member, Vote
from ckptgate.model.entries import SealEvent
from ckptgate.model.ids import split_attempt_id
from ckptgate.model.layout import full_key
from ckptgate.model.merge import foreign_bytes
from ckptgate.model.rules import RunState
from ckptgate.ports.store import Store

__all__ = ["Judge", "StoreTree", "Verdict"]

VERDICTS_KEPT: Final = 16
BASES_KEPT: Final = 2
"""Of entries that may be as many as 10,000."""
READ_BYTES_MAX: Final = 64 * 1024 * 1024
"""At once from the store; formats read what they need in pieces."""


@dataclass(frozen=True, slots=True)
class _StoreView:
    """A stored file as formats see it (`FileView`)."""

    store: Store
    key: str
    size: int

    def read(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        length = min(length, self.size - offset)
        while length > 0:
            part = self.store.read(self.key, offset, min(length, READ_BYTES_MAX))
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)


class StoreTree:
    """Files of voted entries, read from the store (`Tree`)."""

    def __init__(self, store: Store, run: str, entries: Sequence[FileEntry]) -> None:
        self._store = store
        self._run = run
        self._entries = {entry.path: entry for entry in entries if entry.type is EntryType.FILE}

    def files(self) -> Mapping[str, int]:
        """Path to size in bytes."""
        return {path: entry.size for path, entry in self._entries.items()}

    def open(self, path: str) -> FileView:
        """The file's bytes. Raises MissingError."""
        entry = self._entries.get(path)
        if entry is None:
            msg = f"no file {path!r} in the votes"
            raise MissingError(msg, subject=path)
        return _StoreView(self._store, full_key(self._run, entry.key), entry.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the votes amount to.

    Attributes:
        entries: of the checkpoint, sorted by path.
        missing: what keeps it from being whole; empty if it is.
        format_name: of the framework, "" where none was recognised.
        world_size: as the checkpoint itself says, None where unknown.
        has_all_ranks: the format needs no rank's files of which it is unknown whether there are
            more.
    """

    entries: tuple[FileEntry, ...]
    missing: tuple[Missing, ...]
    format_name: str
    world_size: int | None
    has_all_ranks: bool = True


@dataclass(frozen=True, slots=True)
class _Known:
    votes: frozenset[tuple[str, int]]
    format_name: str
    expected: ExpectedSet | None
    problem: Missing | None


class Judge:
    """Says what is missing."""

    def __init__(self, *, store: Store, logs: RunLogs) -> None:
        self._store = store
        self._logs = logs
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._paths: OrderedDict[tuple[str, str], frozenset[str]] = OrderedDict()
        self._bases: OrderedDict[tuple[str, str], tuple[FileEntry, ...]] = OrderedDict()

    def assess(
        self,
        run: str,
        attempt: str,
        event: SealEvent,
        members: Mapping[str, Member],
        votes: Mapping[str, Vote],
        *,
        waiting: Mapping[str, int] = MappingProxyType({}),
    ) -> Verdict:
        """The verdict on these votes; *waiting* as in `closure`.

        Raises:
            TransientStoreError: the store did not answer.
            IntegrityError: the run's log or a manifest in it is damaged.
        """
        revised = next((vote.base for vote in votes.values() if vote.base), "")
        if revised and self._is_reclaimed(run, revised):
            gone = Missing(f"the checkpoint that it revises: {revised} was removed from the store")
            return Verdict(entries=(), missing=(gone,), format_name="", world_size=None)
        base = self._base(run, revised)
        entries, _ = merge_votes(votes, base)
        known = self._what_format(run, attempt, entries, votes)
        previous = None
        is_known = known.expected is not None and not known.expected.is_partial
        if not is_known and event is SealEvent.QUIESCENCE:
            previous = self._previous_paths(run)
        missing = closure(
            event=event,
            members=members,
            votes=votes,
            expected=known.expected,
            previous_paths=previous,
            base=base,
            waiting=waiting,
        )
        if known.problem is not None:
            missing = (*missing, known.problem)
        missing = (*missing, *foreign_bytes(attempt, entries, base))
        expected = known.expected
        return Verdict(
            entries=entries,
            missing=missing,
            format_name=known.format_name,
            world_size=expected.world_size if expected else None,
            has_all_ranks=expected is None
            or not (expected.every_rank or expected.rank_files)
            or known_world_size(expected, members, votes) is not None,
        )

    def _is_reclaimed(self, run: str, attempt: str) -> bool:
        def judge(state: RunState) -> bool:
            view = state.attempts.get(attempt)
            return view is not None and view.is_reclaimed

        return self._logs.get(run).look(judge)

    def half_rewritten(
        self,
        run: str,
        attempt: str,
        members: Mapping[str, Member],
        votes: Mapping[str, Vote],
        entries: Sequence[FileEntry],
    ) -> tuple[Missing, ...]:
        """What a revision that wrote some files of its base anew, after `assess`, left as it was.

        Names and an expected set prove nothing there: the base's files are in the place of those
        that are still to come.

        Raises:
            TransientStoreError, IntegrityError: as `assess`.
        """
        revised = next((vote.base for vote in votes.values() if vote.base), "")
        base = {entry.path: entry.key for entry in self._base(run, revised) if entry.key}
        expected = self._known[run, attempt].expected
        is_known = expected is not None and not expected.is_partial
        counted = set(base)
        if expected is not None and is_known:
            world_size = known_world_size(expected, members, votes)
            counted = set(expected.files) - stale_rank_files(expected, base, world_size)
        kept = [e.path for e in entries if e.path in counted and base.get(e.path) == e.key]
        anew = [e.path for e in entries if e.path in counted and base.get(e.path) != e.key]
        if not kept or not anew or (expected is not None and is_edited(anew, expected)):
            return ()
        what = f"{kept[0]!r} written anew, as {anew[0]!r} was: commit explicitly"
        return (Missing(what, "all writers"),)

    def _base(self, run: str, attempt: str) -> tuple[FileEntry, ...]:
        """The entries of the checkpoint that the votes are a revision of."""
        if not attempt:
            return ()
        key = (run, attempt)
        if key not in self._bases:
            manifest = self._logs.get(run).look(lambda state: state.attempts[attempt].manifest)
            self._bases[key] = load_manifest(self._store, run, attempt, manifest).entries
            while len(self._bases) > BASES_KEPT:
                self._bases.popitem(last=False)
        return self._bases[key]

    def _what_format(
        self,
        run: str,
        attempt: str,
        entries: Sequence[FileEntry],
        votes: Mapping[str, Vote],
    ) -> _Known:
        # A vote that isn't in the store yet (number 0 of our own) must not be taken for one.
        seen = frozenset((member, hash(vote.entries)) for member, vote in votes.items())
        known = self._known.get((run, attempt))
        if known is None or known.votes != seen:
            known = self._ask_format(run, attempt, entries, seen)
            self._known[run, attempt] = known
            while len(self._known) > VERDICTS_KEPT:
                self._known.popitem(last=False)
        return known

    def _ask_format(
        self,
        run: str,
        attempt: str,
        entries: Sequence[FileEntry],
        seen: frozenset[tuple[str, int]],
    ) -> _Known:
        tree = StoreTree(self._store, run, entries)
        found = registry.recognise(tree.files(), split_attempt_id(attempt)[0])
        if found is None:
            return _Known(seen, "", None, None)
        try:
            return _Known(seen, found.name, registry.expected(found, tree), None)
        except TransientStoreError:
            raise
        except CkptError as exc:
            # What should say which files there are is itself damaged.
            nothing = ExpectedSet(format_name=found.name, files={}, source=found.name)
            return _Known(seen, found.name, nothing, Missing(f"what {found.name} needs: {exc}"))

    def _previous_paths(self, run: str) -> frozenset[str] | None:
        """Paths of the run's newest committed checkpoint that is good, None if there is none."""

        def newest(state: RunState) -> tuple[str, str] | None:
            for name, attempt in reversed(state.current.items()):
                if name not in state.quarantined:
                    return attempt, state.attempts[attempt].manifest
            return None

        found = self._logs.get(run).look(newest)
        if found is None:
            return None
        key = (run, found[0])
        if key not in self._paths:
            manifest = load_manifest(self._store, run, *found)
            self._paths[key] = frozenset(entry.path for entry in manifest.entries)
            while len(self._paths) > VERDICTS_KEPT:
                self._paths.popitem(last=False)
        return self._paths[key]
