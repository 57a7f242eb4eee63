"""A directory is renamed when another member's final vote is out: moved there too, or no commit."""

from __future__ import annotations

import pytest
from tests.engine_harness import JOB, Cluster, StagedNode

from ckptgate.model.moves import Move
from ckptgate.ports.spool import AttemptRow, NameOpRow

OTHER = "b-00000062"


def rename(node: StagedNode, row: AttemptRow, path: str, to: str) -> None:
    """As the mount does it, with the member's first operation."""
    spool, now = node.raw, node.fresh(row)
    with spool.transaction():
        source = spool.child(row.root, path)
        assert source is not None
        spool.unlink(row.root, path)
        spool.link(row.root, to, source.ino)
        spool.add_move(row.id, Move(member=node.member, n=now.names_count, path=path, to=to))
        spool.add_name_op(
            NameOpRow(id=0, attempt=row.id, op="rename", path=path, to=to, mode=0o755)
        )


@pytest.fixture
def voted(cluster: Cluster) -> tuple[StagedNode, AttemptRow, int]:
    """A node that is still writing, its checkpoint and its open file; the other one has voted."""
    a, b = cluster.node("a"), cluster.node("b")
    row, row_b = a.begin("step-1", job=JOB), b.begin("step-1", job=JOB)
    a.write(row, "tmp/a0.txt", b"a0", rank=0)
    b.write(row_b, "tmp/b.txt", b"b", rank=1)
    cluster.settle(rounds=4)
    file = a.write(row, "tmp/a1.txt", b"a1", rank=0, is_open=True)
    a.event(row, "rename")
    cluster.settle(rounds=4, tick_s=0.1)
    assert b.fresh(row_b).is_voted
    assert not a.fresh(row).is_voted
    return a, row, file


def test_who_has_voted_moves_its_files_and_votes_anew(
    cluster: Cluster, voted: tuple[StagedNode, AttemptRow, int]
) -> None:
    a, row, file = voted
    rename(a, row, "tmp", "final")
    a.close_file(file)
    cluster.settle()
    cluster.check_invariants()
    assert sorted(cluster.files("step-1")) == ["final/a0.txt", "final/a1.txt", "final/b.txt"]


def test_a_vote_that_stays_behind_is_not_committed(
    cluster: Cluster, voted: tuple[StagedNode, AttemptRow, int]
) -> None:
    """I1: neither half of the directory; the ABORT says who owes what."""
    a, row, file = voted
    rename(a, row, "tmp", "final")
    a.close_file(file)
    cluster.settle(a, rounds=5)
    assert cluster.state().current == {}
    owed = f"a vote of {OTHER} with the directories that {a.member} renamed"
    assert a.fresh(row).missing == (f"{owed} (owed by {OTHER} on b, ranks 1)",)
    for _ in range(100):
        a.step()
        cluster.clock.advance(cluster.settings.commit_deadline_s / 50)
    assert cluster.state().current == {}
    assert str(a.fresh(row).state) == "aborted"
    assert owed in a.fresh(row).missing[0]
