"""The decision log's rules: one example for each, and random logs for the invariants."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptgate.errors import IntegrityError, RefusedError
from ckptgate.model.documents import PointerKind, PointerValue, digest_of, encode
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Fence,
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
    decode_record,
)
from ckptgate.model.rules import LATEST, AttemptPhase, RunState

MANIFEST = "0a" * 32


class Log:
    """A log in memory, with the fold of what is in it."""

    def __init__(self, *entries: Entry) -> None:
        self.state = RunState()
        self.stored: list[bytes] = []
        self.entries: list[Entry] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry) -> LogRecord:
        self.state.check(entry)
        record = self.record(entry)
        data = encode(record)
        self.state.apply(record, digest_of(data))
        self.stored.append(data)
        self.entries.append(entry)
        return record

    def record(self, entry: Entry, **changes: object) -> LogRecord:
        fields = {
            "index": self.state.length,
            "previous": self.state.last_digest,
            "write_id": f"{self.state.length:032x}",
            "member": "node-00000001",
            "at": "2026-01-01T00:00:00.000Z",
            "entry": entry,
        }
        return LogRecord(**{**fields, **changes})  # type: ignore[arg-type]


def fence(generation: int, key: str | None = None) -> Fence:
    return Fence(generation=generation, job_key=key or f"run:job-{generation}")


def seal(attempt: str, generation: int = 0, name: str = "") -> Seal:
    return Seal(
        attempt=attempt,
        name=name or attempt.rpartition(".")[0],
        generation=generation,
        event=SealEvent.EXPLICIT,
    )


def pointer(target: str, name: str = LATEST, kind: PointerKind = PointerKind.TEXT) -> PointerValue:
    return PointerValue(pointer=name, kind=kind, target=target, content=target + "\n")


def link(target: str) -> PointerValue:
    return PointerValue(pointer=LATEST, kind=PointerKind.SYMLINK, target=target, content=target)


def commit(attempt: str, *pointers: PointerValue, name: str = "") -> Commit:
    name = name or attempt.rpartition(".")[0]
    return Commit(attempt=attempt, name=name, manifest=MANIFEST, pointers=pointers)


def saved(attempt: str, *pointers: PointerValue, generation: int = 0) -> tuple[Entry, ...]:
    return (seal(attempt, generation), Close(attempt=attempt), commit(attempt, *pointers))


def abort(attempt: str) -> Abort:
    return Abort(attempt=attempt, reason="test", missing=("a file",))


def retire(attempt: str) -> Retire:
    return Retire(name=attempt.rpartition(".")[0], attempt=attempt)


def point(value: PointerValue) -> Point:
    return Point(pointer=value, reason="rollback")


A, B, C = saved("a.0"), saved("b.0"), saved("c.0")

REFUSALS: dict[str, tuple[tuple[Entry, ...], Entry, str]] = {
    "a fence that skips a generation": ((), fence(2), "the next is 1"),
    "a fence of a used generation": ((fence(1),), fence(1, "run:x"), "the next is 2"),
    "a second fence of one job": ((fence(1),), fence(2, "run:job-1"), "already is generation 1"),
    "a fence of a login session": ((), fence(1, "session:h/1@2"), "all nodes"),
    "a fence of the outside": ((), fence(1, "outside:"), "all nodes"),
    "a fence of an empty run id": ((), fence(1, "run:"), "all nodes"),
    "a fence of no job key": ((), fence(1, "nonsense"), "no job key"),
    "a second seal": ((seal("a.0"),), seal("a.0"), "already sealed"),
    "a seal of a closed attempt": (A[:2], seal("a.0"), "already closed"),
    "a seal of a committed attempt": (A, seal("a.0"), "already committed"),
    "a seal of an aborted attempt": ((abort("a.0"),), seal("a.0"), "already aborted"),
    "a seal of an older generation": ((fence(1), fence(2)), seal("a.0", 1), "newest is 2"),
    "a seal of a future generation": ((fence(1),), seal("a.0", 2), "newest is 1"),
    "a seal with the gateway's name": ((), seal("a.0", name=".ckptgate"), "gateway"),
    "a seal with a pointer's name": (A, seal("latest.0"), "is a pointer"),
    "a close without a seal": ((), Close(attempt="a.0"), "not sealed"),
    "a second close": (A[:2], Close(attempt="a.0"), "it is closed"),
    "a close after the commit": (A, Close(attempt="a.0"), "it is committed"),
    "a close after an abort": ((seal("a.0"), abort("a.0")), Close(attempt="a.0"), "it is aborted"),
    "a commit without a seal": ((), commit("a.0"), "not sealed"),
    "a commit without a close": ((seal("a.0"),), commit("a.0"), "it is sealed"),
    "a second commit": (A, commit("a.0"), "it is committed"),
    "a commit after an abort": ((*A[:2], abort("a.0")), commit("a.0"), "it is aborted"),
    "a commit under another name": (A[:2], commit("a.0", name="b"), "sealed as 'a'"),
    "a commit of an older seal": (
        (*A[:2], *saved("a.1")),
        commit("a.0"),
        "must be aborted (superseded)",
    ),
    "a commit of an older seal than a retired one": (
        (seal("a.0"), Close(attempt="a.0"), *saved("a.1"), *B, retire("a.1")),
        commit("a.0"),
        "superseded",
    ),
    "a commit with a pointer to another": (A[:2], commit("a.0", pointer("b")), "names 'b'"),
    "a commit with a pointer twice": (
        A[:2],
        commit("a.0", pointer("a"), link("a")),
        "listed twice",
    ),
    "a commit with a checkpoint as pointer": (
        (*B, *A[:2]),
        commit("a.0", pointer("a", "b")),
        "name of a checkpoint",
    ),
    "a commit with a pointer called as the gateway": (
        A[:2],
        commit("a.0", pointer("a", ".ckptgate")),
        "gateway",
    ),
    "an abort of a committed attempt": (A, abort("a.0"), "already committed"),
    "a second abort": ((abort("a.0"),), abort("a.0"), "already aborted"),
    "a published that is not committed": (A[:2], Published(attempt="a.0"), "it is closed"),
    "a published of nothing": ((), Published(attempt="a.0"), "not sealed"),
    "a second published": (
        (*A, Published(attempt="a.0")),
        Published(attempt="a.0"),
        "already published",
    ),
    "a retire of nothing": ((), retire("a.0"), "not what it is now"),
    "a retire of a replaced attempt": ((*A, *saved("a.1"), *B), retire("a.0"), "not what it is"),
    "a second retire": ((*A, *B, retire("a.0")), retire("a.0"), "not what it is now"),
    "a retire of a pointer's target": (
        (*A, *B, point(link("a"))),
        retire("a.0"),
        "pointer 'latest' names it",
    ),
    "a retire of a pinned one": ((*A, *B, Pin(name="a")), retire("a.0"), "pinned"),
    "a retire in a held run": ((*A, *B, Hold(reason="audit")), retire("a.0"), "held"),
    "a retire of the newest": (
        (*A, *saved("b.0", pointer("b")), point(pointer("a"))),
        retire("b.0"),
        "no newer good",
    ),
    "a retire where only a bad one is newer": (
        (*A, *B, Quarantine(name="b", reason="nan")),
        retire("a.0"),
        "no newer good",
    ),
    "a point to nothing": ((), point(link("a")), "not a committed checkpoint"),
    "a point to a retired one": ((*A, *B, retire("a.0")), point(link("a")), "not a committed"),
    "a point to a quarantined one": (
        (*A, Quarantine(name="a", reason="nan")),
        point(link("a")),
        "quarantined: nan",
    ),
    "a point called as a checkpoint": ((*A, *B), point(pointer("a", "b")), "name of a checkpoint"),
    "a pin of nothing": ((), Pin(name="a"), "not a committed checkpoint"),
    "a reclaim of nothing": (A, Reclaim(attempts=()), "no attempt"),
    "a reclaim of one attempt twice": (
        (*A, *saved("a.1")),
        Reclaim(attempts=("a.0", "a.0")),
        "or one twice",
    ),
    "a reclaim of an unknown attempt": (A, Reclaim(attempts=("b.0",)), "it is not sealed"),
    "a reclaim of an open attempt": (
        (*A, seal("b.0")),
        Reclaim(attempts=("b.0",)),
        "it is sealed",
    ),
    "a reclaim of an aborted attempt": (
        (abort("b.0"), *A),
        Reclaim(attempts=("b.0",)),
        "it is aborted",
    ),
    "a reclaim of what the name is": ((*A, *B), Reclaim(attempts=("a.0",)), "what 'a' is now"),
    "a second reclaim": (
        (*A, *saved("a.1"), Reclaim(attempts=("a.0",))),
        Reclaim(attempts=("a.0",)),
        "already is reclaimed",
    ),
    "a reclaim of a pinned name's older version": (
        (*A, *saved("a.1"), Pin(name="a")),
        Reclaim(attempts=("a.0",)),
        "pinned",
    ),
    "a reclaim in a held run": (
        (*A, *saved("a.1"), Hold()),
        Reclaim(attempts=("a.0",)),
        "held",
    ),
    "a reclaim of the last good one": (
        (*A, *saved("a.1"), Quarantine(name="a")),
        Reclaim(attempts=("a.0",)),
        "no newer good",
    ),
    "a revision of what is reclaimed": (
        (*A, *saved("a.1"), Reclaim(attempts=("a.0",)), seal("b.0"), Close(attempt="b.0")),
        Commit(attempt="b.0", name="b", manifest=MANIFEST, base="a.0"),
        "being removed",
    ),
    "a revision of what was never committed": (
        (*A, seal("b.0"), Close(attempt="b.0")),
        Commit(attempt="b.0", name="b", manifest=MANIFEST, base="c.0"),
        "which is not committed",
    ),
    "a second pin": ((*A, Pin(name="a")), Pin(name="a"), "already is pinned"),
    "an unpin without a pin": (A, Pin(name="a", is_on=False), "already is not pinned"),
    "a second hold": ((Hold(),), Hold(), "already is held"),
    "a release without a hold": ((), Hold(is_on=False), "already is free"),
    "a quarantine of nothing": ((), Quarantine(name="a"), "not a committed checkpoint"),
    "a second quarantine": (
        (*A, Quarantine(name="a")),
        Quarantine(name="a"),
        "already is quarantined",
    ),
    "a release without a quarantine": (
        A,
        Quarantine(name="a", is_on=False),
        "already is not quarantined",
    ),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_the_rules_refuse(case: str) -> None:
    """I2, I3, I4: one example for each rule; the error names it, and the log stays as it was."""
    before, entry, rule = REFUSALS[case]
    log = Log(*before)
    with pytest.raises(RefusedError) as caught:
        log.state.check(entry)
    assert rule in str(caught.value)
    assert type(entry).__name__.upper() in str(caught.value)
    assert caught.value.subject


@pytest.mark.parametrize("case", list(REFUSALS))
def test_a_stored_entry_that_breaks_a_rule_is_an_integrity_error(case: str) -> None:
    before, entry, rule = REFUSALS[case]
    log = Log(*before)
    length, digest = log.state.length, log.state.last_digest
    with pytest.raises(IntegrityError) as caught:
        log.state.apply(log.record(entry), "f" * 64)
    assert rule in str(caught.value)
    assert f"log record {length}" in str(caught.value)
    assert (log.state.length, log.state.last_digest) == (length, digest)


ALLOWED: dict[str, tuple[tuple[Entry, ...], Entry]] = {
    "a fence of the next generation": ((fence(1),), fence(2, "slurm:1+0")),
    "a seal of a login session's attempt in the newest generation": (
        (fence(1), fence(2)),
        seal("a.0", 2),
    ),
    "a seal of a name that is committed": (A, seal("a.1")),
    "a commit that replaces an older seal": ((*A, *saved("a.1")[:2]), commit("a.1")),
    "a commit of what was sealed before a fence": ((*A[:2], fence(1)), commit("a.0")),
    "a close of what was sealed before a fence": ((seal("a.0"), fence(1)), Close(attempt="a.0")),
    "a commit of a renamed attempt": (
        (seal("tmp_a.0", name="a"), Close(attempt="tmp_a.0")),
        commit("tmp_a.0", name="a"),
    ),
    "an abort of an unknown attempt": ((), abort("a.0")),
    "an abort of a sealed attempt": ((seal("a.0"),), abort("a.0")),
    "an abort of a closed attempt": (A[:2], abort("a.0")),
    "an abort of a superseded attempt": ((*A[:2], *saved("a.1")), abort("a.0")),
    "a published of a replaced attempt": ((*A, *saved("a.1")), Published(attempt="a.0")),
    "a retire of an older one": ((*A, *B), retire("a.0")),
    "a retire of a quarantined older one": (
        (*A, *B, Quarantine(name="a")),
        retire("a.0"),
    ),
    "a retire after the pin is released": (
        (*A, *B, Pin(name="a"), Pin(name="a", is_on=False)),
        retire("a.0"),
    ),
    "a retire after the hold is released": ((*A, *B, Hold(), Hold(is_on=False)), retire("a.0")),
    "a point back": ((*A, *B), point(link("a"))),
    "a name that an aborted attempt had": ((seal("b.0"), abort("b.0"), *A), seal("b.1")),
}


@pytest.mark.parametrize("case", list(ALLOWED))
def test_the_rules_allow(case: str) -> None:
    before, entry = ALLOWED[case]
    Log(*before, entry)


def test_an_attempt_s_history_is_in_its_view() -> None:
    log = Log(fence(1), *saved("a.0", generation=1), Published(attempt="a.0"))
    view = log.state.attempts["a.0"]
    assert (view.name, view.state, view.generation) == ("a", "committed", 1)
    assert (view.seal_index, view.close_index, view.decision_index) == (1, 2, 3)
    assert view.manifest == MANIFEST
    assert view.is_published
    assert log.state.current == {"a": "a.0"}
    assert log.state.names == {"a"}
    assert log.state.generation_of("run:job-1") == 1
    assert log.state.generation_of("run:job-2") is None


def test_an_abort_says_what_was_missing() -> None:
    log = Log(seal("a.0"), abort("a.0"), abort("b.7"))
    assert log.state.attempts["a.0"].missing == ("a file",)
    assert log.state.attempts["b.7"].state is AttemptPhase.ABORTED
    assert log.state.attempts["b.7"].name == "b"
    assert log.state.attempts["b.7"].seal_index == -1
    assert not log.state.current


def test_what_is_sealed_and_not_decided_is_listed() -> None:
    log = Log(*A[:2], seal("b.0"), *C)
    assert log.state.undecided() == ("a.0", "b.0")
    log.append(abort("b.0"))
    log.append(A[2])
    assert log.state.undecided() == ()


def test_a_superseded_attempt_is_known_without_trying() -> None:
    log = Log(*A[:2], *saved("a.1"))
    assert log.state.is_superseded("a.0")
    assert not log.state.is_superseded("a.1")
    assert not log.state.is_superseded("unknown.0")


def test_a_save_again_replaces_the_older_one() -> None:
    log = Log(*A, *saved("a.1"))
    assert log.state.current == {"a": "a.1"}
    assert log.state.attempts["a.0"].state == "committed"


def test_current_checkpoints_come_in_the_order_of_their_commits() -> None:
    log = Log(*A, *B, *saved("a.1"))
    assert list(log.state.current) == ["b", "a"]


def test_every_commit_implies_latest() -> None:
    log = Log(*A, *B)
    assert log.state.pointers[LATEST].value == link("b")
    assert log.state.pointers[LATEST].source == log.state.attempts["b.0"].seal_index


def test_a_late_commit_of_an_older_seal_does_not_move_pointers_back() -> None:
    """I5."""
    log = Log(*A[:2], *B, A[2])
    assert log.state.current == {"b": "b.0", "a": "a.0"}
    assert log.state.pointers[LATEST].value.target == "b"


def test_a_framework_s_own_latest_keeps_its_form() -> None:
    log = Log(*saved("a.0", pointer("a")))
    assert log.state.pointers[LATEST].value == pointer("a")


def test_a_commit_without_latest_does_not_move_one_that_a_framework_owns() -> None:
    log = Log(*saved("a.0", pointer("a")), *B)
    assert log.state.pointers[LATEST].value == pointer("a")
    for entry in saved("c.0", pointer("c")):
        log.append(entry)
    assert log.state.pointers[LATEST].value == pointer("c")


def test_other_pointers_leave_latest_to_the_gateway() -> None:
    log = Log(*saved("a.0", pointer("a", "latest-rank0")))
    assert log.state.pointers[LATEST].value == link("a")
    assert log.state.pointers["latest-rank0"].value.target == "a"


def test_a_point_goes_back_and_the_next_commit_goes_forward_again() -> None:
    """I5: a rollback in the gateway's own form does not end its ownership."""
    log = Log(*A, *B, point(link("a")))
    assert log.state.pointers[LATEST].value == link("a")
    for entry in C:
        log.append(entry)
    assert log.state.pointers[LATEST].value == link("c")


