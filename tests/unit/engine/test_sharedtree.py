"""One namespace for an attempt on all nodes: directories and closed files of the other members."""

from __future__ import annotations

import os

import msgspec
import pytest
from tests.unit.engine.kit import JOB, SESSION

from ckptgate.errors import IntegrityError
from ckptgate.model.documents import encode
from ckptgate.model.layout import names_key, vote_key
from ckptgate.ports.spool import LocalBytes, NameOpRow


@pytest.fixture
def pair(make_node):
    """Two nodes that have joined one attempt: ((node, row), (node, row))."""
    a, b = make_node("a"), make_node("b")
    return tuple((n, n.membership.join(n.begin("step-1"))) for n in (a, b))


def tell(node, row, op, path, to="", mode=0o755):
    node.spool.add_name_op(NameOpRow(id=0, attempt=row.id, op=op, path=path, to=to, mode=mode))
    return node.membership.send_name_ops(node.spool.attempt(row.id))


def test_a_directory_of_one_node_takes_files_of_the_other(pair):
    (a, row_a), (b, row_b) = pair
    tell(a, row_a, "mkdir", "model/shards", mode=0o750)
    assert b.catalog.refresh_shared(row_b.id)
    assert not b.catalog.refresh_shared(row_b.id)
    assert dict(b.spool.tree(row_b.id))["model/shards"].mode == 0o750
    b.stage(row_b, "model/shards/1.pt", b"one")
    b.vote(row_b, is_final=False)
    assert a.catalog.refresh_shared(row_a.id)
    assert a.read(row_a, "model/shards/1.pt") == b"one"


def test_a_renamed_directory_takes_the_other_nodes_files_along(pair):
    (a, row_a), (b, row_b) = pair
    tell(a, row_a, "mkdir", "tmp/inner")
    b.catalog.refresh_shared(row_b.id)
    file = b.stage(row_b, "tmp/inner/x", b"x")
    tell(a, row_a, "rename", "tmp/inner", to="tmp/final")
    tell(a, row_a, "rename", "tmp", to="out")
    b.catalog.refresh_shared(row_b.id)
    assert b.paths(row_b) == {"out": "dir", "out/final": "dir", "out/final/x": "file"}
    assert b.file_at(row_b, "out/final/x") == file


def test_a_rename_onto_a_directory_that_is_there_merges(pair):
    (a, row_a), (b, row_b) = pair
    b.stage(row_b, "new/kept", b"b")
    b.stage(row_b, "new/sub/kept", b"b")
    b.stage(row_b, "old/moved", b"b")
    b.stage(row_b, "old/sub/moved", b"b")
    tell(a, row_a, "rename", "old", to="new")
    b.catalog.refresh_shared(row_b.id)
    files = {path for path, kind in b.paths(row_b).items() if kind == "file"}
    assert files == {"new/kept", "new/moved", "new/sub/kept", "new/sub/moved"}
    assert "old" not in b.paths(row_b)


def test_removing_a_directory_never_removes_local_files(pair):
    """I11."""
    (a, row_a), (b, row_b) = pair
    tell(a, row_a, "mkdir", "d")
    tell(a, row_a, "mkdir", "empty")
    b.catalog.refresh_shared(row_b.id)
    b.stage(row_b, "d/x", b"x")
    tell(a, row_a, "rmdir", "d")
    tell(a, row_a, "rmdir", "empty")
    b.catalog.refresh_shared(row_b.id)
    assert set(b.paths(row_b)) == {"d", "d/x"}


@pytest.mark.parametrize(
    ("op", "path", "to"),
    [
        ("mkdir", "x/below", ""),
        ("rename", "gone", "x/below"),
        ("rename", "gone", "x"),
        ("rmdir", "x", ""),
        ("rmdir", "gone", ""),
        ("rename", "d", "d/inside"),
        ("rename", "d", "x"),
    ],
)
def test_an_operation_in_conflict_with_a_local_file_leaves_it(pair, op, path, to):
    """I11."""
    (a, row_a), (b, row_b) = pair
    b.stage(row_b, "x", b"x")
    b.stage(row_b, "d/y", b"y")
    tell(a, row_a, op, path, to)
    b.catalog.refresh_shared(row_b.id)
    assert (b.read(row_b, "x"), b.read(row_b, "d/y")) == (b"x", b"y")


def test_a_renamed_checkpoint_is_found_under_its_new_name(make_node, pair):
    (a, row_a), (b, row_b) = pair
    tell(a, row_a, "root-rename", "", to="final-1")
    found = b.catalog.find_open("run", row_b.run_ino, "final-1", JOB)
    assert found is not None
    assert (found.id, found.name) == (row_b.id, "final-1")
    # A third node, that never joined, finds it once it is sealed under that name.
    a.seal(row_a, name="final-1")
    c = make_node("c")
    found = c.catalog.find_open("run", c.directory(1, "run"), "final-1", JOB)
    assert found is not None
    assert found.attempt == row_a.attempt


def test_a_local_file_wins_over_anothers(pair):
    (a, row_a), (b, row_b) = pair
    a.stage(row_a, "x", b"of a")
    b.stage(row_b, "x", b"of b")
    a.vote(row_a)
    assert not b.catalog.refresh_shared(row_b.id)
    assert b.read(row_b, "x") == b"of b"


