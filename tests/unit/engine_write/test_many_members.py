"""An attempt of many members: store calls grow with files and members, each counted once."""

from __future__ import annotations

import blake3
import pytest
from tests.engine_harness import JOB, RUN, Cluster, StagedNode

from ckptgate.engine.turns import Turns
from ckptgate.model.documents import EntryType, FileEntry, Member, Vote, encode
from ckptgate.model.layout import data_key, full_key, member_key, vote_key
from ckptgate.testing.faults import FaultPlan, FaultyStore

ATTEMPT = "step-1.0"
FILES = 3


def simulated(count: int) -> list[str]:
    return [f"n{n}-{n:08x}" for n in range(count)]


def register(cluster: Cluster, members: list[str]) -> None:
    for member in members:
        document = Member(attempt=ATTEMPT, member=member, host="n", joined_at=cluster.clock.now())
        cluster.store.create(member_key(RUN, ATTEMPT, member), encode(document))


def vote(cluster: Cluster, members: list[str], *, is_final: bool) -> None:
    n = 1 if is_final else 0
    for member in members:
        key = data_key(ATTEMPT, member, 1)
        data = member.encode()
        cluster.store.create(full_key(RUN, key), data)
        entry = FileEntry(
            path=f"{member}.txt",
            type=EntryType.FILE,
            mode=0o644,
            mtime_ns=1,
            size=len(data),
            digest=blake3.blake3(data).hexdigest(),
            key=key,
        )
        said = Vote(
            attempt=ATTEMPT,
            member=member,
            n=n,
            is_final=is_final,
            seal_index=1 if is_final else -1,
            entries=(entry,),
        )
        cluster.store.create(vote_key(RUN, ATTEMPT, member, n), encode(said))


class Counted:
    """A real node and how often it called the store."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self.plan = FaultPlan(at=0)
        self.node: StagedNode = cluster.node(host, store=FaultyStore(cluster.store, self.plan))
        self.row = self.node.begin("step-1", job=JOB)
        for n in range(FILES):
            self.node.write(self.row, f"{host}/{n}.txt", b"%d" % n, rank=0)


def calls_of_a_commit(cluster: Cluster, count: int) -> dict[str, int]:
    """Store calls of the node that seals and of one that doesn't, with *count* others beside."""
    first, other = Counted(cluster, "a"), Counted(cluster, "b")
    for each in (first, other):
        each.node.step()
    others = simulated(count)
    register(cluster, others)
    vote(cluster, others, is_final=False)
    first.node.event(first.row, "rename")
    for voters in (others[: count // 2], others[count // 2 :], []):
        for _ in range(3):
            first.node.step()
            other.node.step()
            cluster.clock.advance(0.3)
        vote(cluster, voters, is_final=True)
    for _ in range(20):
        cluster.clock.advance(count / 500)
        first.node.step()
        other.node.step()
        if cluster.state().attempts[ATTEMPT].is_published:
            break
    cluster.check_invariants()
    assert len(cluster.files("step-1")) == count + 2 * FILES
    for each in (first, other):
        each.node.step()
        assert str(each.node.fresh(each.row).state) == "committed"
    return {"first": first.plan.count, "other": other.plan.count}


@pytest.mark.parametrize(
    "count", [0, 16, 256, pytest.param(4096, marks=[pytest.mark.full, pytest.mark.slow])]
)
def test_store_calls_grow_with_members_and_files_never_with_their_product(
    cluster: Cluster, count: int
) -> None:
    calls = calls_of_a_commit(cluster, count)
    # Listed twice, read once; each of two votes once, and once more each that isn't there yet.
    assert calls["first"] <= 100 + 3 * FILES + 8 * count
    # Who doesn't decide asks nobody: else all members together asked for the square.
    assert calls["other"] <= 100 + 3 * FILES


def test_a_member_that_looks_for_moves_reads_only_the_movers(cluster: Cluster) -> None:
    """DESIGN rule 3: the tree that a final vote speaks of has all renames in it."""
    a, b = Counted(cluster, "a"), Counted(cluster, "b")
    for each in (a, b):
        each.node.step()
    cluster.settle(rounds=3)
    assert a.node.membership.refresh_shared(a.row.id)
    source = a.node.raw.child(a.row.root, "b")
    assert source is not None
    a.node.raw.unlink(a.row.root, "b")
    a.node.raw.link(a.row.root, "moved", source.ino)
    queue(a.node, a.row.id, "rename", "b", "moved")
    queue(a.node, a.row.id, "mkdir", "made", "")
    cluster.settle(rounds=2)
    before = b.plan.count
    assert b.node.membership.refresh_moves(b.node.fresh(b.row))
    assert b.plan.count - before == 4
    assert "moved/0.txt" in b.node.tree(b.row)
    a.node.event(a.row, "rename")
    cluster.settle()
    assert "moved/0.txt" in cluster.files("step-1")
    assert not any(path.startswith("b/") for path in cluster.files("step-1"))


def queue(node: StagedNode, attempt: int, op: str, path: str, to: str) -> None:
    from ckptgate.ports.spool import NameOpRow

    node.raw.add_name_op(NameOpRow(id=0, attempt=attempt, op=op, path=path, to=to, mode=0o755))


# Turns


def turns(member: str, members: list[str]) -> Turns:
    return Turns(
        member=member,
        member_ids=lambda run, attempt: members,
        first_wait_s=5.0,
        doubled_until_s=600.0,
    )


def test_who_is_named_first_acts_at_once_and_asks_nobody() -> None:
    def asked(run: str, attempt: str) -> list[str]:
        raise AssertionError("listed")

    mine = Turns(member="a", member_ids=asked, first_wait_s=5.0, doubled_until_s=600.0)
    assert mine.is_mine(RUN, ATTEMPT, "a", 0.0)
    assert not mine.is_mine(RUN, ATTEMPT, "b", 4.9)


def test_few_members_follow_soon_and_all_in_the_end() -> None:
    """I12: any survivor finishes; but not all 4,096 read what all 4,096 wrote."""
    members = simulated(512)
    everybody = [turns(member, members) for member in members]

    def acting(waited_s: float) -> int:
        return sum(each.is_mine(RUN, ATTEMPT, members[0], waited_s) for each in everybody)

    assert [acting(s) for s in (0.0, 5.0, 10.0, 20.0, 599.0)] == [1, 2, 3, 4, 8]
    assert acting(900.0) < len(members)
    assert acting(1200.0) == len(members)


def test_one_that_has_no_part_in_it_has_a_turn_too() -> None:
    members = simulated(2)
    stranger = turns("stranger-00000000", members)
    assert not stranger.is_mine(RUN, ATTEMPT, members[0], 4.0)
    assert stranger.is_mine(RUN, ATTEMPT, members[0], 10.0)


def test_the_order_is_not_the_same_for_every_attempt() -> None:
    """Else one member would do all the work of a job whose first one is slow."""
    members = simulated(32)
    second = set()
    for n in range(32):
        second |= {m for m in members if turns(m, members).is_mine(RUN, f"step-{n}.0", "", 5.0)}
    assert len(second) > 8
