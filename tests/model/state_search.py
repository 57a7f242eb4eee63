"""Breadth-first search of the protocol model's states, and what must stay reachable in it (I12)."""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.model.commit_protocol import Model
from tests.model.log_rules import (
    ABORT,
    ABORTED,
    CLOSED,
    COMMIT,
    COMMITTED,
    SEALED,
    Folded,
    fold,
    is_superseded,
)
from tests.model.protocol_world import Scenario, World


@dataclass(kw_only=True)
class Result:
    """A finished search.

    Attributes:
        states, edges: how many were visited.
        commits, aborts: states in which something is committed or aborted.
        violations: what was broken -> the shortest trace to it.
        is_exhausted: nothing is left to visit.
    """

    states: int = 0
    edges: int = 0
    commits: int = 0
    aborts: int = 0
    violations: dict[str, list[str]] = field(default_factory=dict)
    is_exhausted: bool = True


def explore(
    scenario: Scenario, *, limit: int = 3_000_000, until_broken: bool = False, live: bool = True
) -> Result:
    """Visit every state breadth first; then check I12 on the graph if *live*."""
    model = Model(scenario)
    gc.disable()  # Millions of tuples without a cycle: collecting takes longer than the search.
    try:
        return _explore(model, limit, until_broken=until_broken, live=live)
    finally:
        gc.enable()


def _explore(model: Model, limit: int, *, until_broken: bool, live: bool) -> Result:
    start = model.start()
    ids: dict[World, int] = {start: 0}
    worlds, parents, labels = [start], array("l", [-1]), ["start"]
    edges = Edges()
    queue: deque[int] = deque([0])
    result = Result()
    while queue:
        here = queue.popleft()
        world = worlds[here]
        for broken in model.broken(world):
            result.violations.setdefault(broken, trace(here, parents, labels))
        if (result.violations and until_broken) or len(worlds) > limit:
            result.is_exhausted = False
            break
        for actor, label, after in model.successors(world):
            there = ids.get(after)
            if there is None:
                there = ids[after] = len(worlds)
                worlds.append(after)
                parents.append(here)
                labels.append(label)
                queue.append(there)
            edges.add(here, there, actor)
    result.states, result.edges = len(worlds), len(edges)
    for world in worlds:
        kinds = {entry[0] for entry in world.log}
        result.commits += COMMIT in kinds
        result.aborts += ABORT in kinds
    if live and result.is_exhausted:
        for broken, at in stuck(model, worlds, edges):
            result.violations.setdefault(broken, trace(at, parents, labels))
    return result


def trace(at: int, parents: array, labels: list[str]) -> list[str]:
    steps: list[str] = []
    while parents[at] >= 0:
        steps.append(labels[at])
        at = parents[at]
    return steps[::-1]


class Edges:
    """The graph, compact: source, target, actor."""

    def __init__(self) -> None:
        self.sources, self.targets, self.actors = array("l"), array("l"), array("b")

    def add(self, source: int, target: int, actor: int) -> None:
        self.sources.append(source)
        self.targets.append(target)
        self.actors.append(actor)

    def __len__(self) -> int:
        return len(self.sources)

    def leads_to(self, goals: bytearray, actor: int | None) -> bytearray:
        """The states from which *goals* can be reached, by steps of *actor* alone if given."""
        count = len(goals)
        heads, following = array("l", [-1]) * count, array("l", [-1]) * len(self)
        for edge, target in enumerate(self.targets):
            if actor is None or self.actors[edge] == actor:
                following[edge] = heads[target]
                heads[target] = edge
        reached = bytearray(goals)
        stack = [at for at in range(count) if goals[at]]
        while stack:
            edge = heads[stack.pop()]
            while edge >= 0:
                source = self.sources[edge]
                if not reached[source]:
                    reached[source] = 1
                    stack.append(source)
                edge = following[edge]
        return reached


def stuck(model: Model, worlds: list[World], edges: Edges) -> Iterator[tuple[str, int]]:
    """I12: states from which what must still be possible isn't.

    (a) While no deadline has aborted the newest generation's save, its COMMIT can be reached.
    (b) Once the store has all that closure needs (every vote, or a CLOSE), each member alone can
        reach COMMIT (of it, or of a newer one of that name), whatever the other was doing when it
        stopped for ever.
    """
    last = model.generations[-1]
    flaw = model.flaw

    def phases_of(world: World) -> set[int]:
        """Of all attempts that the newest generation made."""
        phases = fold(world.log, flaw).phases
        return {phases[a] for a, made_by in enumerate(world.intents) if made_by == last + 1}

    goals = bytearray(COMMITTED in phases_of(world) for world in worlds)
    reached = edges.leads_to(goals, None)
    for at, world in enumerate(worlds):
        aborts = any(_will_abort(world, member) for member in (0, 1))
        if not reached[at] and not aborts and ABORTED not in phases_of(world):
            yield "I12 the living generation can no longer commit", at
            break
    for job in model.jobs:
        for member in (0, 1):
            yield from _stuck_alone(model, worlds, edges, job, member)


def _stuck_alone(
    model: Model, worlds: list[World], edges: Edges, job: int, member: int
) -> Iterator[tuple[str, int]]:
    def view(world: World) -> tuple[int, Folded]:
        pair = world.parts[2 * job], world.parts[2 * job + 1]
        return max(p.attempt for p in pair), fold(world.log, model.flaw)

    goals = bytearray(len(worlds))
    for at, world in enumerate(worlds):
        attempt, folded = view(world)
        goals[at] = attempt >= 0 and (
            folded.phases[attempt] == COMMITTED or is_superseded(folded, attempt)
        )
    reached = edges.leads_to(goals, member)
    for at, world in enumerate(worlds):
        attempt, folded = view(world)
        if attempt < 0 or reached[at] or folded.phases[attempt] not in {SEALED, CLOSED}:
            continue
        parts = model.parts_of(world, attempt)
        is_ready = folded.phases[attempt] == CLOSED or all(
            part.registered and part.vote >= 2 for part in parts
        )
        if is_ready and not is_superseded(folded, attempt) and not _will_abort(world, member):
            yield f"I12 member {member} alone can't finish what is whole", at
            return


def _will_abort(world: World, member: int) -> bool:
    """The member is about to write an ABORT whose deadline is over, or waits for its outcome."""
    plan, request = world.plans[member], world.pending[member]
    if plan is not None and plan[0] == "append":
        return bool(plan[1][0] == ABORT)
    return request is not None and request[1][0] == ABORT
