"""The spool on SQLite: every call of the port, transactions, opening, and bad input."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ckptgate.errors import (
    BusyError,
    ExistsError,
    FormatVersionError,
    FullError,
    IntegrityError,
    InvalidNameError,
    MissingError,
    RefusedError,
    UnusableError,
    UsageError,
)
from ckptgate.model.documents import Evidence
from ckptgate.model.ids import check_member_id
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import (
    ROOT_INO,
    WRITERS_META,
    AttemptRow,
    FileRow,
    HandleRow,
    LocalBytes,
    NameOpRow,
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    PlainOpKind,
    PlainOpRow,
    TombstoneRow,
)
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool
from ckptgate_adapters.sqlite_spool.connection import WAL_BYTES_MAX
from ckptgate_adapters.sqlite_spool.failures import from_sqlite
from ckptgate_adapters.sqlite_spool.place import check_local, file_system_of
from ckptgate_adapters.sqlite_spool.settings import REPLIES_KEPT

STORE = "file:///store"


def make(path) -> SqliteSpool:
    return SqliteSpool.create_or_open(str(path), store_url=STORE, host="node1")


@pytest.fixture
def spool(tmp_path):
    opened = make(tmp_path / "spool")
    yield opened
    opened.close()


def node(kind=NodeKind.FILE, **fields: Any) -> NodeRow:
    given: dict[str, Any] = {
        "ino": 0,
        "attempt": None,
        "mode": 0o644,
        "uid": 1,
        "gid": 2,
        "size": 0,
        "mtime_ns": 3,
        "ctime_ns": 4,
    }
    return NodeRow(kind=kind, **(given | fields))


def attempt_row(**fields: Any) -> AttemptRow:
    given: dict[str, Any] = {
        "id": 0,
        "run": "a/b",
        "run_ino": 1,
        "name": "step-1",
        "attempt": "",
        "job_key": "run:x",
        "generation": -1,
        "state": AttemptState.OPEN,
        "root": 2,
    }
    return AttemptRow(**(given | fields))


# Opening


def test_a_new_spool_has_its_settings_its_root_and_private_modes(tmp_path):
    old = os.umask(0)
    try:
        spool = make(tmp_path / "missing" / "parents" / "spool")
    finally:
        os.umask(old)
    with_mode = {
        "": 0o700,
        "data": 0o700,
        "data/ff": 0o700,
        "spool.db": 0o600,
        "spool.db-wal": 0o600,
        "spool.db-shm": 0o600,
    }
    for name, mode in with_mode.items():
        assert stat.S_IMODE(os.stat(os.path.join(spool.path, name)).st_mode) == mode, name
    assert len(os.listdir(spool.path + "/data")) == 256
    assert spool.get_meta("format") == "1"
    assert spool.get_meta("store") == STORE
    assert spool.get_meta("host") == "node1"
    assert (spool.get_meta("created_at") or "").endswith("Z")
    member = spool.get_meta("member") or ""
    assert check_member_id(member).startswith("node1-")
    root = spool.node(ROOT_INO)
    assert root is not None
    assert (root.kind, root.plain_path, root.attempt) == (NodeKind.DIR, "", None)
    spool.close()
    again = make(spool.path)
    assert again.get_meta("member") == member
    assert repr(again) == f"SqliteSpool({spool.path!r})"
    again.close()


@pytest.mark.parametrize("host", ["", "ä/b\n c", "x" * 300, "a.b-c_d"])
def test_any_host_name_becomes_a_member_id(tmp_path, host):
    spool = SqliteSpool.create_or_open(str(tmp_path / "s"), store_url=STORE, host=host)
    assert check_member_id(spool.get_meta("member") or "")
    spool.close()


def test_a_path_with_odd_characters_works(tmp_path):
    spool = make(tmp_path / "a?b#c%41 'ü\udcff")
    spool.set_meta("x", "y")
    spool.close()
    again = SqliteSpool.attach(spool.path)
    assert again.get_meta("x") == "y"
    again.close()


def test_two_connections_see_each_others_commits(spool):
    other = SqliteSpool.attach(spool.path)
    with spool.transaction():
        spool.set_meta("k", "v")
        assert other.get_meta("k") is None
    assert other.get_meta("k") == "v"
    other.close()


def test_attaching_to_nothing_is_refused_and_makes_nothing(tmp_path):
    with pytest.raises(UnusableError, match="no spool is there") as caught:
        SqliteSpool.attach(str(tmp_path / "none"))
    assert caught.value.hint
    assert not (tmp_path / "none").exists()


def test_attaching_to_an_empty_database_file_is_refused(tmp_path):
    (tmp_path / "spool.db").write_bytes(b"")
    with pytest.raises(UnusableError, match="not the database of a spool"):
        SqliteSpool.attach(str(tmp_path))


def test_a_directory_in_the_databases_place_is_refused(tmp_path):
    (tmp_path / "spool.db").mkdir()
    with pytest.raises(UnusableError, match="not a regular file"):
        SqliteSpool.attach(str(tmp_path))


def test_a_spool_of_another_store_is_refused_by_name(spool):
    with pytest.raises(UnusableError, match=r"file:///store, not to s3://other") as caught:
        SqliteSpool.create_or_open(spool.path, store_url="s3://other", host="h")
    assert "--spool" in caught.value.hint


def test_another_format_version_is_refused_by_name(spool):
    spool.set_meta("format", "2")
    for opening in (lambda: make(spool.path), lambda: SqliteSpool.attach(spool.path)):
        with pytest.raises(FormatVersionError, match=r"has format '2'.*reads 1"):
            opening()


def test_a_foreign_database_is_refused(tmp_path):
    connection = sqlite3.connect(tmp_path / "spool.db")
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(UnusableError, match="not the database of a spool"):
        make(tmp_path)


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_damaged_database_is_refused_by_name(tmp_path, content):
    (tmp_path / "spool.db").write_bytes(content)
    for opening in (lambda: make(tmp_path), lambda: SqliteSpool.attach(str(tmp_path))):
        with pytest.raises(UnusableError, match=r"damaged or no database: .*/spool\.db") as caught:
            opening()
        assert "--spool" in caught.value.hint
    assert (tmp_path / "spool.db").read_bytes() == content


def test_a_damaged_page_is_found_when_it_is_read(spool):
    for i in range(2000):
        spool.link(1, f"name-{i}", spool.add_node(node()).ino)
    path = spool.path
    spool.close()
    with open(path + "/spool.db", "r+b") as stream:
        stream.seek(4096 * 2)
        stream.write(os.urandom(os.fstat(stream.fileno()).st_size - 4096 * 2))
    with pytest.raises(UnusableError, match="damaged"):
        again = SqliteSpool.attach(path)
        try:
            again.children(1)
            again.nameless_nodes()
        finally:
            again.close()


def test_staged_files_without_their_database_are_never_given_to_a_new_one(spool):
    """I11: a new database would call them orphans."""
    file = spool.add_file()
    with open(spool.data_path(file.file), "wb") as stream:
        stream.write(b"staged")
    spool.close()
    os.unlink(spool.path + "/spool.db")
    with pytest.raises(UnusableError, match="staged files are there") as caught:
        make(spool.path)
    assert "spool.db" in caught.value.hint
    assert os.path.exists(spool.data_path(file.file))


def test_a_file_in_the_spools_place_is_refused(tmp_path):
    (tmp_path / "f").write_text("x")
    for path in (tmp_path / "f", tmp_path / "f" / "below"):
        with pytest.raises(UnusableError, match=r"cannot make the spool: .*Not a directory"):
            make(path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data").write_text("x")
    with pytest.raises(UnusableError, match="Not a directory"):
        make(tmp_path / "d")


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(UnusableError, match="not a path"):
        SqliteSpool.create_or_open(path, store_url=STORE, host="h")


def test_a_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(UnusableError, match="File name too long"):
        make(tmp_path / ("x" * 300))


OPEN_BOTH_WAYS = """
import sys
from ckptgate.errors import CkptError
from ckptgate_adapters.sqlite_spool import SqliteSpool
for opening in (
    lambda: SqliteSpool.create_or_open(sys.argv[1], store_url="file:///store", host="h"),
    lambda: SqliteSpool.attach(sys.argv[1]),
):
    try:
        opening()
    except CkptError as exc:
        print(exc.kind, exc.message, exc.hint, sep="|")
