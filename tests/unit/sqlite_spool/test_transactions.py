"""Transactions of the spool, and what it keeps of settings and replies."""

from __future__ import annotations

import os
import sqlite3
import threading
import time

import pytest

from ckptgate.errors import (
    BusyError,
    MissingError,
    RefusedError,
    UnusableError,
    UsageError,
)
from ckptgate.model.states import AttemptState, FileState
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.sqlite_spool.connection import WAL_BYTES_MAX
from ckptgate_adapters.sqlite_spool.failures import from_sqlite
from ckptgate_adapters.sqlite_spool.settings import REPLIES_KEPT


def test_an_exception_rolls_everything_back(spool):
    with pytest.raises(ZeroDivisionError), spool.transaction():
        spool.set_meta("a", "1")
        with spool.transaction():
            spool.set_meta("b", "1")
        raise ZeroDivisionError
    assert spool.get_meta("a") is None
    assert spool.get_meta("b") is None


def test_an_inner_transaction_that_fails_is_undone_by_itself_if_its_exception_is_handled(spool):
    with spool.transaction():
        spool.set_meta("a", "1")
        with pytest.raises(ZeroDivisionError), spool.transaction():
            spool.set_meta("a", "2")
            spool.set_meta("b", "1")
            raise ZeroDivisionError
        spool.set_meta("c", "1")
    assert [spool.get_meta(key) for key in "abc"] == ["1", None, "1"]


def test_a_refused_call_leaves_its_transaction_usable(spool):
    file = spool.add_file()
    with spool.transaction():
        spool.set_meta("a", "1")
        with pytest.raises(RefusedError):
            spool.update_file(file.file, state=FileState.STORED, size=7)
        with pytest.raises(MissingError):
            spool.update_attempt(99, state=AttemptState.SEALED)
        spool.set_meta("b", "1")
    assert spool.get_meta("a") == spool.get_meta("b") == "1"
    assert spool.file(file.file) == file


def test_other_threads_wait_for_a_transaction_and_then_see_all_of_it(spool):
    inside, seen = threading.Event(), []

    def read() -> None:
        inside.wait(10)
        seen.append((spool.get_meta("a"), spool.get_meta("b")))

    thread = threading.Thread(target=read)
    thread.start()
    with spool.transaction():
        spool.set_meta("a", "1")
        inside.set()
        thread.join(0.05)
        assert not seen
        spool.set_meta("b", "1")
    thread.join(10)
    assert seen == [("1", "1")]


