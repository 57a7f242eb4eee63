"""What holds at the CLOSE holds for ever: who registers after it neither delays nor undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine_harness import JOB, RUN, Cluster, StagedNode

from ckptgate.engine.manifests import load_manifest
from ckptgate.model.documents import (
    EntryType,
    Evidence,
    FileEntry,
    Manifest,
    Member,
    Vote,
    decode,
    digest_of,
    encode,
)
from ckptgate.model.entries import Close, LogRecord
from ckptgate.model.layout import data_key, full_key, log_prefix, member_key, vote_key
from ckptgate.model.states import AttemptState
from ckptgate.ports.store import DigestedFile
from ckptgate.testing.faults import CrashError, FaultPlan, FaultyStore

ATTEMPT = "step-1.0"
GHOST = "ghost-0000abcd"


class CallsAfterClose(FaultyStore):
    """Something happens at once after the CLOSE came into the log; then the process dies or not."""

    def __init__(self, cluster: Cluster, action: Callable[[], None], *, dies: bool) -> None:
        super().__init__(cluster.store, FaultPlan(at=0))
        self._action = action
        self._dies = dies
        self.is_dead = False

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if self.is_dead or not key.startswith(log_prefix(RUN)):
            return
        if isinstance(decode(data, LogRecord, subject=key).entry, Close):
            self._action()
            self.is_dead = self._dies
            if self._dies:
                raise CrashError


def register(cluster: Cluster, member: str = GHOST) -> None:
    """A member whose registration was under way at the CLOSE."""
    document = Member(
        attempt=ATTEMPT, member=member, host="ghost", joined_at=cluster.clock.now(), ranks=(7,)
    )
    cluster.store.create(member_key(RUN, ATTEMPT, member), encode(document))


def vote(cluster: Cluster, path: str, data: bytes, **evidence: Any) -> None:
    """That member votes, finally, for one file."""
    key = data_key(ATTEMPT, GHOST, 1)
    local = cluster.tmp / "ghost"
    local.write_bytes(data)
    digest = digest_of(data)
    source = DigestedFile(
        path=str(local), size=len(data), digest=digest, chunks=bytes.fromhex(digest), may_link=False
    )
    cluster.store.put(full_key(RUN, key), source)
    entry = FileEntry(
        path=path,
        type=EntryType.FILE,
        mode=0o644,
        mtime_ns=0,
        size=len(data),
        digest=digest,
        key=key,
        evidence=Evidence(**evidence),
    )
    document = Vote(
        attempt=ATTEMPT, member=GHOST, n=0, is_final=True, seal_index=1, entries=(entry,)
    )
    cluster.store.create(vote_key(RUN, ATTEMPT, GHOST, 0), encode(document))


def two_nodes_save(cluster: Cluster, late: Callable[[], None], *, dies: bool) -> StagedNode:
    """Both ranks commit; *late* happens between the CLOSE and the COMMIT; who is still there."""
    cluster_store = CallsAfterClose(cluster, late, dies=dies)
    a, b = cluster.node("a", store=cluster_store), cluster.node("b")
    rows = {node: node.begin("step-1", job=JOB) for node in (a, b)}
    for rank, node in enumerate((a, b)):
        node.write(rows[node], f"{node.host}.txt", node.host.encode(), rank=rank)
        node.commit(rows[node], rank, 2)
    for _ in range(20):
        try:
            a.step()
        except CrashError:
            a.close()
            cluster.nodes.pop("a")
            break
        if b.fresh(rows[b]).attempt and cluster.state().current:
            break
        b.step()
        cluster.clock.advance(1.0)
    cluster.settle(b)
    return b


def check_committed(cluster: Cluster, b: StagedNode, *extra: str) -> Manifest:
    cluster.check_invariants()
    state = cluster.state()
    assert state.current == {"step-1": ATTEMPT}
    assert sorted(cluster.files("step-1")) == ["a.txt", "b.txt", *extra]
    assert [row.state for row in b.raw.attempts(run=RUN)] == [AttemptState.COMMITTED]
    return load_manifest(cluster.store, RUN, ATTEMPT, state.attempts[ATTEMPT].manifest)


@pytest.mark.parametrize("dies", [False, True], ids=["goes-on", "dies"])
def test_nobody_waits_for_a_member_that_registers_after_the_close(
    cluster: Cluster, dies: bool
) -> None:
    """I12: neither who appended the CLOSE nor a survivor, though that member never votes."""
    b = two_nodes_save(cluster, lambda: register(cluster), dies=dies)
    assert GHOST not in check_committed(cluster, b).members


@pytest.mark.parametrize("dies", [False, True], ids=["goes-on", "dies"])
@pytest.mark.parametrize(
    ("path", "evidence"),
    [("a.txt", {}), ("x.pt", {"problem": "torn"}), ("x.bin", {"has_hole": True})],
    ids=["contradicts", "is-damaged", "has-a-hole"],
)
def test_a_late_vote_that_does_not_fit_is_left_out(
    cluster: Cluster, dies: bool, path: str, evidence: dict[str, Any]
) -> None:
    """I1, I12: it neither undoes what was whole nor gets into it."""

    def late() -> None:
        cluster.clock.advance(0.1)
        register(cluster)
        vote(cluster, path, b"something else", **evidence)

    b = two_nodes_save(cluster, late, dies=dies)
    assert GHOST not in check_committed(cluster, b).members
    assert cluster.files("step-1")["a.txt"] == b"a"


def test_a_late_vote_that_fits_is_taken(cluster: Cluster) -> None:
    """I6: all final votes that are there at the COMMIT are in the manifest."""

    def late() -> None:
        cluster.clock.advance(0.1)
        register(cluster)
        vote(cluster, "ghost.txt", b"late, but whole")

    b = two_nodes_save(cluster, late, dies=True)
    assert GHOST in check_committed(cluster, b, "ghost.txt").members


def test_a_member_that_registers_before_the_close_and_never_votes_is_waited_for(
    cluster: Cluster,
) -> None:
    """I6: before the CLOSE its files may be part of the checkpoint."""
    a = cluster.node("a")
    row = a.begin("step-1")
    a.write(row, "a.txt", b"a", rank=0)
    a.step()
    register(cluster)
    a.event(row, "rename")
    cluster.settle(rounds=20)
    assert cluster.state().current == {}
    assert any(GHOST in line for line in a.fresh(row).missing)
