"""What may go of a run: random logs for the invariants, and hostile stores."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptgate.errors import RefusedError
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    Manifest,
    PointerKind,
    PointerValue,
    digest_of,
    encode,
)
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Hold,
    LogRecord,
    Pin,
    Point,
    Published,
    Quarantine,
    Reclaim,
    Retire,
    Seal,
    SealEvent,
)
from ckptgate.model.layout import data_key
from ckptgate.model.reclaim import (
    Part,
    PartKind,
    Why,
    doomed,
    garbage,
    named_by,
    namers,
    standing,
)
from ckptgate.model.rules import AttemptPhase, RunState

NAMES = ("a", "b", "c")
MEMBER = "node-00000001"


class World:
    """A log and what its store would hold: each attempt's own keys, each manifest's keys."""

    def __init__(self) -> None:
        self.state = RunState()
        self.manifests: dict[str, frozenset[str]] = {}
        self.stored: set[str] = set()
        self.made = dict.fromkeys(NAMES, 0)
        self.bases: dict[str, str] = {}

    def append(self, entry: Entry) -> bool:
        try:
            self.state.check(entry)
        except RefusedError:
            return False
        record = LogRecord(
            index=self.state.length, previous=self.state.last_digest, write_id="0" * 32,
            member=MEMBER, at="2026-01-01T00:00:00.000Z", entry=entry,
        )  # fmt: skip
        self.state.apply(record, digest_of(encode(record)))
        return True

    def begin(self, name: str, base: str) -> str:
        """A node stages two files, and uploads a third one that it then replaces."""
        attempt = f"{name}.{self.made[name]}"
        self.made[name] += 1
        self.bases[attempt] = base
        self.stored.update(data_key(attempt, MEMBER, n) for n in range(3))
        self.append(Seal(attempt=attempt, name=name, generation=0, event=SealEvent.EXPLICIT))
        return attempt

    def commit(self, attempt: str, shared: int) -> bool:
        """As the engine does: own keys, and any of those that the base's manifest names."""
        self.append(Close(attempt=attempt))
        base = self.bases[attempt]
        kept = sorted(self.manifests.get(base, ()))[:shared] if base else []
        keys = frozenset({*(data_key(attempt, MEMBER, n) for n in range(2)), *kept})
        view = self.state.attempts[attempt]
        entry = Commit(attempt=attempt, name=view.name, manifest="0a" * 32, base=base)
        if not self.append(entry):
            return False
        self.manifests[attempt] = keys
        return True

    def manifest(self, attempt: str) -> Manifest:
        entries = tuple(
            FileEntry(path=f"f{n}", type=EntryType.FILE, mode=0o644, mtime_ns=0, size=1,
                      digest="0b" * 32, key=key)
            for n, key in enumerate(sorted(self.manifests[attempt]))
        )  # fmt: skip
        return Manifest(
            run="r", name="x", attempt=attempt, generation=0, event="explicit",
            created_at="", members=(), entries=entries,
        )  # fmt: skip

    def parts(self, attempt: str) -> list[Part]:
        prefix = data_key(attempt, "", "") + "/"
        return [
            Part(key=key, kind=PartKind.DATA, size=1)
            for key in sorted(self.stored)
            if key.startswith(prefix)
        ]

    def plan(self) -> dict[str, list[str]]:
        """Attempt -> keys that may go, by the state as it is."""
        found: dict[str, list[str]] = {}
        for attempt in self.state.attempts:
            named = named_by(self.manifest(view.attempt) for view in namers(self.state, attempt))
            gone = garbage(self.state, attempt, self.parts(attempt), named)
            found[attempt] = [part.key for part in gone]
        return found

    def needed(self) -> set[str]:
        """Keys of everything that is committed and unreclaimed."""
        return {
            key
            for attempt, view in self.state.attempts.items()
            if view.state is AttemptPhase.COMMITTED and not view.is_reclaimed
            for key in self.manifests[attempt]
        }


def pointer(target: str) -> PointerValue:
    return PointerValue(pointer="best", kind=PointerKind.SYMLINK, target=target, content=target)