def test_a_commit_of_what_was_sealed_before_a_point_does_not_undo_it() -> None:
    log = Log(*A, *B[:2], point(link("a")), B[2])
    assert log.state.pointers[LATEST].value == link("a")


def test_a_point_with_a_form_of_its_own_makes_the_name_a_framework_s() -> None:
    log = Log(*A, point(pointer("a")), *B)
    assert log.state.pointers[LATEST].value == pointer("a")


def test_a_checkpoint_called_latest_has_no_pointer_beside_it() -> None:
    log = Log(*saved("latest.0"), *A)
    assert LATEST not in log.state.pointers
    assert set(log.state.current) == {"latest", "a"}


def test_a_quarantined_checkpoint_stays_current_and_its_pointer_stays() -> None:
    log = Log(*A, Quarantine(name="a", reason="nan"))
    assert log.state.current == {"a": "a.0"}
    assert log.state.quarantined == {"a": "nan"}
    assert log.state.pointers[LATEST].value.target == "a"
    log.append(Quarantine(name="a", is_on=False))
    assert not log.state.quarantined


def test_a_quarantine_ends_with_the_content_that_it_was_about() -> None:
    log = Log(*A, Quarantine(name="a", reason="nan"), *saved("a.1"))
    assert not log.state.quarantined


