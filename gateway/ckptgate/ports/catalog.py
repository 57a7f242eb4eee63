"""What the name space (`vfs`) asks of the engine, and how the two processes wake each other.

The engine implements `Catalog`; the composition root hands it to the vfs, so that neither imports
the other. All calls may block on the store: the vfs makes them only for callers that may block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ckptgate.model.documents import PointerValue
from ckptgate.ports.spool import AttemptRow
from ckptgate.ports.store import PlainEntry

__all__ = ["Catalog", "Invalidations", "RunView", "Waker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as its log says, without the history.

    Attributes:
        run: path in the store.
        length: entries folded.
        committed: checkpoint name -> attempt id that it is now (not retired, not quarantined).
        names: every name that the log ever gave to an attempt: the store's directory of that name
            is never shown raw.
        pointers: pointer name -> value, among them the gateway's own `latest`.
        undecided: attempt ids that are sealed and neither committed nor aborted.
        generation: of the newest incarnation, 0 before the first.
        newest: names of the committed ones, the newest first: what is to be resumed from. As they
            were sealed, but for one that a later entry of the log has set `latest` to.
    """

    run: str
    length: int
    committed: Mapping[str, str]
    names: frozenset[str]
    pointers: Mapping[str, PointerValue]
    undecided: tuple[str, ...]
    generation: int = 0
    newest: tuple[str, ...] = ()


class Catalog(Protocol):
    """The store's state for the vfs. Any thread; may block; errors as in the store's contract."""

    def is_fresh(self, run: str, max_age_s: float) -> bool:
        """Whether `view(run, max_age_s)` would answer from memory; never blocks."""
        ...

    def view(self, run: str, max_age_s: float) -> RunView:
        """The run's state, read from the store if the known one is older than *max_age_s*.

        A directory without a log has an empty view. With the store away, the last known view, or
        TransientStoreError where there is none.
        """
        ...

    def materialise(self, run: str, run_ino: int, name: str) -> AttemptRow:
        """Put the committed checkpoint's root into the spool (once) and return its attempt.

        Of one that is read only here its manifest isn't read yet: see `fill`. What this node has of
        its own becomes what the manifest says; local files whose digest is the manifest's are kept.

        Raises:
            MissingError: not committed.
            IntegrityError: as `fill`.
        """
        ...

    def fill(self, attempt: int) -> None:
        """Put the tree below a committed root into the spool (once), before it is looked into.

        Files have no bytes here yet (`LocalBytes.NONE`).

        Raises:
            IntegrityError: the manifest is torn, edited or hostile, or isn't the one that the
                COMMIT names.
        """
        ...

    def find_open(self, run: str, run_ino: int, name: str, job_key: str) -> AttemptRow | None:
        """An open attempt at *name* that other members of the same (shared) job have begun.

        If there is one it is joined: the row is in the spool on return.
        """
        ...

    def has_others(self, attempt: int) -> bool:
        """Whether other members are registered in a joined attempt; asks the store."""
        ...

    def refresh_shared(self, attempt: int) -> bool:
        """Take over directories and closed, stored files of the attempt's other members.

        Returns True if anything new is in the spool's tree.
        """
        ...

    def fetch(self, file: int, offset: int, length: int) -> None:
        """Have the chunks that cover this range in the spool file, each verified before.

        Raises:
            IntegrityError: a chunk's digest differs; an event names the file and chunk.
        """
        ...

    def is_fetched(self, file: int, offset: int, length: int) -> bool:
        """Whether `fetch` has nothing to do; never blocks on the store."""
        ...

    def read_ahead(self, file: int, offset: int, length: int) -> None:
        """Somebody reads this range of a file that isn't whole here: have what follows on its way.

        Never blocks and never fails.
        """
        ...

    def is_local(self, file: int) -> bool:
        """Whether all bytes are in the spool file, unchanged since they were verified.

        A copy that was changed is let go: its spool file loses its name, and `fetch` makes a new
        one. Never blocks on the store.
        """
        ...

    def plain_stat(self, path: str) -> PlainEntry | None:
        """A plain name in the store, None if there is none (fresh)."""
        ...

    def plain_list(self, path: str) -> list[PlainEntry]:
        """A plain directory in the store; empty if there is none."""
        ...

    def plain_fetch(self, path: str, file: int) -> None:
        """Copy a plain file of the store into the spool file *file* (to be appended to)."""
        ...

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a plain file in the store."""
        ...


class Waker(Protocol):
    """How the mount tells the publisher that there is work. Any thread; never blocks or fails."""

    def wake(self) -> None:
        """There is something to do."""
        ...


class Invalidations(Protocol):
    """How the engine tells the mount what the kernel must forget. Never blocks or fails."""

    def name(self, parent: int, name: str) -> None:
        """What this name means has changed."""
        ...

    def node(self, ino: int) -> None:
        """Attributes or content of a node have changed."""
        ...