def test_an_imported_file_is_not_in_our_vote(pair):
    (a, row_a), (b, row_b) = pair
    file = a.stage(row_a, "x", b"1")
    a.vote(row_a)
    b.catalog.refresh_shared(row_b.id)
    imported = b.spool.file(b.file_at(row_b, "x"))
    assert imported.local is LocalBytes.NONE
    assert b.membership.is_imported(row_b, imported)
    assert not a.membership.is_imported(row_a, a.spool.file(file))
    assert b.vote(row_b).entries == ()


def test_an_imported_file_follows_its_members_newest_vote(pair):
    (a, row_a), (b, row_b) = pair
    a.stage(row_a, "x", b"old")
    a.stage(row_a, "y", b"y")
    a.vote(row_a, is_final=False)
    b.catalog.refresh_shared(row_b.id)
    assert b.read(row_b, "x") == b"old"
    for path in ("x", "y"):
        a.spool.unlink(row_a.root, path)
    a.stage(row_a, "x", b"new")
    a.vote(row_a, is_final=False)
    assert b.catalog.refresh_shared(row_b.id)
    assert set(b.paths(row_b)) == {"x"}
    assert b.read(row_b, "x") == b"new"


def test_an_imported_file_is_verified_before_it_is_served(pair):
    """I13."""
    (a, row_a), (b, row_b) = pair
    file = a.stage(row_a, "x", b"good")
    a.vote(row_a)
    b.catalog.refresh_shared(row_b.id)
    key = a.spool.file(file).key
    read_into = b.store.read_into

    def changed(k, offset, view):
        count = read_into(k, offset, view)
        if k == key:
            view[:count] = b"evil"
        return count

    b.store.read_into = changed
    with pytest.raises(IntegrityError, match="run/step-1/x"):
        b.catalog.fetch(b.file_at(row_b, "x"), 0, 4)


def test_operations_are_numbered_densely_and_sent_once(pair):
    (a, row_a), (b, row_b) = pair
    for i in range(3):
        row_a = tell(a, row_a, "mkdir", f"d{i}")
    assert row_a.names_count == 3
    assert a.spool.name_ops(row_a.id) == []
    b.catalog.refresh_shared(row_b.id)
    assert set(b.paths(row_b)) == {"d0", "d1", "d2"}
    # After a crash between the store and the spool the same bytes are sent again.
    a.spool.update_attempt(row_a.id, names_count=2)
    assert tell(a, row_a, "mkdir", "d2").names_count == 3


def test_operations_of_a_session_stay_at_home(make_node):
    a = make_node("a")
    row = a.membership.join(a.begin("step-1", SESSION))
    assert tell(a, row, "mkdir", "d").names_count == 0
    assert a.spool.name_ops(row.id) == []
    assert a.store.children(f"run/.ckptgate/attempts/{row.attempt}/names") == []


@pytest.mark.parametrize("path", ["../../etc", "/abs", "a/../../b"])
def test_a_hostile_operation_is_refused_by_name(pair, path):
    """I13."""
    (a, row_a), (b, row_b) = pair
    tell(a, row_a, "mkdir", "d")
    raw = msgspec.json.decode(a.store.get(names_key("run", row_a.attempt, a.member, 0)))
    raw |= {"path": path, "n": 1}
    key = names_key("run", row_a.attempt, a.member, 1)
    a.store.create(key, msgspec.json.encode(raw) + b"\n")
    with pytest.raises(IntegrityError, match=r"names/.*/1\.json"):
        b.catalog.refresh_shared(row_b.id)


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_vote_is_refused_by_name(pair, cut):
    """I13."""
    (a, row_a), (b, row_b) = pair
    a.stage(row_a, "x", b"1")
    data = encode(a.vote(row_a))
    key = vote_key("run", row_a.attempt, a.member, 1)
    a.store.create(key, data[:-cut])
    with pytest.raises(IntegrityError, match=r"votes/.*/1\.json"):
        b.catalog.refresh_shared(row_b.id)


def test_a_vote_that_names_foreign_bytes_is_refused_by_name(pair):
    """I13: a vote can't make the log or another document readable as a file."""
    (a, row_a), (b, row_b) = pair
    a.stage(row_a, "x", b"1")
    raw = msgspec.json.decode(encode(a.vote(row_a)))
    raw["n"] = 1
    raw["entries"][0]["key"] = ".ckptgate/format.json"
    key = vote_key("run", row_a.attempt, a.member, 1)
    a.store.create(key, msgspec.json.encode(raw) + b"\n")
    with pytest.raises(IntegrityError, match=r"votes/.*/1\.json"):
        b.catalog.refresh_shared(row_b.id)


def test_two_hundred_files_are_imported_at_once(pair):
    (a, row_a), (b, row_b) = pair
    for i in range(200):
        a.stage(row_a, f"d{i % 7}/f{i}", os.urandom(3))
    a.vote(row_a)
    assert b.catalog.refresh_shared(row_b.id)
    assert b.paths(row_b) == a.paths(row_a)
