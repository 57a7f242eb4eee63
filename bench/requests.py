"""Store requests of a commit, counted: they grow with files and with members, not with both.

One real publisher decides a checkpoint of F files; the other members are there as the documents
that they would have written. What F files cost beside M members beyond what each costs alone is the
product's share. With a few real members, too, the requests of all nodes are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.engine_harness import RUN, Cluster, StagedNode

from bench import mounts
from bench.plan import Plan
from bench.report import Figure, spread
from ckptgate.model.documents import Member, Vote, encode
from ckptgate.model.fold import AttemptView
from ckptgate.model.layout import member_key, vote_key
from ckptgate.testing.faults import FaultPlan, FaultyStore

__all__ = ["run"]

_Condition: TypeAlias = Callable[[], bool]

ATTEMPT = "step-1.0"
FEW_FILES = 8
MANY_FILES = 64
REAL_MEMBERS = (1, 4, 16)
STEPS_MAX = 400


@dataclass(frozen=True, slots=True)
class _Counted:
    """A node and what it has asked of the store."""

    node: StagedNode
    plan: FaultPlan


def run(plan: Plan) -> Iterator[Figure]:
    """Requests by numbers of files and members."""
    most = plan.sizes.members
    counts = {
        (files, members): _deciding(plan.memory.path, files, members)
        for files in (FEW_FILES, MANY_FILES)
        for members in dict.fromkeys((1, max(most // 64, 2), most))
    }
    for (files, members), count in counts.items():
        title = f"{files} files, {members} members: the deciding node"
        each = count / (files + members)
        yield spread("requests", title, [count], "calls", note=f"{each:.1f} a file or member")
    shared = counts[MANY_FILES, most] - counts[FEW_FILES, most]
    shared -= counts[MANY_FILES, 1] - counts[FEW_FILES, 1]
    product = (MANY_FILES - FEW_FILES) * (most - 1)
    title = "calls for each pair of a file and a member"
    yield spread("requests", title, [shared / product], "calls", at_most=0.01)
    for members in REAL_MEMBERS:
        if members > most:
            continue
        count = _together(plan.memory.path, FEW_FILES, members)
        title = f"{FEW_FILES} files each, {members} real members: all nodes"
        note = f"{count / (members * (FEW_FILES + 1)):.1f} a file or member"
        yield spread("requests", title, [count], "calls", note=note)


def _deciding(place: Path, files: int, members: int) -> int:
    """Requests of the one real member, from its first file until the checkpoint is published."""
    with mounts.scratch(place) as base:
        cluster = Cluster(base)
        counted = _node(cluster, "a")
        _stage(counted.node, files)
        others = [f"ghost{number}-{number:08x}" for number in range(1, members)]
        node = counted.node
        _until(cluster, [node], "begun", lambda: _is_begun(cluster))
        for member in others:
            _register(cluster, member)
        node.commit(node.raw.attempts(run=RUN)[0], is_all=True)
        _until(cluster, [node], "sealed", lambda: _seal_index(cluster) >= 0)
        for member in others:
            _vote(cluster, member, _seal_index(cluster))
        _until(cluster, [node], "published", lambda: _is_published(cluster))
        cluster.close()
        return counted.plan.count


def _together(place: Path, files: int, members: int) -> int:
    """Requests of all members, each of which has *files* files of its own."""
    with mounts.scratch(place) as base:
        cluster = Cluster(base)
        nodes = [_node(cluster, f"n{number}") for number in range(members)]
        for rank, counted in enumerate(nodes):
            _stage(counted.node, files, rank=rank, world_size=members)
        for rank, counted in enumerate(nodes):
            row = counted.node.raw.attempts(run=RUN)[0]
            counted.node.commit(row, rank, members)
        everybody = [counted.node for counted in nodes]
        _until(cluster, everybody, "published", lambda: _is_published(cluster))
        cluster.close()
        return sum(counted.plan.count for counted in nodes)


def _node(cluster: Cluster, host: str) -> _Counted:
    plan = FaultPlan(at=0)
    return _Counted(cluster.node(host, store=FaultyStore(cluster.store, plan)), plan)


def _stage(node: StagedNode, files: int, *, rank: int = 0, world_size: int | None = None) -> None:
    row = node.begin("step-1", world_size=world_size)
    for number in range(files):
        node.write(row, f"r{rank}-{number}.bin", b"%d" % number, rank=rank)


def _is_begun(cluster: Cluster) -> bool:
    members = member_key(RUN, ATTEMPT, "x").rpartition("/")[0]
    return bool(cluster.store.children(members))


def _register(cluster: Cluster, member: str) -> None:
    host = member.partition("-")[0]
    document = Member(attempt=ATTEMPT, member=member, host=host, joined_at=cluster.clock.now())
    cluster.store.create(member_key(RUN, ATTEMPT, member), encode(document))


def _vote(cluster: Cluster, member: str, seal_index: int) -> None:
    document = Vote(attempt=ATTEMPT, member=member, n=0, is_final=True, seal_index=seal_index)
    cluster.store.create(vote_key(RUN, ATTEMPT, member, 0), encode(document))


def _until(cluster: Cluster, nodes: list[StagedNode], what: str, is_true: _Condition) -> None:
    """Step the nodes until it is so."""
    for _ in range(STEPS_MAX):
        for node in nodes:
            node.step()
        if is_true():
            return
        cluster.clock.advance(0.1)
    msg = f"{ATTEMPT} is not {what}"
    raise TimeoutError(msg)


def _view(cluster: Cluster) -> AttemptView | None:
    return cluster.state().attempts.get(ATTEMPT)


def _seal_index(cluster: Cluster) -> int:
    view = _view(cluster)
    return -1 if view is None else view.seal_index


def _is_published(cluster: Cluster) -> bool:
    view = _view(cluster)
    return view is not None and view.is_published
