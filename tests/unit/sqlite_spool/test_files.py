"""Spool files: rows, bytes, and what nothing refers to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sqlite_spool.kit import attempt_row, node

from ckptgate.errors import (
    IntegrityError,
    MissingError,
    RefusedError,
    UnusableError,
)
from ckptgate.model.documents import Evidence
from ckptgate.model.states import FileState
from ckptgate.ports.spool import (
    WRITERS_META,
    FileRow,
    HandleRow,
    LocalBytes,
    NameOpRow,
    NodeKind,
    NodeRow,
)


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