"""


def obey_modes() -> None:
    """Let root's next program be subject to modes, too (drop CAP_DAC_OVERRIDE, _READ_SEARCH)."""
    if os.getuid() == 0:
        libc = ctypes.CDLL(None)
        assert libc.prctl(24, 1, 0, 0, 0) == libc.prctl(24, 2, 0, 0, 0) == 0


@pytest.mark.parametrize("what", ["directory", "database", "parent"])
def test_a_spool_that_cannot_be_written_is_refused(tmp_path, what):
    path = tmp_path / "spool"
    if what != "parent":
        make(path).close()
    unwritable = {"parent": tmp_path, "directory": path, "database": path / "spool.db"}[what]
    mode = stat.S_IMODE(os.stat(unwritable).st_mode)
    os.chmod(unwritable, mode & ~0o222)
    try:
        done = subprocess.run(
            [sys.executable, "-c", OPEN_BOTH_WAYS, str(path)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            preexec_fn=obey_modes,
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        os.chmod(unwritable, mode)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, lines
    assert all(line.startswith("unusable|") and line.split("|")[2] for line in lines), lines


def test_network_file_systems_are_refused_by_name():
    mountinfo = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "23 22 0:40 / /mnt/nfs\\040share rw,relatime shared:1 - nfs4 server:/x rw\n"
        "24 23 0:41 / /mnt/nfs\\040share/local rw - xfs /dev/sdb rw\n"
        "25 22 0:42 / /over rw - ext4 /dev/sdc rw\n"
        "26 25 0:43 / /over rw - fuse.ckptgate ckptgate rw\n"
        "a torn line\n"
    )
    assert file_system_of("/mnt/nfs share/a", mountinfo) == ("/mnt/nfs share", "nfs4")
    assert file_system_of("/mnt/nfs share/local", mountinfo)[1] == "xfs"
    assert file_system_of("/mnt/nfs sharex", mountinfo) == ("/", "ext4")
    for path in ("/mnt/nfs share/spool", "/over/spool"):
        with pytest.raises(UnusableError, match=rf"{path} is on (nfs4|fuse\.ckptgate)") as caught:
            check_local(path, mountinfo)
        assert "--spool" in caught.value.hint
    check_local("/mnt/nfs share/local/spool", mountinfo)


def test_a_spool_that_copies_on_write_is_warned_of(caplog):
    check_local("/data/spool", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert not caplog.records
    check_local("/data/spool", "22 1 8:1 / / rw - btrfs /dev/sda1 rw\n")
    assert "type=btrfs hint='set spool_max" in caplog.text


def test_a_used_up_quota_is_told_as_one(tmp_path, monkeypatch):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    found = from_sqlite(error, str(tmp_path / "spool.db"))
    assert isinstance(found, FullError)
    assert found.errno == errno.EDQUOT
    assert "quota" in found.message
    assert list(tmp_path.iterdir()) == []


def test_a_closed_spool_says_so(spool):
    spool.close()
    spool.close()
    with pytest.raises(UnusableError, match="closed"):
        spool.node(1)
    with pytest.raises(UnusableError, match="closed"), spool.transaction():
        pass


def test_threads_and_processes_that_create_at_once_agree(tmp_path):
    members: list[str | None] = []

    def create() -> None:
        opened = make(tmp_path / "s")
        members.append(opened.get_meta("member"))
        opened.close()

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(members) == 6
    assert len(set(members)) == 1


# Transactions


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
    other._db._connection.execute("PRAGMA busy_timeout = 20")
    with spool.transaction():
        with pytest.raises(BusyError, match="in use by another process"), other.transaction():
            pass
        with pytest.raises(BusyError):
            other.set_meta("a", "b")
        assert other.get_meta("member") == spool.get_meta("member")
    with other.transaction():
        other.set_meta("a", "b")
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


# Settings and replies


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


# Nodes


def test_a_node_comes_back_as_it_was_given(spool):
    row = node(
        NodeKind.SYMLINK,
        attempt=3,
        size=1 << 50,
        target="../x",
        file=7,
        base=2,
        plain_path="a/ü",
        mtime_ns=-5,
    )
    stored = spool.add_node(row)
    assert stored.ino > ROOT_INO
    assert spool.node(stored.ino) == stored
    assert stored.target == "../x"
    changed = spool.update_node(stored.ino, kind=NodeKind.FILE, size=9, file=None, plain_path=None)
    assert spool.node(stored.ino) == changed
    assert (changed.kind, changed.size, changed.file, changed.base) == (NodeKind.FILE, 9, None, 2)
    assert spool.update_node(stored.ino) == changed
    spool.drop_node(stored.ino)
    spool.drop_node(stored.ino)
    assert spool.node(stored.ino) is None
    with pytest.raises(MissingError):
        spool.update_node(stored.ino, size=1)
    with pytest.raises(MissingError):
        spool.update_node(stored.ino)


def test_numbers_are_never_given_twice(tmp_path):
    spool = make(tmp_path / "s")
    other = SqliteSpool.attach(spool.path)
    given: list[int] = []
    for opened in (spool, other, spool, other):
        given.append(opened.add_node(node()).ino)
        opened.drop_node(given[-1])
        with pytest.raises(ZeroDivisionError), opened.transaction():
            opened.add_node(node())
            raise ZeroDivisionError
    chosen = max(given) + 5000
    assert spool.add_node(node(ino=chosen)).ino == chosen
    given.append(chosen)
    with pytest.raises(ExistsError):
        other.add_node(node(ino=chosen))
    given += [spool.add_node(node()).ino, other.add_node(node()).ino]
    spool.close()
    other.close()
    again = make(spool.path)
    given.append(again.add_node(node()).ino)
    assert len(set(given)) == len(given)
    assert min(given) == ROOT_INO + 1
    again.close()


def test_a_block_of_numbers_taken_in_a_rolled_back_transaction_is_not_kept(tmp_path):
    spool, other = make(tmp_path / "s"), SqliteSpool.attach(str(tmp_path / "s"))
    with pytest.raises(ZeroDivisionError), spool.transaction():
        spool.next_handle()
        raise ZeroDivisionError
    given = [opened.next_handle() for opened in (other, spool) for _ in range(2000)]
    assert len(set(given)) == len(given)
    spool.close()
    other.close()


@pytest.mark.parametrize("changes", [{"nonsense": 1}, {"INO": 1}, {'size" = 1, "mode': 1}])
def test_an_unknown_field_is_refused_by_name(spool, changes):
    with pytest.raises(TypeError, match="NodeRow has no field"):
        spool.update_node(ROOT_INO, **changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"size": "x"}, UsageError),
        ({"size": None}, UsageError),
        ({"size": 1 << 64}, UnusableError),
        ({"kind": "socket"}, ValueError),
        ({"target": "\udcff"}, InvalidNameError),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(spool, changes, error):
    before = spool.node(ROOT_INO)
    with pytest.raises(error):
        spool.update_node(ROOT_INO, mode=0o700, **changes)
    assert spool.node(ROOT_INO) == before


def test_names(spool):
    first, second = spool.add_node(node(NodeKind.DIR)), spool.add_node(node())
    spool.link(ROOT_INO, "z", first.ino)
    spool.link(ROOT_INO, "a", second.ino)
    assert spool.child(ROOT_INO, "z") == first
    assert spool.child(ROOT_INO, "Z") is None
    assert spool.children(ROOT_INO) == [("z", first), ("a", second)]
    assert spool.count_children(ROOT_INO, most=9)[0] == 2
    assert spool.place(second.ino) == (ROOT_INO, "a")
    assert spool.place(ROOT_INO) is None
    third = spool.add_node(node())
    with pytest.raises(ExistsError, match="name is taken: 'a'"):
        spool.link(ROOT_INO, "a", third.ino)
    with pytest.raises(ExistsError, match=f"node {first.ino} has a name already: 'z'"):
        spool.link(ROOT_INO, "b", first.ino)
    spool.unlink(ROOT_INO, "z")
    spool.unlink(ROOT_INO, "z")
    assert spool.place(first.ino) is None
    assert spool.node(first.ino) == first
    spool.link(ROOT_INO, "z", first.ino)
    assert [name for name, _ in spool.children(ROOT_INO)] == ["a", "z"]
    with pytest.raises(InvalidNameError):
        spool.child(ROOT_INO, "\udcff")


def test_names_keep_their_order_when_the_clock_goes_back(spool, monkeypatch):
    times = iter([50, 40, 30])
    monkeypatch.setattr(
        "ckptgate_adapters.sqlite_spool.connection.time.time_ns", lambda: next(times)
    )
    for name in "cab":
        spool.link(ROOT_INO, name, spool.add_node(node()).ino)
    assert [name for name, _ in spool.children(ROOT_INO)] == ["c", "a", "b"]


def test_nameless_nodes_are_those_that_nothing_refers_to(spool):
    root, pending, named, lost = (spool.add_node(node()) for _ in range(4))
    spool.add_attempt(attempt_row(root=root.ino))
    spool.add_pending(
        PendingRow(id=0, parent=1, name="p", ino=pending.ino, kind=PendingKind.WHOLE, job_key="")
    )
    spool.link(ROOT_INO, "n", named.ino)
    assert spool.nameless_nodes() == [lost]
    spool.unlink(ROOT_INO, "n")
    assert spool.nameless_nodes() == [named, lost]


# Files


def test_a_file_comes_back_as_it_was_changed(spool):
    file = spool.add_file()
    assert file == FileRow(file=file.file, state=FileState.OPEN)
    assert spool.file(file.file) == file
    evidence = Evidence(container="torch-zip", is_torn=True, problem="tör\n", rank=3)
    changes: dict[str, Any] = {
        "state": FileState.QUIET,
        "local": LocalBytes.PARTIAL,
        "size": 5,
        "mtime_ns": 6,
        "ctime_ns": 7,
        "digest": "ab" * 32,
        "chunks": b"\0" * 32,
        "key": "r/.ckptgate/data/x",
        "have": b"\1\0",
        "evidence": evidence,
        "is_linked": True,
    }
    changed = spool.update_file(file.file, **changes)
    assert spool.file(file.file) == changed
    assert changed == FileRow(file=file.file, **changes)
    assert spool.update_file(file.file) == changed
    assert spool.update_file(file.file, evidence=Evidence()).evidence == Evidence()
    other = spool.add_file(local=LocalBytes.NONE, state=FileState.STORED)
    assert other.file != file.file
    assert spool.file(other.file) == other
    with pytest.raises(MissingError):
        spool.update_file(999, size=1)
    with pytest.raises(MissingError):
        spool.update_file(999, state=FileState.QUIET)


def test_a_file_changes_its_state_only_along_the_table(spool):
    file = spool.add_file()
    with pytest.raises(RefusedError, match="a file that is open cannot become stored"):
        spool.update_file(file.file, state=FileState.STORED)
    for state in (FileState.OPEN, FileState.QUIET, FileState.DIGESTED, FileState.STORED):
        assert spool.update_file(file.file, state=state).state is state
    with pytest.raises(RefusedError):
        spool.update_file(file.file, state=FileState.DIGESTED)
    with pytest.raises(ValueError, match="not a valid FileState"):
        spool.update_file(file.file, state="lost")


def test_damaged_evidence_is_refused_by_name(spool):
    file = spool.add_file()
    spool._db.run("UPDATE files SET evidence = ?", ('{"rank": "x"}',))
    with pytest.raises(IntegrityError, match=f"evidence of file {file.file}"):
        spool.file(file.file)


def test_dropping_a_file_removes_its_bytes_once_it_is_committed(spool):
    file = spool.add_file()
    path = spool.data_path(file.file)
    assert path == f"{spool.path}/data/{file.file % 256:02x}/{file.file}"
    with open(path, "wb") as stream:
        stream.write(b"x")
    with pytest.raises(ZeroDivisionError), spool.transaction():
        spool.drop_file(file.file)
        raise ZeroDivisionError
    with spool.transaction(), pytest.raises(ZeroDivisionError), spool.transaction():
        spool.drop_file(file.file)
        raise ZeroDivisionError
    assert spool.file(file.file) == file
    with spool.transaction():
        with spool.transaction():
            spool.drop_file(file.file)
        assert os.path.exists(path)
    assert spool.file(file.file) is None
    spool.drop_file(file.file)
    spool.close()
    assert not os.path.exists(path)


def test_bytes_go_only_once_their_rows_end_is_durable(spool, monkeypatch):
    """I11: a power loss may bring a row back whose transaction wasn't synced: with its bytes."""
    file = spool.add_file()
    path = spool.data_path(file.file)
    with open(path, "wb") as stream:
        stream.write(b"x")
    seen: list[bool] = []
    sync = spool._durability.sync

    def make_durable() -> None:
        seen.append(os.path.exists(path))
        sync()

    monkeypatch.setattr(spool._removal, "_make_durable", make_durable)
    spool.drop_file(file.file)
    spool.close()
    assert seen == [True]
    assert not os.path.exists(path)


def test_bytes_stay_where_their_rows_end_cannot_be_made_durable(spool, monkeypatch, caplog):
    """I11: they are an orphan, which the next start removes."""
    file = spool.add_file()
    path = spool.data_path(file.file)
    with open(path, "wb") as stream:
        stream.write(b"x")

    def fail() -> None:
        raise UnusableError("injected")

    monkeypatch.setattr(spool._removal, "_make_durable", fail)
    spool.drop_file(file.file)
    spool.close()
    assert os.path.exists(path)
    assert "spool-files-kept" in caplog.text


def test_a_spool_file_that_cannot_be_removed_is_logged_only(spool, caplog):
    file = spool.add_file()
    os.mkdir(spool.data_path(file.file))
    spool.drop_file(file.file)
    spool.close()
    assert "spool-file-not-removed" in caplog.text


def test_orphans_are_removed_and_nothing_else(spool):
    kept, lost, unused, opened = (spool.add_file() for _ in range(4))
    spool.add_node(node(file=kept.file))
    spool.add_handle(HandleRow(fh=1, ino=99, file=opened.file, pid=0, start=0))
    for file in (kept, lost, unused, opened):
        with open(spool.data_path(file.file), "wb"):
            pass
    spool._db.run("DELETE FROM files WHERE file = ?", (lost.file,))
    assert {path for path, _ in spool.stray_files()} == {spool.data_path(lost.file)}
    assert spool.unreferenced_files() == [unused.file]
    assert spool.drop_orphans() == 2
    assert spool.drop_orphans() == 0
    there = [os.path.exists(spool.data_path(file.file)) for file in (kept, lost, unused, opened)]
    assert there == [True, False, False, True]


def test_what_others_put_into_the_spool_is_not_removed(spool, tmp_path):
    """I13: names that are no ids, ids in the wrong directory, links, and what a link leads to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.rmdir(f"{spool.path}/data/d0")
    os.symlink(elsewhere, f"{spool.path}/data/d0")
    os.symlink("/etc/passwd", f"{spool.path}/data/00/256")
    os.mkdir(f"{spool.path}/data/00/512")
    foreign = [elsewhere / "208", elsewhere / "vital.txt"]
    foreign += [Path(spool.path, "data", name) for name in ("00/notes", "01/2", "00/000")]
    for path in foreign:
        path.write_text("vital")
    assert spool.stray_files() == []
    assert spool.drop_orphans() == 0
    assert not spool.drop_stray(f"{spool.path}/data/d0/208")
    assert not spool.drop_stray(f"{spool.path}/data/01/2")
    assert [path.read_text() for path in foreign] == ["vital"] * 5
    assert os.path.islink(f"{spool.path}/data/00/256")


def test_a_stray_file_whose_row_is_there_by_now_stays(spool):
    file = spool.add_file()
    path = spool.data_path(file.file)
    with open(path, "wb"):
        pass
    assert not spool.drop_stray(path)
    assert not spool.drop_stray(spool.path + "/spool.db")
    assert os.path.exists(path)
    assert os.path.exists(spool.path + "/spool.db")


def test_what_the_spool_takes_is_counted_as_it_is(spool):
    """Files that grow while they are open, that are made and removed, and linked ones."""
    before = spool.allocated()
    file = spool.add_file()
    path = spool.data_path(file.file)
    with open(path, "wb") as stream:
        stream.write(b"x" * 100_000)
    first = spool.allocated()
    assert before + 100_000 <= first < before + 300_000
    spool.add_handle(HandleRow(fh=1, ino=9, file=file.file, pid=0, start=0))
    with open(path, "ab") as stream:
        stream.write(b"x" * 1_000_000)
    assert spool.allocated() >= first + 900_000
    os.link(path, spool.path + "/the-store-s")
    spool.update_file(file.file, is_linked=True)
    assert spool.allocated() < first
    os.unlink(spool.path + "/the-store-s")
    spool.drop_handle(1)
    spool.drop_file(file.file)
    spool.finish_removals()
    assert spool.allocated() < before + 200_000


def test_an_attempt_is_dropped_with_all_that_is_kept_by_its_number(spool):
    kept = spool.add_attempt(attempt_row(root=1, name="kept"))
    gone = spool.add_attempt(attempt_row(root=1, name="gone"))
    for row in (kept, gone):
        spool.add_rank_commit(row.id, 0)
        spool.add_writer_rank(row.id, 1)
        spool.set_seen_count(row.id, "m-00000001", "votes", 2)
        spool.add_name_op(NameOpRow(id=0, attempt=row.id, op="mkdir", path="d", to="", mode=0))
        spool.set_meta(WRITERS_META.format(attempt=row.id), "[]")
    spool.drop_attempt(gone.id)
    spool.drop_attempt(gone.id)
    assert spool.attempt(gone.id) is None
    assert spool.attempt(kept.id) is not None
    for row, count in ((kept, 1), (gone, 0)):
        assert len(spool.rank_commits(row.id)) == count
        assert len(spool.writer_ranks(row.id)) == count
        assert len(spool.seen_members(row.id)) == count
        assert len(spool.name_ops(row.id)) == count
        assert (spool.get_meta(WRITERS_META.format(attempt=row.id)) is not None) == bool(count)


def test_trees_are_walked_by_name(spool):
    root = spool.add_node(node(NodeKind.DIR))
    attempt = spool.add_attempt(attempt_row(root=root.ino))
    rows: dict[str, NodeRow] = {}
    file = spool.add_file()
    for path, kind in {"b": NodeKind.DIR, "a.pt": NodeKind.FILE, "b/c": NodeKind.DIR}.items():
        parent, _, name = path.rpartition("/")
        with_file = file.file if kind is NodeKind.FILE else None
        rows[path] = spool.add_node(node(kind, attempt=attempt.id, file=with_file))
        spool.link(rows[parent].ino if parent else root.ino, name, rows[path].ino)
    shared = spool.add_node(node(attempt=attempt.id, file=file.file))
    spool.link(rows["b/c"].ino, "d.pt", shared.ino)
    link = spool.add_node(node(NodeKind.SYMLINK, attempt=attempt.id, target="a.pt"))
    spool.link(root.ino, "b-link", link.ino)
    assert spool.tree(attempt.id) == [
        ("a.pt", rows["a.pt"]),
        ("b", rows["b"]),
        ("b-link", link),
        ("b/c", rows["b/c"]),
        ("b/c/d.pt", shared),
    ]
    assert spool.files_of_attempt(attempt.id) == [
        ("a.pt", rows["a.pt"], file),
        ("b/c/d.pt", shared, file),
    ]
    assert spool.nodes_of_file(file.file) == [rows["a.pt"], shared]
    assert spool.tree(99) == []
    assert spool.files_of_attempt(99) == []
    assert spool.nodes_of_file(99) == []


def test_files_that_wait_are_found_with_their_paths_in_parts(spool):
    root = spool.add_node(node(NodeKind.DIR))
    attempt = spool.add_attempt(attempt_row(root=root.ino))
    directory = spool.add_node(node(NodeKind.DIR, attempt=attempt.id))
    spool.link(root.ino, "d", directory.ino)
    files = [spool.add_file(state=FileState.QUIET) for _ in range(5)]
    nodes = [spool.add_node(node(attempt=attempt.id, file=file.file)) for file in files]
    for n, (parent, name) in enumerate([(root, "a"), (directory, "b"), (directory, "c")]):
        spool.link(parent.ino, name, nodes[n].ino)
    spool.link(root.ino, "stored", nodes[4].ino)
    spool.update_file(files[4].file, state=FileState.DIGESTED)
    everything = [
        ("a", nodes[0], files[0]),
        ("d/b", nodes[1], files[1]),
        ("d/c", nodes[2], files[2]),
    ]

    def quiet(after: int, limit: int):
        return spool.waiting_files(attempt.id, FileState.QUIET, after=after, limit=limit)

    # The fourth has no name any more.
    assert quiet(0, 10) == everything
    assert quiet(0, 2) == everything[:2]
    assert quiet(files[1].file, 2) == everything[2:]
    digested = spool.waiting_files(attempt.id, FileState.DIGESTED, after=0, limit=9)
    assert [(path, row.file) for path, _, row in digested] == [("stored", files[4].file)]
    assert spool.waiting_files(99, FileState.QUIET, after=0, limit=9) == []


def test_ten_thousand_files_are_listed_in_a_second(spool):
    with spool.transaction():
        root = spool.add_node(node(NodeKind.DIR))
        attempt = spool.add_attempt(attempt_row(root=root.ino))
        for i in range(100):
            directory = spool.add_node(node(NodeKind.DIR))
            spool.link(root.ino, f"d{i:02}", directory.ino)
            for j in range(100):
                file = spool.add_file()
                spool.link(directory.ino, f"{j}.pt", spool.add_node(node(file=file.file)).ino)
    started = time.process_time()
    found = spool.files_of_attempt(attempt.id)
    paths = [path for path, _, _ in found]
    assert (len(paths), paths) == (10_000, sorted(paths))
    assert len(spool.tree(attempt.id)) == 10_100
    assert time.process_time() - started < 2


# Attempts


def test_an_attempt_comes_back_as_it_was_changed(spool):
    attempt = spool.add_attempt(attempt_row())
    assert attempt.id > 0
    assert spool.attempt(attempt.id) == attempt
    changes: dict[str, Any] = {
        "run": "r",
        "run_ino": 9,
        "name": "step-2",
        "attempt": "step-2.0",
        "job_key": "slurm:1.0",
        "generation": 4,
        "state": AttemptState.SEALED,
        "root": 10,
        "base": 1,
        "event": "format",
        "detail": "dcp-metadata",
        "is_joined": True,
        "is_voted": True,
        "votes_count": 2,
        "names_count": 3,
        "world_size": 8,
        "committed_all": True,
        "seal_index": 5,
        "manifest": "cd" * 32,
        "format_name": "dcp",
        "created_ns": 6,
        "event_ns": 7,
        "write_ns": 8,
        "reason": "waits",
        "missing": ("rank 1", 'a "quoted" ü'),
    }
    changed = spool.update_attempt(attempt.id, **changes)
    assert changed == AttemptRow(id=attempt.id, **changes)
    assert spool.attempt(attempt.id) == changed
    assert spool.update_attempt(attempt.id) == changed
    assert spool.update_attempt(attempt.id, missing=()).missing == ()
    given = spool.add_attempt(attempt_row(id=77))
    assert spool.attempt(77) == given
    assert spool.add_attempt(attempt_row()).id == 78
    with pytest.raises(MissingError):
        spool.update_attempt(99, reason="x")
    with pytest.raises(TypeError, match="AttemptRow has no field 'nonsense'"):
        spool.update_attempt(attempt.id, nonsense=4)


def test_an_attempt_changes_its_state_only_along_the_table(spool):
    """I3: what is committed is never aborted."""
    attempt = spool.add_attempt(attempt_row())
    for state in (AttemptState.OPEN, AttemptState.SEALED, AttemptState.COMMITTED):
        assert spool.update_attempt(attempt.id, state=state).state is state
    with pytest.raises(RefusedError, match="committed cannot become aborted"):
        spool.update_attempt(attempt.id, state=AttemptState.ABORTED)


def test_attempts_are_found_by_every_combination_of_conditions(spool):
    rows = [
        spool.add_attempt(attempt_row(run=run, run_ino=ino, name=name, state=state, attempt=id_))
        for run, ino, name, state, id_ in [
            ("r", 1, "a", AttemptState.OPEN, "a.0"),
            ("r", 1, "b", AttemptState.COMMITTED, "b.0"),
            ("q", 2, "a", AttemptState.OPEN, "a.0"),
            ("r", 1, "a", AttemptState.SEALED, "a.1"),
        ]
    ]
    assert spool.attempts() == rows
    assert spool.attempts(run="r") == [rows[0], rows[1], rows[3]]
    assert spool.attempts(run="") == []
    assert spool.attempts(run_ino=2) == [rows[2]]
    assert spool.attempts(run_ino=1, name="a") == [rows[0], rows[3]]
    open_or_sealed = {AttemptState.OPEN, AttemptState.SEALED}
    assert spool.attempts(states=open_or_sealed) == [rows[0], rows[2], rows[3]]
    assert spool.attempts(run="r", name="a", states=[AttemptState.SEALED]) == [rows[3]]
    assert spool.attempts(states=()) == []
    assert spool.attempt_by_id("q", "a.0") == rows[2]
    assert spool.attempt_by_id("q", "a.1") is None


def test_ranks_and_counts_of_other_members(spool):
    for rank in (3, 1, 3):
        spool.add_rank_commit(1, rank)
        spool.add_writer_rank(1, rank + 10)
    assert spool.rank_commits(1) == (1, 3)
    assert spool.writer_ranks(1) == (11, 13)
    assert spool.rank_commits(2) == spool.writer_ranks(2) == ()
    assert spool.seen_count(1, "m-1", "names") == 0
    spool.set_seen_count(1, "m-1", "names", 4)
    spool.set_seen_count(1, "m-1", "votes", 5)
    spool.set_seen_count(1, "m-1", "names", 6)
    spool.set_seen_count(1, "l-1", "names", 1)
    assert spool.seen_count(1, "m-1", "names") == 6
    assert spool.seen_count(1, "m-1", "votes") == 5
    assert spool.seen_members(1) == ("l-1", "m-1")
    assert spool.seen_members(2) == ()


# Handles


def test_handles(spool):
    inside = spool.add_node(node(attempt=5))
    outside = spool.add_node(node())
    first = HandleRow(fh=spool.next_handle(), ino=inside.ino, file=1, pid=10, start=1 << 40, rank=2)
    second = HandleRow(fh=spool.next_handle(), ino=outside.ino, file=2, pid=11, start=3)
    assert first.fh != second.fh
    spool.add_handle(first)
    spool.add_handle(second)
    with pytest.raises(ExistsError):
        spool.add_handle(first)
    assert spool.handle(first.fh) == first
    assert spool.handles() == [first, second]
    assert spool.handles(file=2) == [second]
    assert spool.handles_of_attempt(5) == [first]
    spool.update_handle(first.fh, is_closed=True)
    changed = spool.handle(first.fh)
    assert changed is not None
    assert changed.is_closed is True
    spool.update_handle(first.fh)
    spool.update_handle(12345, is_closed=True)
    spool.drop_handle(second.fh)
    spool.drop_handle(second.fh)
    assert spool.handle(second.fh) is None
    assert spool.clear_handles() == [changed]
    assert spool.handles() == spool.clear_handles() == []


# Waiting


def test_pending_values(spool):
    first = spool.add_pending(
        PendingRow(id=0, parent=1, name="latest", ino=4, kind=PendingKind.POINTER, job_key="run:x")
    )
    second = spool.add_pending(
        PendingRow(id=0, parent=2, name="latest", ino=None, kind=PendingKind.WHOLE, job_key="")
    )
    assert spool.pending() == [first, second]
    assert spool.pending(parent=1) == [first]
    assert spool.pending(parent=2, name="latest") == [second]
    assert spool.pending(name="other") == []
    spool.update_pending(first.id, target="step-1", ino=None)
    spool.update_pending(first.id)
    (changed,) = spool.pending(parent=1)
    assert (changed.target, changed.ino) == ("step-1", None)
    with pytest.raises(MissingError):
        spool.update_pending(99, target="x")
    spool.drop_pending(first.id)
    spool.drop_pending(first.id)
    assert spool.pending() == [second]


def test_tombstones(spool):
    first = spool.add_tombstone(TombstoneRow(id=0, run="r", name="a", attempt="a.0", job_key="j"))
    second = spool.add_tombstone(TombstoneRow(id=0, run="q", name="a", attempt="a.0", job_key="j"))
    assert spool.tombstones() == [first, second]
    assert spool.tombstones(run="q") == [second]
    spool.drop_tombstone(first.id)
    assert spool.tombstones(run="r") == []


def test_name_operations_keep_their_order_and_numbers(spool):
    ops = [
        spool.add_name_op(NameOpRow(id=0, attempt=1, op=op, path="p", to="t", mode=0o755))
        for op in ("mkdir", "rename", "rmdir")
    ]
    assert spool.name_ops(1) == ops
    assert spool.name_ops(2) == []
    spool.drop_name_op(ops[2].id)
    again = spool.add_name_op(ops[2].__class__(id=0, attempt=1, op="mkdir", path="", to="", mode=0))
    assert again.id > ops[2].id
    with pytest.raises(ValueError, match="not a valid NameOpKind"):
        spool.add_name_op(NameOpRow(id=0, attempt=1, op="chmod", path="", to="", mode=0))


def test_plain_operations_keep_their_order(spool):
    ops = [spool.add_plain_op(PlainOpRow(id=0, op=op, path="p", ino=3)) for op in PlainOpKind]
    assert list(spool.plain_ops()) == ops
    spool.drop_plain_op(ops[0].id)
    assert list(spool.plain_ops()) == ops[1:]


def test_watched_runs(spool):
    for run in ("r", "", "r"):
        spool.watch_run(run)
    assert spool.watched_runs() == ("", "r")


# The lock


def test_the_second_holder_is_told_who_has_the_spool(spool):
    with SpoolLock(spool.path, mountpoint="/mnt/ckpt") as lock:
        assert lock.fd >= 0
        lock.acquire()
        with pytest.raises(
            BusyError, match=f"process {os.getpid()}, mounted on /mnt/ckpt"
        ) as caught:
            SpoolLock(spool.path).acquire()
        assert caught.value.hint == "ckptgate umount /mnt/ckpt"
        holder = SpoolLock(spool.path).holder() or {}
        assert holder["pid"] == os.getpid()
        assert set(holder) == {"pid", "host", "since", "mountpoint"}
    assert lock.fd == -1
    lock.release()
    assert lock.holder() is None
    with SpoolLock(spool.path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00" * 5000])
def test_a_lock_with_a_torn_holder_is_still_held(spool, content):
    with SpoolLock(spool.path) as lock:
        os.ftruncate(lock.fd, 0)
        os.pwrite(lock.fd, content.encode(), 0)
        assert lock.holder() == {}
        with pytest.raises(BusyError, match="in use by another process"):
            SpoolLock(spool.path).acquire()


def test_the_lock_of_a_missing_spool_is_refused(tmp_path):
    with pytest.raises(UnusableError, match="cannot lock the spool"):
        SpoolLock(str(tmp_path / "none")).acquire()
    assert SpoolLock(str(tmp_path / "none")).holder() is None


@pytest.mark.parametrize("is_inheritable", [True, False])
def test_a_child_keeps_the_lock_only_if_it_is_inheritable(spool, is_inheritable):
    lock = SpoolLock(spool.path, is_inheritable=is_inheritable)
    lock.acquire()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.release()
        assert (SpoolLock(spool.path).holder() is not None) is is_inheritable
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert SpoolLock(spool.path).holder() is None


# Against a model

NAMES = st.sampled_from(["a", "b", "ü", "step-1"])


class NodesAgainstDicts(RuleBasedStateMachine):
    """Nodes and names behave as two dicts do, across roll-backs, threads' connections, restarts."""

    def __init__(self):
        super().__init__()
        self.path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"spool-model-{os.getpid()}")
        shutil.rmtree(self.path, ignore_errors=True)
        self.spool = make(self.path)
        self.nodes = {ROOT_INO: self.spool.node(ROOT_INO)}
        self.names: dict[tuple[int, str], int] = {}
        self.gone: set[int] = set()
        self.rolled_back: set[int] = set()

    def teardown(self):
        self.spool.close()
        shutil.rmtree(self.path)

    def some(self, at: int) -> int:
        known = sorted(self.nodes)
        return known[at % len(known)]

    @rule(
        kind=st.sampled_from(list(NodeKind)), size=st.integers(0, 2**62), mode=st.integers(0, 0o777)
    )
    def add(self, kind, size, mode):
        row = self.spool.add_node(node(kind, size=size, mode=mode))
        assert row.ino not in self.nodes
        assert row.ino not in self.gone | self.rolled_back
        self.nodes[row.ino] = row

    @rule(parent=st.integers(0, 99), name=NAMES, ino=st.integers(0, 99))
    def link(self, parent, name, ino):
        parent, ino = self.some(parent), self.some(ino)
        if (parent, name) in self.names or ino in self.names.values():
            with pytest.raises(ExistsError):
                self.spool.link(parent, name, ino)
        else:
            self.spool.link(parent, name, ino)
            self.names[parent, name] = ino

    @rule(parent=st.integers(0, 99), name=NAMES)
    def unlink(self, parent, name):
        self.spool.unlink(self.some(parent), name)
        self.names.pop((self.some(parent), name), None)

    @rule(ino=st.integers(0, 99), size=st.integers(0, 2**62))
    def update(self, ino, size):
        ino = self.some(ino)
        self.nodes[ino] = changed = self.spool.update_node(ino, size=size)
        assert changed.size == size

    @rule(ino=st.integers(0, 99))
    def drop(self, ino):
        ino = self.some(ino)
        if ino != ROOT_INO and ino not in self.names.values():
            self.spool.drop_node(ino)
            del self.nodes[ino]
            self.gone.add(ino)
            self.names = {at: of for at, of in self.names.items() if at[0] != ino}
            for name in ("a", "b", "ü", "step-1"):
                self.spool.unlink(ino, name)

    @rule(name=NAMES, is_inner=st.booleans())
    def roll_back(self, name, is_inner):
        with pytest.raises(ZeroDivisionError), self.spool.transaction():
            row = self.spool.add_node(node())
            self.rolled_back.add(row.ino)
            self.spool.unlink(ROOT_INO, name)
            if is_inner:
                with self.spool.transaction():
                    self.spool.link(ROOT_INO, name, row.ino)
            raise ZeroDivisionError

    @rule(is_clean=st.booleans())
    def restart(self, is_clean):
        old = self.spool
        self.rolled_back.clear()
        if is_clean:
            old.close()
        self.spool = SqliteSpool.attach(self.path)
        old.close()

    @invariant()
    def equal(self):
        for ino, row in self.nodes.items():
            assert self.spool.node(ino) == row
            at = [place for place, of in self.names.items() if of == ino]
            assert self.spool.place(ino) == (at[0] if at else None)
            children = [(n, self.nodes[of]) for (p, n), of in self.names.items() if p == ino]
            assert self.spool.children(ino) == children
            directories = sum(row is not None and row.kind is NodeKind.DIR for _, row in children)
            assert self.spool.count_children(ino, most=1000) == (len(children), directories)
            assert self.spool.count_children(ino)[0] == min(len(children), 1)
        for (parent, name), ino in self.names.items():
            assert self.spool.child(parent, name) == self.nodes[ino]
        nameless = set(self.nodes) - set(self.names.values()) - {ROOT_INO}
        assert {row.ino for row in self.spool.nameless_nodes()} == nameless


NodesAgainstDicts.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestNodesAgainstDicts = NodesAgainstDicts.TestCase
