"""Exhaustive model of the commit protocol: every interleaving of two members, state by state.

The store is a decision log (put-if-absent slots), intents, member objects and votes. Members join,
register, vote, seal, close and commit; trainers write, rewrite and start anew as a second
generation. A request for a slot may land with its reply lost, land later, or never. A crash is a
member that is never scheduled again (the search covers every prefix) or one that forgets what it
was doing. What a state must keep is marked I1..I6 as in the design; I7 holds by construction (a log
is only ever appended to), I12 is checked on the finished graph by `state_search`.

`Scenario.flaw` builds in one mistake; each flaw must be found (`test_commit_protocol`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.model.log_rules import (
    ABORT,
    ABORTED,
    CLOSE,
    CLOSED,
    COMMIT,
    COMMITTED,
    COUNT,
    FENCE,
    K_MAX,
    OPEN,
    SEAL,
    SEALED,
    Entry,
    Folded,
    broken_by_log,
    fold,
    is_legal,
    is_superseded,
    put,
)
from tests.model.protocol_world import NETWORK, NO_PART, TRAINER, Part, Plan, Scenario, Step, World


class Model:
    """Successors and checks of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.flaw = scenario.flaw
        self.jobs = range(len(scenario.names))
        self.generations = scenario.generations[: len(scenario.names)]

    def start(self) -> World:
        parts = (Part(),) * (2 * len(self.jobs))
        first = (FENCE, 0, 1, 0)
        return World((first,), parts, (0,) * COUNT, (None, None), (None, None), (), ())

    def parts_of(self, world: World, attempt: int) -> tuple[Part, Part]:
        return (
            next((p for p in world.parts[::2] if p.attempt == attempt), NO_PART),
            next((p for p in world.parts[1::2] if p.attempt == attempt), NO_PART),
        )

    # -- what is wrong with a state -------------------------------------------------------------

    def broken(self, world: World) -> list[str]:
        found = list(broken_by_log(world.log, self.flaw))
        for kind, attempt, manifest, _ in world.log:
            if kind != COMMIT:
                continue
            if attempt in world.told_failed:
                found.append("I6 told that it failed, and it is committed")
            found += self._broken_manifest(world, attempt, dict(manifest))
        return found

    def _broken_manifest(
        self, world: World, attempt: int, manifest: dict[int, int]
    ) -> Iterator[str]:
        parts = self.parts_of(world, attempt)
        sealed = next((e[2][1] for e in world.log if e[0] == SEAL and e[1] == attempt), (0, 0))
        for member, part in enumerate(parts):
            version = manifest.get(member, 0)
            is_extra = member == 1 and self.scenario.event == "extra"
            if not version and not is_extra:
                yield f"I1 committed without the file of member {member}"
            if version > part.stored:
                yield f"I1 committed before the bytes of member {member} are in the store"
            if version < sealed[member] and (version or not is_extra):
                yield f"I1 committed an older version than was sealed (member {member})"
            # One that is only decided may land after CLOSE: it promises nothing yet.
            if part.vote == 2 and part.voted != version:
                yield f"I6 member {member} voted in time and is not in the manifest"
            if part.vote and part.file in {1, 3}:
                yield f"I6 member {member} writes on in what it voted for"

    # -- what can happen next -------------------------------------------------------------------

    def successors(self, world: World) -> Iterator[Step]:
        folded = fold(world.log, self.flaw)
        yield from self._network(world)
        for job in self.jobs:
            for member in (0, 1):
                yield from self._part_steps(world, folded, job, member)
        for member in (0, 1):
            if world.pending[member] is not None:
                yield from self._resolve(world, member)
            elif world.plans[member] is not None:
                yield from self._plan_steps(world, folded, member)
                if self.scenario.restarts:
                    idle = world._replace(plans=put(world.plans, member, None))
                    yield NETWORK, f"m{member} is killed and restarted", idle
            else:
                yield from self._new_plans(world, folded, member)

    def _network(self, world: World) -> Iterator[Step]:
        """A request that timed out lands later, or finds its slot taken."""
        for request in world.net:
            slot, entry = request
            rest = tuple(r for r in world.net if r != request)
            if slot == len(world.log):
                log = (*world.log, entry)
                yield NETWORK, f"{entry[0]} lands late", world._replace(net=rest, log=log)
            else:
                yield NETWORK, f"late {entry[0]} finds its slot taken", world._replace(net=rest)

    def _part_steps(self, world: World, folded: Folded, job: int, member: int) -> Iterator[Step]:
        at = 2 * job + member
        part = world.parts[at]
        who = f"g{job + 1} m{member}"

        def become(**changes: int) -> World:
            return world._replace(parts=put(world.parts, at, part._replace(**changes)))

        if part.attempt < 0:
            if self.generations[job] in folded.fenced and self._may_begin(world, folded, at):
                yield from self._join(world, folded, job, member)
            return
        phase = folded.phases[part.attempt]
        if not part.registered:
            yield member, f"{who} registers", become(registered=1)
        yield from self._trainer_steps(world, job, member, become)
        version = part.file // 2 if part.file in {2, 4} else 0
        if self.scenario.uploads and version > part.stored:
            yield member, f"{who} uploads v{version}", become(stored=version)
        is_stored = version > 0 and (part.stored == version or not self.scenario.uploads)
        stored = version if not self.scenario.uploads else part.stored
        if not part.registered or not is_stored:
            return
        if self.scenario.early_votes and part.early < version and not part.vote:
            yield member, f"{who} votes early for v{version}", become(early=version, stored=stored)
        has_seal = phase in {SEALED, CLOSED}
        is_committed_here = self.scenario.event == "explicit" and part.event and phase != ABORTED
        if not part.vote and (has_seal or is_committed_here):
            in_time = 2 if phase in {OPEN, SEALED} else 3
            vote = in_time if self.scenario.coarse else 1
            changes = {"vote": vote, "voted": version, "stored": stored}
            yield member, f"{who} decides its final vote for v{version}", become(**changes)
        elif part.vote == 1:
            in_time = phase in {OPEN, SEALED}
            changes = {"vote": 2 if in_time else 3}
            yield member, f"{who}: final vote in the store", become(**changes)

    def _may_begin(self, world: World, folded: Folded, at: int) -> bool:
        """Whether the part's own generation is done with what it saved before on that node."""
        job = at // 2
        if job == 0 or self.generations[job - 1] != self.generations[job]:
            return True
        before = world.parts[at - 2]
        return before.attempt >= 0 and folded.phases[before.attempt] >= COMMITTED

    def _join(self, world: World, folded: Folded, job: int, member: int) -> Iterator[Step]:
        """Join this generation's newest attempt of the name, or make the next one.

        An older generation that still runs may have made one in between, so the newest of all is
        not what is asked for.
        """
        name = self.scenario.names[job]
        made = [a for a in range(name * K_MAX, (name + 1) * K_MAX) if world.intents[a]]
        key = self.generations[job]
        own = [a for a in made if world.intents[a] == key + 1]
        if self.flaw == "join_only_the_highest":
            own = [a for a in made[-1:] if a in own]
        is_fenced = folded.fenced.index(key) + 1 < folded.generation
        joinable = {SEALED} if is_fenced else {OPEN, SEALED}
        intents = world.intents
        if own and folded.phases[own[-1]] in joinable:
            newest = own[-1]
        else:
            newest = made[-1] + 1 if made else name * K_MAX
            assert newest < (name + 1) * K_MAX, "more attempts than the model has room for"
            intents = put(intents, newest, key + 1)
        at = 2 * job + member
        part = Part(attempt=newest, file=1)
        if self.scenario.coarse:
            part = Part(attempt=newest, registered=1, file=2)
        label = f"g{job + 1} m{member} opens its file, joins attempt {newest}"
        yield member, label, world._replace(intents=intents, parts=put(world.parts, at, part))

    def _trainer_steps(
        self, world: World, job: int, member: int, become: Callable[..., World]
    ) -> Iterator[Step]:
        scenario = self.scenario
        pair = world.parts[2 * job], world.parts[2 * job + 1]
        part = pair[member]
        who = f"g{job + 1} rank {member}"
        if part.file in {1, 3} and (part.registered or member in scenario.away):
            yield TRAINER, f"{who} closes its file", become(file=part.file + 1)
        is_over = pair[0].event if scenario.event == "rename" else part.event
        may_write = not part.vote or self.flaw == "writes_after_final_vote"
        if scenario.rewrites and member == 1 and part.file == 2 and may_write and not is_over:
            yield TRAINER, f"{who} writes its file again", become(file=3)
        if part.event or part.file not in {2, 4}:
            return
        if scenario.event == "explicit":
            yield TRAINER, f"{who} commits", become(event=1)
        elif member == 0 and (scenario.event != "rename" or pair[1].file in {2, 4}):
            yield TRAINER, f"{who} writes the marker", become(event=1)

    # -- members and the log --------------------------------------------------------------------

    def _new_plans(self, world: World, folded: Folded, member: int) -> Iterator[Step]:
        def plan(what: Plan) -> World:
            return world._replace(plans=put(world.plans, member, what))

        for job in self.jobs:
            key = self.generations[job]
            if key not in folded.fenced:
                entry = (FENCE, key, folded.generation + 1, member)
                yield from self._append(world, member, entry)
                continue
            if seal := self._seal(world, folded, job, member):
                yield member, f"m{member} will {seal[0]} {seal[1]}", plan(("append", seal))
        for attempt, phase in enumerate(folded.phases):
            if phase not in {SEALED, CLOSED}:
                continue
            if is_superseded(folded, attempt) and self.flaw != "older_seal_may_replace":
                yield from self._append(world, member, (ABORT, attempt, "superseded", member))
                continue
            if phase == CLOSED and self.flaw == "commit_without_relisting_members":
                known = next(e[2] for e in world.log if e[0] == CLOSE and e[1] == attempt)
                entry = (COMMIT, attempt, known, member)
                yield member, f"m{member} will COMMIT {attempt}", plan(("append", entry))
                continue
            listed = tuple(m for m, p in enumerate(self.parts_of(world, attempt)) if p.registered)
            label = f"m{member} lists the members of {attempt}: {listed}"
            yield member, label, plan(("listed", attempt, phase, listed))

    def _seal(self, world: World, folded: Folded, job: int, member: int) -> Entry | None:
        """The entry with which this member answers the commit event."""
        pair = world.parts[2 * job], world.parts[2 * job + 1]
        part = pair[member]
        attempt = part.attempt
        if attempt < 0 or folded.phases[attempt] != OPEN:
            return None
        if self.scenario.event == "explicit":
            is_seen = all(p.vote >= 2 and p.event and p.attempt == attempt for p in pair)
        else:
            is_seen = bool(part.event)
        if not part.registered and self.flaw != "seal_before_registering":
            return None
        generation = folded.fenced.index(self.generations[job]) + 1
        if not is_seen or generation != folded.generation:
            return None
        # What trainers had closed by now; only the checks look at it.
        closed = tuple(p.file // 2 if p.attempt == attempt else 0 for p in pair)
        if self.flaw == "success_marker":
            return (COMMIT, attempt, tuple((m, v) for m, v in enumerate(closed) if v), member)
        return (SEAL, attempt, (generation, closed), member)

    def _plan_steps(self, world: World, folded: Folded, member: int) -> Iterator[Step]:
        plan = world.plans[member]
        assert plan is not None
        if plan[0] == "append":
            yield from self._append(world, member, plan[1])
            return
        _, attempt, phase, listed = plan

        def then(what: Plan | None) -> World:
            return world._replace(plans=put(world.plans, member, what))

        manifest, is_whole = self._closure(world, attempt, listed)
        if is_whole and phase == SEALED and self.flaw != "no_close":
            is_kept = self.flaw == "commit_without_relisting_members"
            detail: tuple[Any, ...] = manifest if is_kept else ()
            entry: Entry = (CLOSE, attempt, detail, member)
        elif is_whole:
            entry = (COMMIT, attempt, manifest, member)
        else:
            yield member, f"m{member}: votes of {attempt} missing", then(None)
            if phase == SEALED:
                entry = (ABORT, attempt, "missing", member)
                yield member, f"m{member} will ABORT {attempt}: deadline", then(("append", entry))
            return
        yield member, f"m{member} reads the votes, will {entry[0]}", then(("append", entry))

    def _closure(
        self, world: World, attempt: int, listed: tuple[int, ...]
    ) -> tuple[tuple[tuple[int, int], ...], bool]:
        """The manifest of what the listed members' votes say, and whether that is a checkpoint.

        Before CLOSE every listed member's final vote is needed. After it, who came in between and
        has not voted is late: what held at CLOSE holds for ever, so nobody is waited for.
        """
        parts = self.parts_of(world, attempt)
        phase = fold(world.log, self.flaw).phases[attempt]
        manifest = []
        for member in listed:
            part = parts[member]
            if part.vote >= 2:
                manifest.append((member, part.voted))
            elif self.flaw == "votes_before_seal_count" and part.early:
                manifest.append((member, part.early))
        may_skip = phase == CLOSED and self.flaw != "wait_for_late_members"
        is_complete = len(manifest) == len(listed) or may_skip
        if self.scenario.event == "rename":
            return tuple(manifest), is_complete and bool(manifest)
        if self.scenario.event == "extra":
            return tuple(manifest), is_complete and 0 in dict(manifest)
        return tuple(manifest), is_complete and len(manifest) == 2

    def _append(self, world: World, member: int, entry: Entry) -> Iterator[Step]:
        """Fold, validate, take the next slot; the reply may be lost, the request late.

        Fold and validation are one step with the write: a slot is free only as long as nothing
        came after what was folded.
        """
        kind, subject = entry[0], entry[1]
        idle = put(world.plans, member, None)
        folded = fold(world.log, self.flaw)
        # A deadline is over once the attempt is closed: closure has held.
        is_stale = kind == ABORT and entry[2] == "missing" and folded.phases[subject] != SEALED
        if is_stale or not is_legal(folded, entry, self.flaw):
            if world.plans[member] is not None:
                yield member, f"m{member}: {kind} is no longer due", world._replace(plans=idle)
            return
        slot = len(world.log)
        log = (*world.log, entry)
        label = f"m{member} {kind} {subject}"
        yield member, label, world._replace(log=log, plans=idle)
        if self.flaw == "lost_reply_is_failure":
            failed = world.told_failed
            if kind == COMMIT and subject not in failed:
                failed = tuple(sorted((*failed, subject)))
            lost = world._replace(log=log, plans=idle, told_failed=failed)
            yield member, f"{label}, reply lost, told that it failed", lost
            return
        waiting = put(world.pending, member, (slot, entry))
        yield (
            member,
            f"{label}, reply lost",
            world._replace(log=log, plans=idle, pending=waiting),
        )
        if len(world.net) < self.scenario.net and (slot, entry) not in world.net:
            net = tuple(sorted((*world.net, (slot, entry)), key=repr))
            late = world._replace(plans=idle, pending=waiting, net=net)
            yield member, f"{label}, timed out on its way", late

    def _resolve(self, world: World, member: int) -> Iterator[Step]:
        """Read the slot back: ours, another's, or nothing yet (then try the same there again)."""
        request = world.pending[member]
        assert request is not None
        slot, entry = request
        known = world._replace(pending=put(world.pending, member, None))
        if len(world.log) > slot:
            whose = "ours" if world.log[slot] == entry else "another's"
            yield member, f"m{member} reads slot {slot} back: {whose}", known
        elif self.flaw == "readback_404_is_failure":
            failed = known.told_failed
            if entry[0] == COMMIT and entry[1] not in failed:
                failed = tuple(sorted((*failed, entry[1])))
            label = f"m{member} finds slot {slot} empty, tells that {entry[0]} failed"
            yield member, label, known._replace(told_failed=failed)
        else:
            log = (*world.log, entry)
            yield member, f"m{member} finds slot {slot} empty, again", known._replace(log=log)
        if self.scenario.restarts:
            yield NETWORK, f"m{member} is killed and restarted", known
