"""Stores that fail on plan: the n-th call, before or after its effect, or with the effect late.

A fault loop runs something with `FaultPlan(at=n)` for n = 1, 2, ... until a run meets no fault
(`plan.is_spent` stays false), and checks after each that a restart reaches the right state. Any
thread; calls are counted in the order in which they come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal, TypeAlias, TypeVar

from ckptgate.errors import CkptError, TransientStoreError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES, Manifest, PointerValue
from ckptgate.model.reclaim import Part
from ckptgate.ports.store import (
    DigestedFile,
    PlainEntry,
    Store,
    VerifyMode,
    Won,
    always,
    put_each,
    reclaim_each,
)

__all__ = ["MUTATIONS", "CrashError", "FaultPlan", "FaultyStore", "When"]

When: TypeAlias = Literal["before", "after", "both", "delay"]
_T = TypeVar("_T")

MUTATIONS: Final = frozenset({
    "create", "put", "publish", "unpublish", "set_pointer", "remove_pointer", "plain_put",
    "plain_mkdir", "plain_symlink", "plain_remove", "plain_rename", "reclaim", "tidy",
})  # fmt: skip
"""Calls that change the store."""


class CrashError(BaseException):
    """The process dies here; no `except Exception` survives it."""


class FaultPlan:
    """Which call fails, and how.

    Args:
        at: number of the call that fails, from 1 (0: none does).
        when: `before` its effect (the request got lost), `after` it (the reply got lost), `both`
            (this call before its effect and the next counted one after it), or `delay` (the request
            is on its way: the effect comes with `land()`, after other calls).
        error: what is raised; TransientStoreError where None. `CrashError` ends everything: each
            later call raises it too.
        calls: names of the calls that count; None counts all.
        is_lasting: all counted calls from *at* on fail (the store is away).
    """

    def __init__(
        self,
        *,
        at: int,
        when: When = "before",
        error: Callable[[], BaseException] | None = None,
        calls: frozenset[str] | None = None,
        is_lasting: bool = False,
    ) -> None:
        self.at = at
        self.when: When = when
        self.count = 0
        """Calls counted so far."""
        self.is_spent = False
        """Whether the fault has happened."""
        self.failed: list[str] = []
        """Names of the calls that failed."""
        self._error = error
        self._calls = calls
        self._is_lasting = is_lasting
        self._crash: CrashError | None = None
        self._late: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def run(self, name: str, call: Callable[[], _T]) -> _T:
        """Do *call* as the plan says."""
        when = self._choose(name)
        if when is None:
            return call()
        if when == "after":
            call()
        elif when == "delay":
            with self._lock:
                self._late.append(call)
        raise self._make_error(name)

    def land(self) -> None:
        """Let delayed requests arrive; what they raise has nobody to hear it."""
        with self._lock:
            late, self._late = self._late, []
        for call in late:
            try:
                call()
            except CkptError:
                continue

    def end(self) -> None:
        """The store is back: no more faults."""
        with self._lock:
            self._is_lasting = False
            self.at = 0
            self._crash = None

    def _choose(self, name: str) -> When | None:
        with self._lock:
            if self._crash is not None:
                raise self._crash
            if self._calls is not None and name not in self._calls:
                return None
            self.count += 1
            is_hit = self.at > 0 and (
                self.count == self.at or (self._is_lasting and self.count > self.at)
            )
            is_second = self.at > 0 and self.when == "both" and self.count == self.at + 1
            if not (is_hit or is_second):
                return None
            self.is_spent = True
            self.failed.append(name)
            if self.when == "both":
                return "after" if is_second else "before"
            return self.when

    def _make_error(self, name: str) -> BaseException:
        if self._error is None:
            return TransientStoreError(f"injected: no reply to {name}", subject=name)
        error = self._error()
        if isinstance(error, CrashError):
            with self._lock:
                self._crash = error
        return error


class FaultyStore:
    """A store whose calls go through a `FaultPlan`; everything else is the wrapped store's."""

    def __init__(self, store: Store, plan: FaultPlan) -> None:
        self._store = store
        self.plan = plan

    def create(self, key: str, data: bytes) -> None:
        self.plan.run("create", lambda: self._store.create(key, data))

    def get(self, key: str, *, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        return self.plan.run("get", lambda: self._store.get(key, limit=limit))

    def children(self, prefix: str) -> list[str]:
        return self.plan.run("children", lambda: self._store.children(prefix))

    def put(self, key: str, source: DigestedFile) -> None:
        self.plan.run("put", lambda: self._store.put(key, source))

    def verify(self, key: str, source: DigestedFile, mode: VerifyMode) -> None:
        self.plan.run("verify", lambda: self._store.verify(key, source, mode))

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        return put_each(self, files, mode)

    def read(self, key: str, offset: int, length: int) -> bytes:
        return self.plan.run("read", lambda: self._store.read(key, offset, length))

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        return self.plan.run("read", lambda: self._store.read_into(key, offset, view))

    def local_path(self, key: str) -> str | None:
        return self._store.local_path(key)

    def publish(
        self,
        run: str,
        manifest: Manifest,
        manifest_bytes: bytes,
        *,
        is_due: Callable[[], bool] = always,
    ) -> None:
        self.plan.run(
            "publish",
            lambda: self._store.publish(run, manifest, manifest_bytes, is_due=is_due),
        )

    def published_attempt(self, run: str, name: str) -> str:
        return self.plan.run("published_attempt", lambda: self._store.published_attempt(run, name))

    def published_problems(self, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
        return self.plan.run(
            "published_problems",
            lambda: self._store.published_problems(run, manifest, manifest_bytes),
        )

    def unpublish(self, run: str, name: str, attempt: str) -> None:
        self.plan.run("unpublish", lambda: self._store.unpublish(run, name, attempt))

    def set_pointer(self, run: str, value: PointerValue) -> None:
        self.plan.run("set_pointer", lambda: self._store.set_pointer(run, value))

    def remove_pointer(self, run: str, pointer: str) -> None:
        self.plan.run("remove_pointer", lambda: self._store.remove_pointer(run, pointer))

    def pointer_content(self, run: str, pointer: str) -> str | None:
        return self.plan.run("pointer_content", lambda: self._store.pointer_content(run, pointer))

    def lock_run(self, run: str) -> AbstractContextManager[None]:
        return self._store.lock_run(run)

    def plain_stat(self, path: str) -> PlainEntry:
        return self.plan.run("plain_stat", lambda: self._store.plain_stat(path))

    def plain_list(self, path: str) -> list[PlainEntry]:
        return self.plan.run("plain_list", lambda: self._store.plain_list(path))

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        return self.plan.run("plain_read", lambda: self._store.plain_read(path, offset, length))

    def plain_put(self, path: str, source: str, *, mode: int, mtime_ns: int) -> None:
        self.plan.run(
            "plain_put",
            lambda: self._store.plain_put(path, source, mode=mode, mtime_ns=mtime_ns),
        )

    def plain_mkdir(self, path: str, mode: int) -> None:
        self.plan.run("plain_mkdir", lambda: self._store.plain_mkdir(path, mode))

    def plain_symlink(self, path: str, target: str) -> None:
        self.plan.run("plain_symlink", lambda: self._store.plain_symlink(path, target))

    def plain_remove(self, path: str, *, is_dir: bool) -> None:
        self.plan.run("plain_remove", lambda: self._store.plain_remove(path, is_dir=is_dir))

    def plain_rename(self, old: str, new: str) -> None:
        self.plan.run("plain_rename", lambda: self._store.plain_rename(old, new))

    def attempt_parts(self, run: str, attempt: str) -> list[Part]:
        return self.plan.run("attempt_parts", lambda: self._store.attempt_parts(run, attempt))

    def unfinished(self, directory: str) -> list[Part]:
        return self.plan.run("unfinished", lambda: self._store.unfinished(directory))

    def reclaim(self, run: str, part: Part) -> int:
        return self.plan.run("reclaim", lambda: self._store.reclaim(run, part))

    def reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        return reclaim_each(self, run, parts)

    def tidy(self, run: str, attempt: str) -> None:
        self.plan.run("tidy", lambda: self._store.tidy(run, attempt))

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def default_verify(self) -> VerifyMode:
        return self._store.default_verify

    @property
    def verify_modes(self) -> frozenset[VerifyMode]:
        return self._store.verify_modes

    def probe(self) -> None:
        self.plan.run("probe", self._store.probe)

    def close(self) -> None:
        self._store.close()
