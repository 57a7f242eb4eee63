"""What all parts of the vfs share: ports, settings, and the state that is only in memory.

Owns two rules. A mutation first does all that may block, then opens its transaction with
`Context.change()`: so no caller ever waits for the store or a decision with the spool's write lock
held. And a `RenewedError` (ESTALE: look again) keeps the changes made before it, every other error
undoes them. Any thread; `lock` guards the fields that are dictionaries and sets.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

from ckptgate.errors import CkptError, TransientStoreError, WouldBlockError
from ckptgate.model.jobkey import JobKey, JobKind
from ckptgate.model.kinds import NamePatterns
from ckptgate.ports.catalog import Catalog, Invalidations, RunView, Waker
from ckptgate.ports.clock import Clock
from ckptgate.ports.spool import BEGAN_META, HandleRow, NodeRow, Spool
from ckptgate.vfs.closing import Closes, NotedClose
from ckptgate.vfs.identify import Identify, ProcessInfo
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.late import LateRows
from ckptgate.vfs.memory import Memory
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.who import Who

__all__ = ["TAKEOVER", "Context", "MeanwhileError", "RenewedError", "Who", "stale"]

TAKEOVER = "takeover"
"""What `is_due` asks of: when this process took a kernel session over."""

_log = logging.getLogger(__name__)
_WHOS_MAX = 4096
_TRIES_MAX = 8
_T = TypeVar("_T")


class RenewedError(CkptError):
    """The name has a new node now: the kernel is to look it up again (once)."""

    errno_value = errno.ESTALE


class MeanwhileError(CkptError):
    """What the call had found isn't so any more when its change begins: it is done once more."""

    errno_value = errno.ESTALE


def stale(subject: str, why: str) -> CkptError:
    """The error for a node that no longer is what its name means."""
    return CkptError(f"{subject!r}: {why}", subject=subject, errno_value=errno.ESTALE)


