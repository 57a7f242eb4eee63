"""Under which names the mirror puts files that were renamed while they were queued."""

from __future__ import annotations

import pytest
from tests.engine_harness import Cluster
from tests.unit.engine_write.test_plain_and_reports import SESSION, plain_file, queue

from ckptgate.ports.spool import ROOT_INO, PendingKind, PendingRow, PlainOpKind


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