def test_threads_lose_no_increment(spool):
    spool.set_meta("n", "0")

    def add() -> None:
        for _ in range(100):
            with spool.transaction():
                spool.set_meta("n", str(int(spool.get_meta("n") or 0) + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spool.get_meta("n") == "400"


def test_a_database_that_another_holds_for_too_long_is_busy(spool, monkeypatch):
    other = SqliteSpool.attach(spool.path)
    other._db.waits.timeout_s = 0.02
    with spool.transaction():
        with (
            pytest.raises(BusyError, match=f"in use by process {os.getpid()} "),
            other.transaction(),
        ):
            pass
        with pytest.raises(BusyError):
            other.set_meta("a", "b")
        assert other.get_meta("member") == spool.get_meta("member")
    with other.transaction():
        other.set_meta("a", "b")
    other.close()


def test_while_another_process_has_the_write_lock_other_threads_go_on_reading(spool):
    """An operator's transaction, or a slow publisher's, must not make the mount stand still."""
    spool.set_meta("a", "1")
    other = SqliteSpool.attach(spool.path)
    done: list[str] = []

    def change(key: str) -> None:
        # As a part of a node number's block: with the lock held already.
        with other._db.lock:
            other.set_meta(key, "2")
        done.append(key)

    with spool.transaction():
        spool.set_meta("a", "9")
        threads = [threading.Thread(target=change, args=(key,)) for key in "bcd"]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while not other._db.waits.is_looking:
            assert time.monotonic() < deadline, "nobody waits for the lock"
        for _ in range(50):
            assert other.get_meta("a") == "1"
            assert other.node(1) is not None
            assert other.attempts() == []
        assert not done
    for thread in threads:
        thread.join(10)
    assert sorted(done) == ["b", "c", "d"]
    assert [other.get_meta(key) for key in "abcd"] == ["9", "2", "2", "2"]
    other.close()


def test_reading_waits_for_who_has_all_of_the_database(spool):
    other = SqliteSpool.attach(spool.path)
    spool.set_meta("a", "1")
    held = sqlite3.connect(spool._db.path, isolation_level=None)
    other._db.waits.timeout_s = 10
    calls = []

    def busy_once(sql, values=()):
        calls.append(sql)
        if len(calls) < 3:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        return held.execute(sql, values)

    real = other._db._connection
    other._db._connection = type("Busy", (), {"execute": staticmethod(busy_once)})()
    assert other.get_meta("a") == "1"
    assert len(calls) == 3
    other._db._connection = real
    held.close()
    other.close()


def test_a_transaction_that_sqlite_rolled_back_takes_no_more_statements(spool):
    """I11: they would be committed one by one."""
    spool._db._connection.execute(
        "CREATE TRIGGER t BEFORE INSERT ON runs BEGIN SELECT raise(rollback, 'x'); END"
    )
    with pytest.raises(UsageError), spool.transaction():
        spool.set_meta("a", "1")
        with pytest.raises(UsageError):
            spool.watch_run("r")
        with pytest.raises(UsageError):
            spool.set_meta("b", "1")
    assert spool.get_meta("a") is None
    assert spool.get_meta("b") is None
    with spool.transaction():
        spool.set_meta("c", "1")
    assert spool.get_meta("c") == "1"


def test_make_durable_syncs_the_journal_and_once_the_directory(spool, monkeypatch):
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    spool.set_meta("a", "1")
    spool.make_durable()
    spool.make_durable()
    wal = spool.path + "/spool.db-wal"
    assert synced == [wal, spool.path, wal]


def test_make_durable_does_not_wait_for_a_transaction(spool):
    done = []
    with spool.transaction():
        spool.set_meta("a", "1")
        thread = threading.Thread(target=lambda: done.append(spool.make_durable()))
        thread.start()
        thread.join(10)
        assert done == [None]


def test_make_durable_moves_a_long_journal_into_the_database(spool):
    before = os.stat(spool.path + "/spool.db").st_size
    for i in range(20):
        spool.remember_reply(i, os.urandom(WAL_BYTES_MAX // 18))
    assert os.stat(spool.path + "/spool.db-wal").st_size > WAL_BYTES_MAX
    spool.make_durable()
    assert os.stat(spool.path + "/spool.db").st_size > before + WAL_BYTES_MAX
    spool.set_meta("a", "1")
    assert os.stat(spool.path + "/spool.db-wal").st_size <= WAL_BYTES_MAX


def test_a_failed_fsync_is_never_forgotten(spool, monkeypatch):
    """I11: the kernel drops what it could not write, so a later success proves nothing."""
    spool.set_meta("a", "1")

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UnusableError, match="cannot fsync the spool's journal"):
            spool.make_durable()
    with pytest.raises(UnusableError, match="fsync"):
        spool.make_durable()


def test_errors_of_sqlite_are_told_by_their_code(tmp_path):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    found = from_sqlite(error, str(tmp_path / "spool.db"))
    assert isinstance(found, UnusableError)
    assert str(tmp_path) in found.message
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY_DBMOVED
    assert "cannot be written" in from_sqlite(error, "/x/spool.db").message
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN_ISDIR
    assert "cannot be opened" in from_sqlite(error, "/x/spool.db").message


def test_replies_are_kept_by_request_and_cleared(spool):
    big = (1 << 63) + 4
    spool.remember_reply(2, b"two")
    spool.remember_reply(big, b"resent")
    spool.remember_reply(2, b"again")
    assert spool.remembered_reply(2) == b"again"
    assert spool.remembered_reply(big) == b"resent"
    assert spool.remembered_reply((1 << 64) - 1) is None
    spool.clear_replies()
    assert spool.remembered_reply(2) is None


def test_only_the_newest_replies_are_kept(spool):
    total = 3 * REPLIES_KEPT
    with spool.transaction():
        for i in range(total):
            spool.remember_reply(total - i, b"r")
    assert all(spool.remembered_reply(i) for i in range(1, REPLIES_KEPT + 1))
    (count,) = spool._db.one("SELECT count(*) FROM replies") or (0,)
    assert REPLIES_KEPT <= count <= REPLIES_KEPT + 256
