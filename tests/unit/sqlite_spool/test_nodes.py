"""Nodes, their numbers and names."""

from __future__ import annotations

import pytest
from tests.unit.sqlite_spool.kit import attempt_row, make, node

from ckptgate.errors import (
    ExistsError,
    InvalidNameError,
    MissingError,
    UnusableError,
    UsageError,
)
from ckptgate.ports.spool import (
    ROOT_INO,
    NodeKind,
    PendingKind,
    PendingRow,
)
from ckptgate_adapters.sqlite_spool import SqliteSpool


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