def test_a_retired_name_is_gone_until_it_is_saved_again() -> None:
    log = Log(*A, *B, Quarantine(name="a"), retire("a.0"))
    assert log.state.current == {"b": "b.0"}
    assert log.state.retired == {"a": "a.0"}
    assert not log.state.quarantined
    for entry in saved("a.1"):
        log.append(entry)
    assert log.state.current == {"b": "b.0", "a": "a.1"}
    assert not log.state.retired


def test_pins_and_holds_are_switched() -> None:
    log = Log(*A, Pin(name="a"), Hold(reason="audit"))
    assert log.state.pins == {"a"}
    assert log.state.is_held
    log.append(Pin(name="a", is_on=False))
    log.append(Hold(is_on=False))
    assert not log.state.pins
    assert not log.state.is_held


@pytest.mark.parametrize(
    "changes", [{"index": 0}, {"index": 9}, {"previous": ""}, {"previous": "e" * 64}]
)
def test_a_record_out_of_its_place_is_not_folded(changes: dict[str, object]) -> None:
    """I7."""
    log = Log(*A)
    with pytest.raises(IntegrityError, match="does not follow"):
        log.state.apply(log.record(seal("b.0"), **changes), "f" * 64)
    assert "b.0" not in log.state.attempts


# Random logs. What is accepted is judged by a checker that shares no code with the fold.

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
