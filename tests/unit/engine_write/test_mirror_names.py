"""Under which names the mirror puts files that were renamed while they were queued."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine_harness import Cluster
from tests.unit.engine_write.test_plain_and_reports import SESSION, plain_file, queue

from ckptgate.ports.spool import ROOT_INO, NodeKind, PendingKind, PendingRow, PlainOpKind


@pytest.mark.parametrize("kind", [PendingKind.WHOLE, PendingKind.POINTER])
def test_a_file_that_got_a_held_name_is_not_put_there(cluster: Cluster, kind: PendingKind) -> None:
    """I8: queued as a live file, then renamed: its bytes are shown only once they are proved."""
    node = cluster.node("a")
    made = plain_file(node, "new.tmp", b"no container", is_named=False)
    queue(node, PlainOpKind.PUT, "new.tmp", ino=made.ino)
    queue(node, PlainOpKind.REMOVE, "new.tmp")
    node.raw.update_node(made.ino, plain_path="model.npz")
    node.raw.add_pending(
        PendingRow(
            id=0, parent=ROOT_INO, name="model.npz", ino=made.ino, kind=kind, job_key=SESSION
        )
    )
    for _ in range(3):
        node.step()
        cluster.clock.advance(10.0)
    assert node.raw.plain_ops() == []
    assert [entry.name for entry in cluster.store.plain_list("") if not entry.is_managed] == []


def test_a_file_that_was_renamed_is_put_under_each_name_in_its_order(cluster: Cluster) -> None:
    node = cluster.node("a")
    made = plain_file(node, "b.txt", b"1")
    queue(node, PlainOpKind.PUT, "a.txt", ino=made.ino)
    queue(node, PlainOpKind.REMOVE, "a.txt")
    queue(node, PlainOpKind.PUT, "b.txt", ino=made.ino)
    node.step()
    names = {entry.name for entry in cluster.store.plain_list("")}
    assert "b.txt" in names
    assert "a.txt" not in names


def test_a_file_is_not_copied_to_where_a_queued_rename_is_to_bring_its_directory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount renames while all files are looked through: the copy would be in the way."""
    node = cluster.node("a")
    plain_file(node, "first", b"1")
    inner = plain_file(node, "old/f", b"2", is_named=False)
    folder = node.raw.add_node(replace(node._node(NodeKind.DIR), plain_path="old"))
    node.raw.link(ROOT_INO, "old", folder.ino)
    node.raw.link(folder.ino, "f", inner.ino)
    cluster.store.plain_mkdir("old", 0o755)
    put, done = type(cluster.store).plain_put, []

    def put_and_rename(store: Any, path: str, *words: Any, **more: Any) -> None:
        done.append(path)
        put(store, path, *words, **more)
        if path == "first":
            node.raw.update_node(inner.ino, plain_path="new/f")
            queue(node, PlainOpKind.RENAME, "old", to="new")

    monkeypatch.setattr(type(cluster.store), "plain_put", put_and_rename)
    for _ in range(4):
        node.step()
        cluster.clock.advance(10.0)
    assert done == ["first", "new/f"]
    shown = [entry.name for entry in cluster.store.plain_list("") if not entry.is_managed]
    assert shown == ["first", "new"]
    assert "plain-skipped" not in node.kinds()


def test_what_is_written_and_closed_during_a_queued_copy_comes_with_the_next_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its close finds the copy still queued; the look at all files comes a minute later."""
    node = cluster.node("a")
    made = plain_file(node, "a.txt", b"1")
    node.step()
    put = type(cluster.store).plain_put

    def put_and_append(store: Any, path: str, source: str, **more: Any) -> None:
        put(store, path, source, **more)
        monkeypatch.undo()
        with open(source, "ab") as stream:
            stream.write(b" and 2")

    monkeypatch.setattr(type(cluster.store), "plain_put", put_and_append)
    queue(node, PlainOpKind.PUT, "a.txt", ino=made.ino)
    for _ in range(2):
        node.step()
    assert cluster.store.plain_read("a.txt", 0, 100) == b"1 and 2"