def step(world: World, rng: random.Random) -> None:
    """One random thing that happens to a run."""
    state, name = world.state, rng.choice(NAMES)
    current = state.current.get(name, "")
    undecided = [a for a in state.undecided() if a in world.bases]
    match rng.randrange(12):
        case 0 | 1 | 2:
            committed = [a for a in world.manifests if a.startswith(f"{name}.")]
            world.begin(name, rng.choice(["", current, *committed]))
        case 3 | 4 | 5 if undecided:
            world.commit(rng.choice(undecided), rng.randrange(4))
        case 6 if undecided:
            world.append(Abort(attempt=rng.choice(undecided), reason="test"))
        case 7 if current:
            world.append(Published(attempt=current))
        case 8 if current:
            world.append(Retire(name=name, attempt=current))
        case 9:
            world.append(Pin(name=name, is_on=name not in state.pins))
        case 10:
            entries: list[Entry] = [
                Quarantine(name=name, is_on=name not in state.quarantined, reason="r"),
                Hold(is_on=not state.is_held and rng.random() < 0.2),
                Point(pointer=pointer(name), reason="r"),
            ]
            world.append(rng.choice(entries))
        case 11:
            found = doomed(state, dict.fromkeys(state.attempts, 100.0), 50.0)
            if found:
                assert world.append(Reclaim(attempts=found))
        case _:
            pass


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_no_plan_however_old_ever_removes_what_is_needed(seed: int) -> None:
    """I9: plans are made at random times and carried out at any later one, also a whole log later.

    So neither a planner that slept nor one beside a committing publisher does harm.
    """
    rng, world = random.Random(seed), World()
    plans: list[list[str]] = []
    for _ in range(60):
        step(world, rng)
        if rng.random() < 0.3:
            plans.append([key for keys in world.plan().values() for key in keys])
        if plans and rng.random() < 0.2:
            world.stored -= set(plans.pop(rng.randrange(len(plans))))
        assert world.needed() <= world.stored
    for plan in plans:
        world.stored -= set(plan)
    assert world.needed() <= world.stored


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_what_is_reclaimed_is_never_current_pinned_pointed_at_or_the_last_good(seed: int) -> None:
    rng, world = random.Random(seed), World()
    for _ in range(60):
        before = {a for a, v in world.state.attempts.items() if v.is_reclaimed}
        pins, is_held = set(world.state.pins), world.state.is_held
        step(world, rng)
        state = world.state
        new = [v for a, v in state.attempts.items() if v.is_reclaimed and a not in before]
        for view in new:
            assert not is_held
            assert view.name not in pins
            assert state.current.get(view.name) != view.attempt
            assert all(
                state.current.get(folded.value.target) != view.attempt
                for folded in state.pointers.values()
            )
            newer = [
                state.attempts[a].seal_index
                for name, a in state.current.items()
                if name not in state.quarantined
            ]
            assert newer
            assert max(newer) > view.seal_index


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_in_the_end_nothing_is_left_but_what_is_needed(seed: int) -> None:
    rng, world = random.Random(seed), World()
    for _ in range(60):
        step(world, rng)
    for attempt in world.state.undecided():
        world.append(Abort(attempt=attempt, reason="end"))
    for keys in world.plan().values():
        world.stored -= set(keys)
    if not world.state.is_held:
        assert world.stored == world.needed()


def saved(world: World, name: str, base: str = "") -> str:
    attempt = world.begin(name, base)
    assert world.commit(attempt, 2)
    world.append(Published(attempt=attempt))
    return attempt


def test_the_grace_counts_from_when_it_was_seen_dead() -> None:
    world = World()
    first, second = saved(world, "a"), saved(world, "a")
    assert standing(world.state, first) is Why.REPLACED
    assert standing(world.state, second) is Why.LIVE
    assert doomed(world.state, {first: 49.0, second: 99.0}, 50.0) == ()
    assert doomed(world.state, {first: 50.0, second: 99.0}, 50.0) == (first,)
    assert doomed(world.state, {first: 50.0}, 50.0, kept=[first]) == ()
    assert doomed(world.state, {}, 0.0) == ()


def test_a_replaced_version_stays_until_its_successor_is_shown_in_the_store() -> None:
    world = World()
    first = saved(world, "a")
    second = world.begin("a", "")
    assert world.commit(second, 0)
    assert doomed(world.state, {first: 99.0}, 1.0) == ()
    world.append(Published(attempt=second))
    assert doomed(world.state, {first: 99.0}, 1.0) == (first,)


@pytest.mark.parametrize("attempt", ["a.0", "a.1", "b.7"])
def test_a_commit_on_what_is_no_base_is_refused(attempt: str) -> None:
    """I9: its bytes may be gone, were never committed, or were never there."""
    world = World()
    saved(world, "a")
    saved(world, "a")
    assert world.append(Reclaim(attempts=("a.0",)))
    world.append(Seal(attempt="b.0", name="b", generation=0, event=SealEvent.EXPLICIT))
    world.append(Close(attempt="b.0"))
    entry = Commit(attempt="b.0", name="b", manifest="0a" * 32, base=attempt)
    assert world.append(entry) is (attempt == "a.1")


def test_parts_of_a_checkpoint_that_is_there_stay_but_other_manifests() -> None:
    world = World()
    attempt = saved(world, "a")
    base = f".ckptgate/attempts/{attempt}"
    parts = [
        Part(key=f"{base}/manifest-{'0a' * 32}.json", kind=PartKind.MANIFEST, size=1),
        Part(key=f"{base}/manifest-{'0c' * 32}.json", kind=PartKind.MANIFEST, size=1),
        Part(key=f"{base}/members/{MEMBER}.json", kind=PartKind.MEMBER, size=1),
        Part(key=f"{base}/votes/{MEMBER}/0.json", kind=PartKind.VOTE, size=1),
        Part(key=f"{base}/data/{MEMBER}/.tmp-ckptgate-0", kind=PartKind.UNFINISHED, size=1),
    ]
    named = named_by([world.manifest(attempt)])
    found = garbage(world.state, attempt, parts, named)
    assert [part.key for part in found] == [parts[1].key, parts[4].key]
