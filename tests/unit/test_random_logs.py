"""Random logs: what the rules accept is judged by a checker that shares no code with the fold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.log_samples import (
    Log,
    abort,
    commit,
    fence,
    link,
    point,
    pointer,
    retire,
    saved,
    seal,
)

from ckptgate.errors import RefusedError
from ckptgate.model.documents import PointerValue, digest_of
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Fence,
    Hold,
    Pin,
    Point,
    Published,
    Quarantine,
    Reclaim,
    Retire,
    Seal,
    decode_record,
)
from ckptgate.model.rules import LATEST, RunState

NAMES = ("a", "b", "c")
ATTEMPTS = tuple(f"{name}.{k}" for name in NAMES for k in range(3))
POOL: tuple[Entry, ...] = (
    *(fence(generation) for generation in (1, 2, 3)),
    fence(2, "run:job-1"),
    fence(1, "session:x"),
    *(seal(attempt, generation) for attempt in ATTEMPTS for generation in range(4)),
    *(Close(attempt=attempt) for attempt in ATTEMPTS),
    *(commit(attempt) for attempt in ATTEMPTS),
    *(commit(attempt, pointer(attempt[0], "last.ckpt")) for attempt in ATTEMPTS),
    *(commit(attempt, pointer(attempt[0])) for attempt in ATTEMPTS),
    *(abort(attempt) for attempt in ATTEMPTS),
    *(Published(attempt=attempt) for attempt in ATTEMPTS),
    *(retire(attempt) for attempt in ATTEMPTS),
    *(Reclaim(attempts=(attempt,)) for attempt in ATTEMPTS),
    *(point(pointer(name, which)) for name in NAMES for which in (LATEST, "last.ckpt")),
    *(point(link(name)) for name in NAMES),
    *(Pin(name=name, is_on=is_on) for name in NAMES for is_on in (True, False)),
    *(Hold(is_on=is_on) for is_on in (True, False)),
    *(Quarantine(name=name, is_on=is_on) for name in NAMES for is_on in (True, False)),
)

# Whole saves are drawn too: single entries alone seldom meet.
STEPS: tuple[tuple[Entry, ...], ...] = (
    *((entry,) for entry in POOL),
    *(saved(attempt) for attempt in ATTEMPTS),
    *(saved(attempt)[:2] for attempt in ATTEMPTS),
    *(saved(attempt, generation=1) for attempt in ATTEMPTS),
)


def flat(steps: Iterable[tuple[Entry, ...]]) -> list[Entry]:
    return [entry for step in steps for entry in step]


LOGS = st.lists(st.sampled_from(STEPS), max_size=100).map(flat)


def run_log(entries: list[Entry], see: Callable[[Log, Entry], None] | None = None) -> Log:
    """Append what the rules allow of *entries*."""
    log = Log()
    for entry in entries:
        try:
            log.append(entry)
        except RefusedError:
            continue
        if see:
            see(log, entry)
    return log


def slots(entries: list[Entry], kind: type[Entry], attempt: str) -> list[int]:
    return [
        index
        for index, entry in enumerate(entries)
        if type(entry) is kind and getattr(entry, "attempt", "") == attempt
    ]


def check_naively(entries: list[Entry]) -> None:
    newest = 0
    for entry in entries:
        if isinstance(entry, Fence):
            assert entry.generation == newest + 1
            newest += 1
        if isinstance(entry, Seal):
            assert entry.generation == newest, "I4: sealed by an older generation after a fence"
    keys = [entry.job_key for entry in entries if isinstance(entry, Fence)]
    assert len(keys) == len(set(keys))
    for attempt in ATTEMPTS:
        seals, closes = slots(entries, Seal, attempt), slots(entries, Close, attempt)
        commits, aborts = slots(entries, Commit, attempt), slots(entries, Abort, attempt)
        assert max(len(seals), len(closes), len(commits), len(aborts)) <= 1
        assert len(commits) + len(aborts) <= 1, "I3: committed and aborted"
        if commits:
            assert seals, "I4: committed without a seal"
            assert closes, "I4: committed without a close"
            assert seals[0] < closes[0] < commits[0]
        if aborts:
            assert not [slot for slot in seals + closes if slot > aborts[0]]
    for name in NAMES:
        order = [
            slots(entries, Seal, entry.attempt)[0]
            for entry in entries
            if isinstance(entry, Commit) and entry.name == name
        ]
        assert order == sorted(set(order)), "I2: what is current went back to an older seal"


def current_naively(entries: list[Entry]) -> dict[str, str]:
    current: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, Commit):
            current[entry.name] = entry.attempt
        if isinstance(entry, Retire):
            assert current[entry.name] == entry.attempt
            del current[entry.name]
    return current


@settings(max_examples=150, deadline=None)
@given(LOGS)
def test_no_accepted_log_breaks_i2_i3_or_i4(entries: list[Entry]) -> None:
    """I2, I3, I4."""
    log = run_log(entries)
    check_naively(log.entries)
    assert log.state.current == current_naively(log.entries)


class PointerWatch:
    """Follows the pointers of a growing log."""

    def __init__(self) -> None:
        self.before: dict[str, tuple[PointerValue, int]] = {}
        self.moves = 0

    def __call__(self, log: Log, entry: Entry) -> None:
        now = {name: (p.value, p.source) for name, p in log.state.pointers.items()}
        assert set(self.before) <= set(now), "a pointer vanished"
        for name, (value, source) in now.items():
            assert value.target in log.state.current, "a pointer names what is not committed"
            if self.before.get(name) == (value, source):
                continue
            self.moves += 1
            if isinstance(entry, Point):
                assert (name, source) == (entry.pointer.pointer, log.state.length - 1)
                continue
            assert isinstance(entry, Commit), "I5: moved by something else"
            assert value.target == entry.name
            assert source == slots(log.entries, Seal, entry.attempt)[0]
            assert source > self.before.get(name, (value, -1))[1], "I5: it went back"
        self.before = now


@settings(max_examples=100, deadline=None)
@given(LOGS)
def test_no_accepted_log_moves_a_pointer_back_except_by_point(entries: list[Entry]) -> None:
    """I5."""
    run_log(entries, PointerWatch())


@settings(max_examples=50, deadline=None)
@given(LOGS)
def test_the_log_is_dense_and_folds_to_the_same_state_for_everybody(entries: list[Entry]) -> None:
    """I7: what is stored decodes, is chained, and leads every reader to one state."""
    log = run_log(entries)
    other = RunState()
    for index, data in enumerate(log.stored):
        record = decode_record(data, index=index, previous=other.last_digest, subject=str(index))
        other.apply(record, digest_of(data))
    for field in ("attempts", "current", "retired", "pointers", "pins", "is_held", "fences"):
        assert getattr(other, field) == getattr(log.state, field)
    assert other.last_digest == log.state.last_digest
    assert other.length == len(log.stored)


def test_random_logs_reach_every_kind_of_entry_and_pointers_that_move() -> None:
    """Guards the tests above against passing on empty logs."""
    kinds: set[type] = set()
    replaced = 0
    watch = PointerWatch()
    for seed in range(20):
        watch.before = {}
        log = run_log(flat(random.Random(seed).choices(STEPS, k=500)), watch)
        check_naively(log.entries)
        kinds |= {type(entry) for entry in log.entries}
        commits = [entry.name for entry in log.entries if isinstance(entry, Commit)]
        replaced += len(commits) - len(set(commits))
    assert kinds == {
        Fence, Seal, Close, Commit, Abort, Published, Retire, Reclaim, Point, Pin, Hold,
        Quarantine,
    }  # fmt: skip
    assert watch.moves > 20
    assert replaced > 5