class _Scope(threading.local):
    """The mutation that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.transaction: AbstractContextManager[None] | None = None
        self.after: list[Callable[[], None]] = []
        self.expected: list[Callable[[], None]] = []
        self.taken: list[NotedClose] = []


class _Atomic:
    """What `Context.atomic` and `Context.change` give; it keeps nothing itself."""

    __slots__ = ("_ctx", "_is_change")

    def __init__(self, ctx: Context, *, is_change: bool) -> None:
        self._ctx = ctx
        self._is_change = is_change

    def __enter__(self) -> None:
        self._ctx.enter(is_change=self._is_change)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ctx.leave(error)


class Context:
    """See the module."""

    def __init__(
        self,
        *,
        spool: Spool,
        catalog: Catalog,
        waker: Waker,
        clock: Clock,
        patterns: NamePatterns,
        identify: Identify,
        settings: VfsSettings,
        invalidations: Invalidations | None,
    ) -> None:
        self.spool = spool
        self.catalog = catalog
        self.waker = waker
        self.clock = clock
        self.patterns = patterns
        self.identify = identify
        self.settings = settings
        self.invalidations = invalidations
        self.closes = Closes(spool)
        self.take_close_over: Callable[[NotedClose], None] = lambda _: None
        """Set by who knows what a close means."""
        self.late = LateRows(self._add_handles)
        self.lock = threading.RLock()
        """Of `memory`. Who holds it asks nothing of the spool, unless in a change."""
        self.memory = Memory()
        self._scope = _Scope()
        self._atomic = _Atomic(self, is_change=False)
        self._change = _Atomic(self, is_change=True)
        self._whos: dict[int, tuple[ProcessInfo, Who]] = {}

    def atomic(self) -> AbstractContextManager[None]:
        """One transaction, begun by the first `change()` inside."""
        return self._atomic

    def change(self) -> AbstractContextManager[None]:
        """Mutations of the spool; nothing inside may block."""
        return self._change

    def enter(self, *, is_change: bool) -> None:
        """Begin, or join what is begun; for the context managers only."""
        scope = self._scope
        if is_change and scope.transaction is None:
            transaction = self.spool.transaction()
            transaction.__enter__()
            scope.transaction = transaction
            scope.depth += 1
            try:
                self._take_closes_over()
                for check in scope.expected:
                    check()
            except BaseException as exc:
                self._give_up(transaction, exc)
                raise
            return
        scope.depth += 1

    def _give_up(self, transaction: AbstractContextManager[None], error: BaseException) -> None:
        """End a transaction that was just begun: an atomic around it may begin another one."""
        scope = self._scope
        scope.depth -= 1
        scope.transaction = None
        scope.expected = []
        taken, scope.taken = scope.taken, []
        if not scope.depth:
            scope.after = []
        try:
            transaction.__exit__(type(error), error, None)
        finally:
            self._undone(taken)

    def leave(self, error: BaseException | None) -> None:
        """End; the outermost commits or undoes. For the context managers only."""
        scope = self._scope
        scope.depth -= 1
        if scope.depth:
            return
        transaction, scope.transaction = scope.transaction, None
        after, scope.after = scope.after, []
        scope.expected = []
        taken, scope.taken = scope.taken, []
        is_kept = error is None or isinstance(error, RenewedError)
        if transaction is not None:
            try:
                if error is None or is_kept:
                    transaction.__exit__(None, None, None)
                    self.closes.done(taken)
                else:
                    transaction.__exit__(type(error), error, None)
                    self._undone(taken)
            except BaseException:
                self._undone(taken)
                raise
        if is_kept:
            for call in after:
                call()

    def _take_closes_over(self) -> None:
        """Everything that is noted, before anything else is changed."""
        taken = self.closes.take()
        if taken:
            self._scope.taken = taken
            for item in taken:
                self.take_close_over(item)

    def _add_handles(self, rows: list[HandleRow]) -> None:
        """Of those that are open; a release comes later than this, or was before it."""
        with self.change():
            for row in rows:
                if self.memory.files.get(row.fh) is not None:
                    self.spool.add_handle(row)

    def until_steady(self, call: Callable[[], _T]) -> _T:
        """What *call* gives, as one transaction; it is done anew while others come in between.

        ESTALE would do so too, but the kernel listens to that only once: and what the call finds
        then, a committed file, may need it.
        """
        with self.atomic():
            for _ in range(_TRIES_MAX - 1):
                try:
                    return call()
                except MeanwhileError:
                    continue
            return call()

    def apply_closes(self) -> None:
        """Have nothing noted any more: what follows looks at states that a close changes."""
        if self.closes.has_any():
            with self.change():
                pass

    def _undone(self, taken: list[NotedClose]) -> None:
        """What was kept in memory of rows that are now rolled back; it is read again."""
        self.closes.give_back(taken)
        with self.lock:
            self.memory.clones.clear()
            self.memory.writers.clear()
            self.memory.forgotten += 1
            self.memory.touched.clear()
            self.memory.wholeness.clear()

    @contextlib.contextmanager
    def taking_over(self) -> Generator[None]:
        """Bring rows in line with what is already so elsewhere: right whatever the call does.

        Unlike a `change` it is committed at once, unless a change is begun: resolving one name
        must not keep the same call from asking the store about another.
        """
        scope = self._scope
        if scope.transaction is not None or not scope.depth:
            with self.change():
                yield
            return
        saved = scope.depth, scope.after, scope.expected
        scope.depth, scope.after, scope.expected = 0, [], []
        try:
            with self.change():
                yield
        finally:
            scope.depth, scope.after, scope.expected = saved

    def expect(self, check: Callable[[], None]) -> None:
        """Have this checked again when the change begins: by then it may no longer be so."""
        scope = self._scope
        if scope.depth and scope.transaction is None:
            scope.expected.append(check)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Do this once the present change is committed."""
        if not self._scope.depth:
            call()
        elif call not in self._scope.after:
            self._scope.after.append(call)

    def wake(self) -> None:
        """Tell the publisher, once the present change is committed."""
        self.afterwards(self.waker.wake)

    def invalidate(self, parent: int, name: str) -> None:
        """Tell the kernel that a name changed its meaning, once the change is committed."""
        told = self.invalidations
        if told is not None:
            self.afterwards(lambda: told.name(parent, name))

    def need_block(self, caller: Caller) -> None:
        """What follows may touch the store or wait."""
        assert self._scope.transaction is None, "blocks in a change"
        if not caller.may_block:
            msg = "this needs the store or has to wait"
            raise WouldBlockError(msg)

    def who(self, caller: Caller) -> Who:
        """The caller's incarnation."""
        return self.who_of(self.identify.process(caller.pid))

    def who_of(self, process: ProcessInfo) -> Who:
        """The incarnation of a process; kept as long as the process is the same."""
        known = self._whos.get(process.pid)
        if known is not None and known[0] is process:
            return known[1]
        key = process.job_key
        if key.kind is JobKind.OUTSIDE and self.settings.default_job_key:
            key = JobKey.parse(self.settings.default_job_key)
        who = Who(
            key=str(key),
            is_shared=key.is_shared,
            pid=process.pid,
            start=process.start,
            rank=process.rank.rank,
            world_size=process.rank.world_size,
        )
        with self.lock:
            if who.is_shared and who.pid:
                self.memory.callers.setdefault(who.key, set()).add((who.pid, who.start))
            if len(self._whos) >= _WHOS_MAX:
                self._whos.clear()
            self._whos[process.pid] = process, who
        return who

    def node(self, ino: int) -> NodeRow:
        """The node; ESTALE if it is gone."""
        node = self.spool.node(ino)
        if node is None:
            msg = "this node is gone"
            raise stale(f"node {ino}", msg)
        return node

    def steadily(self, find: Callable[[], _T | None]) -> _T | None:
        """What *find* finds from several rows; again if it found nothing while one changed.

        A name that is there all along may have gone from one of them to another meanwhile.
        """
        for _ in range(_TRIES_MAX):
            version = self.spool.version()
            try:
                found = find()
            except CkptError as exc:
                is_last = self.spool.version() == version
                if exc.errno not in {errno.ENOENT, errno.ESTALE} or is_last:
                    raise
                continue
            if found is not None or self.spool.version() == version:
                return found
        return find()

    def view(self, caller: Caller, run: str, *, max_age_s: float | None = None) -> RunView:
        """The run as its log says, at most a moment old."""
        age = self.settings.view_age_s if max_age_s is None else max_age_s
        if not self.catalog.is_fresh(run, age):
            self.need_block(caller)
        return self.catalog.view(run, age)

    def note_began(self, run: str, attempt: int) -> None:
        """Note which incarnations are known of at the begin of an attempt; inside a change."""
        if self.catalog.is_fresh(run, math.inf):
            generation = self.catalog.view(run, math.inf).generation
            self.spool.set_meta(BEGAN_META.format(attempt=attempt), str(generation))

    def is_due(self, what: object, interval_s: float) -> bool:
        """Whether *what* was last done longer than *interval_s* ago; notes nothing."""
        last = self.memory.moments.get(what)
        return last is None or self.clock.monotonic() - last >= interval_s

    def done_now(self, what: object) -> None:
        """*what* was done just now."""
        with self.lock:
            if len(self.memory.moments) > 100_000:
                self.memory.moments.clear()
            self.memory.moments[what] = self.clock.monotonic()

    def store_is_away(self, exc: TransientStoreError, what: str) -> None:
        """Note that the store did not answer and the call goes on without it."""
        if self.is_due("store-away", 10.0):
            self.done_now("store-away")
            _log.warning("store-away doing=%s error=%s", what, exc)
