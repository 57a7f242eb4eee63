"""The n-th statement or file-system call of a save fails, or is the last one, for every n.

Name space, spool and publisher are the real ones, in one process (`gateway_harness`). What fails is
told to its caller, who tries again as a trainer would; what dies is begun anew, and its request is
sent again. The end is always that of the save without a fault.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway_harness import Gateway
from tests.saving_trainer import Plan, whole_save

import ckptgate.engine.digest
import ckptgate.engine.staging
import ckptgate.vfs.attributes
import ckptgate.vfs.bytes
import ckptgate.vfs.files
import ckptgate.vfs.handles
import ckptgate.vfs.mutate
import ckptgate.vfs.syncing
import ckptgate.vfs.writing
from ckptgate.testing.faults import CrashError
from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.sqlite_spool import SqliteSpool

SAMPLES = 4


class Connection:
    """A connection to the database whose statements go through a plan."""

    def __init__(self, real: Any, plan: Plan, *, undoes: bool) -> None:
        self._real = real
        self._plan = plan
        self._undoes = undoes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, sql: str, values: Any = ()) -> Any:
        call = lambda: self._real.execute(sql, values)  # noqa: E731
        if sql.startswith("ROLLBACK"):
            return call()
        return self._plan.run(sql, call, self._undo)

    def _undo(self) -> None:
        """SQLite may roll a transaction back by itself when a statement fails."""
        if self._undoes and self._real.in_transaction:
            self._real.execute("ROLLBACK")


def sqlite_error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


STATEMENT_ERRORS = {
    "full": lambda: sqlite_error("database or disk is full", sqlite3.SQLITE_FULL),
    "io": lambda: sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR),
    "locked": lambda: sqlite_error("database is locked", sqlite3.SQLITE_BUSY),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = whole_save(tmp_path_factory.mktemp("reference"), lambda gateway: None, None)
    assert found["committed"] == {"step-1": {"a.bin": b"d" * 2000, "deep/c.bin": b"c" * 4000}}
    assert found["failures"] == 0
    return found


def every(base: Path, make: Callable[[int], tuple[Plan, Callable[[Gateway], None]]], step: int):
    """Run with the fault at each *step*-th call until there is no such call any more."""
    at = 1
    while True:
        place = base / str(at)
        place.mkdir()
        plan, wrap = make(at)
        yield plan, whole_save(place, wrap, plan)
        if not plan.hit:
            return
        at += step


def into(half: str, plan: Plan, *, undoes: bool = False) -> Callable[[Gateway], None]:
    def wrap(gateway: Gateway) -> None:
        database = getattr(gateway, half).spool._db
        database._connection = Connection(database._connection, plan, undoes=undoes)

    return wrap


def check_statements(base: Path, half: str, kind: str, reference: Any, step: int, undoes: bool):
    count = 0

    def make(at: int) -> tuple[Plan, Callable[[Gateway], None]]:
        plan = Plan(at, STATEMENT_ERRORS[kind], is_after=False)
        return plan, into(half, plan, undoes=undoes)

    for plan, found in every(base, make, step):
        found["failures"] = 0
        assert found == reference, (plan.at, plan.hit)
        count += 1
    return count


def count_of(base: Path, half: str) -> int:
    plan = Plan(0, CrashError, is_after=False)
    whole_save(base, into(half, plan), plan)
    return plan.count


@pytest.mark.parametrize("half", ["mount", "engine"])
@pytest.mark.parametrize("kind", ["full", "io"])
def test_statements_that_fail_are_told_and_change_nothing(tmp_path, reference, half, kind):
    """I10, I11: of a sample of all statements."""
    (tmp_path / "count").mkdir()
    step = max(1, count_of(tmp_path / "count", half) // SAMPLES)
    assert check_statements(tmp_path, half, kind, reference, step, kind == "full") > SAMPLES // 2


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("undoes", [False, True], ids=["statement", "transaction"])
@pytest.mark.parametrize("half", ["mount", "engine"])
@pytest.mark.parametrize("kind", ["full", "io", "locked"])
def test_any_statement_may_fail(tmp_path, reference, half, kind, undoes):
    """I10, I11: for every n."""
    assert check_statements(tmp_path, half, kind, reference, 1, undoes) > 20


def check_crashes(base: Path, half: str, reference: Any, step: int, is_after: bool) -> int:
    count = 0

    def make(at: int) -> tuple[Plan, Callable[[Gateway], None]]:
        plan = Plan(at, CrashError, is_after=is_after)
        plan.is_lasting = True
        return plan, into(half, plan)

    for plan, found in every(base, make, step):
        assert found == reference, (plan.at, plan.hit)
        count += 1
    return count


@pytest.mark.parametrize("half", ["mount", "engine"])
def test_processes_that_die_in_a_statement_are_noticed_by_nobody(tmp_path, reference, half):
    """I10, I11: of a sample of all statements."""
    (tmp_path / "count").mkdir()
    step = max(1, count_of(tmp_path / "count", half) // SAMPLES)
    assert check_crashes(tmp_path, half, reference, step, is_after=True) > SAMPLES // 2


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("half", ["mount", "engine"])
def test_the_process_may_die_in_any_statement(tmp_path, reference, half, is_after):
    """I10, I11: for every n."""
    assert check_crashes(tmp_path, half, reference, 1, is_after) > 20


# File-system calls

MODULES = {
    "mount": (
        ckptgate.vfs.attributes,
        ckptgate.vfs.bytes,
        ckptgate.vfs.files,
        ckptgate.vfs.handles,
        ckptgate.vfs.mutate,
        ckptgate.vfs.syncing,
        ckptgate.vfs.writing,
    ),
    "engine": (ckptgate.engine.digest, ckptgate.engine.staging),
}
CALLS = {
    "mount": frozenset({
        "open", "stat", "fstat", "unlink", "truncate", "ftruncate", "fsync", "fdatasync", "pread",
        "copy_file_range", "dup2", "utime",
    }),
    # An fsync that fails under a digest is final (see `test_a_failed_fsync_...`).
    "engine": frozenset({"open", "stat", "fstat", "pread", "preadv", "lseek"}),
}  # fmt: skip


class Os(types.ModuleType):
    """The `os` module, with some calls going through a plan."""

    def __init__(self, plan: Plan, calls: frozenset[str]) -> None:
        super().__init__("os")
        self._plan = plan
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._calls:
            return real
        return lambda *words, **more: self._plan.run(
            name, lambda: real(*words, **more), lambda: None
        )


@contextlib.contextmanager
def failing_calls(half: str, plan: Plan) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES[half]:
            if hasattr(module, "os"):
                patch.setattr(module, "os", Os(plan, CALLS[half]))
        yield


def check_calls(base: Path, half: str, number: int, reference: Any, step: int) -> int:
    at, count = 1, 0
    while True:
        plan = Plan(at, lambda: OSError(number, os.strerror(number)), is_after=False)
        (base / str(at)).mkdir()
        with failing_calls(half, plan):
            found = whole_save(base / str(at), lambda gateway: None, plan)
        found["failures"] = 0
        assert found == reference, (plan.at, plan.hit)
        if not plan.hit:
            return count
        count += 1
        at += step


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("half", ["mount", "engine"])
def test_file_system_calls_that_fail_are_told_and_change_nothing(tmp_path, reference, half, number):
    """I10, I11: a sample of the calls on the spool's file system."""
    assert check_calls(tmp_path, half, number, reference, 19) >= 1


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("half", ["mount", "engine"])
def test_any_file_system_call_may_fail(tmp_path, reference, half, number):
    """I10, I11: for every n."""
    assert check_calls(tmp_path, half, number, reference, 1) > 10


def test_the_spool_of_the_harness_is_the_real_one(tmp_path):
    gateway = Gateway(tmp_path / "spool", MemoryStore())
    assert isinstance(gateway.mount.spool, SqliteSpool)
    assert gateway.mount.spool is not gateway.engine.spool
    gateway.close()
