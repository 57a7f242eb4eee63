"""Opening a spool: what is refused, and how."""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest
from tests.unit.sqlite_spool.kit import STORE, make, node

from ckptgate.errors import (
    FormatVersionError,
    FullError,
    UnusableError,
)
from ckptgate.model.ids import check_member_id
from ckptgate.ports.spool import (
    ROOT_INO,
    NodeKind,
)
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.sqlite_spool.failures import from_sqlite
from ckptgate_adapters.sqlite_spool.place import check_local, file_system_of


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


def test_a_spool_in_memory_is_warned_of(caplog):
    """I11: acknowledged bytes would not survive a reboot."""
    caplog.set_level("WARNING")
    check_local("/data/spool", "22 1 8:1 / /data rw - tmpfs tmpfs rw\n")
    assert "spool-in-memory path='/data/spool' type=tmpfs" in caplog.text
    caplog.clear()
    check_local("/data/spool", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert not caplog.records


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
