"""The commit protocol keeps I1 to I7 in every state, and I12; every known mistake is found."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import cache

import pytest
from tests.model import log_rules
from tests.model.protocol_world import FLAWS, Scenario
from tests.model.state_search import Result, explore

from ckptgate.errors import RefusedError
from ckptgate.model.entries import Abort, Close, Commit, Fence, LogRecord, Seal, SealEvent
from ckptgate.model.entries import Entry as ProductEntry
from ckptgate.model.rules import RunState

SCENARIOS = {
    "format": Scenario(event="format", rewrites=True, early_votes=True),
    "format, uploads": Scenario(event="format", rewrites=True, uploads=True),
    "format, store away": Scenario(event="format", rewrites=True, away=(0, 1)),
    "extra files": Scenario(event="extra", rewrites=True, net=0, restarts=False),
    "rename": Scenario(event="rename", rewrites=True, net=2),
    "rename, sealer's store away": Scenario(event="rename", away=(0,)),
    "explicit": Scenario(event="explicit", rewrites=True, net=2),
    "explicit, store away": Scenario(event="explicit", rewrites=True, away=(0, 1)),
    "one generation saves twice": Scenario(
        names=(0, 0), generations=(0, 0), event="format", coarse=True, net=0
    ),
    "two generations save one name": Scenario(names=(0, 0), event="rename", coarse=True, net=0),
    "two generations save two names": Scenario(
        names=(0, 1), event="rename", coarse=True, net=0, restarts=False
    ),
}
LARGE_SCENARIOS = {
    "extra files, late requests": Scenario(event="extra", rewrites=True),
    "two generations, late joins": Scenario(names=(0, 0), event="rename", net=0, restarts=False),
    "two generations, format": Scenario(names=(0, 0), event="format", coarse=True, net=0),
    "two generations, late requests": Scenario(
        names=(0, 0), event="rename", coarse=True, restarts=False
    ),
}
# The smallest scenario that shows each mistake, and the invariant that it breaks.
TWO = Scenario(names=(0, 0), event="rename", coarse=True, net=0, restarts=False)
BROKEN = {
    "votes_before_seal_count": (Scenario(event="rename", rewrites=True, early_votes=True), "I1"),
    "no_close": (Scenario(event="extra", net=0), "I6"),
    "commit_without_relisting_members": (Scenario(event="extra", net=0), "I6"),
    "fence_in_separate_object": (TWO, "I4"),
    "lost_reply_is_failure": (Scenario(event="rename"), "I6"),
    "readback_404_is_failure": (Scenario(event="rename"), "I6"),
    "older_seal_may_replace": (TWO, "I2"),
    "success_marker": (Scenario(event="format", uploads=True), "I1"),
    "pointer_follows_last_commit": (replace(TWO, names=(0, 1)), "I5"),
    "seal_before_registering": (Scenario(event="rename", away=(0,)), "I1"),
    "writes_after_final_vote": (Scenario(event="format", rewrites=True), "I6"),
    "wait_for_late_members": (Scenario(event="extra", net=0), "I12"),
    "join_only_the_highest": (TWO, "I1"),
}


def show(name: str, result: Result, started: float) -> None:
    print(
        f"{name}: {result.states} states, {result.edges} steps, {result.commits} with a commit, "
        f"{result.aborts} with an abort, {time.process_time() - started:.1f} s CPU"
    )
    for broken, steps in result.violations.items():
        print(f"  {broken}:", *steps, sep="\n    ")


@cache
def violations_without_flaw(scenario: Scenario) -> tuple[str, ...]:
    return tuple(explore(scenario, live=False).violations)


def check(name: str, scenario: Scenario) -> None:
    started = time.process_time()
    result = explore(scenario)
    show(name, result, started)
    assert not result.violations
    assert result.is_exhausted
    assert result.commits > 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_breaks_an_invariant(name: str) -> None:
    """I1 I2 I3 I4 I5 I6 I7 I12"""
    check(name, SCENARIOS[name])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_SCENARIOS)
def test_no_interleaving_of_the_large_scenarios_breaks_an_invariant(name: str) -> None:
    """I1 I2 I3 I4 I5 I6 I7 I12"""
    check(name, LARGE_SCENARIOS[name])


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_protocol_with_one_mistake_is_found_broken(flaw: str) -> None:
    scenario, invariant = BROKEN[flaw]
    started = time.process_time()
    result = explore(replace(scenario, flaw=flaw), until_broken=True, live=invariant == "I12")
    show(flaw, result, started)
    found = [steps for broken, steps in result.violations.items() if broken.startswith(invariant)]
    assert found, f"{flaw} broke {list(result.violations) or 'nothing'}, not {invariant}"
    assert found[0]
    assert not violations_without_flaw(scenario), "the scenario is broken without it"


def test_a_rename_of_unknown_content_is_no_proof_where_a_member_may_be_unregistered() -> None:
    """Why content without expected set needs a known world size or explicit commits on many nodes.

    A close that returned before its member could register (the store was away for it) passes the
    trainer's barrier; nothing tells the others that this member exists.
    """
    scenario = Scenario(event="rename", away=(1,))
    result = explore(scenario, until_broken=True, live=False)
    assert any(broken.startswith("I1 committed without") for broken in result.violations)


# -- the abstract rules are the product's --------------------------------------------------------

KEYS = ("run:first", "run:second")
NAMES = ("x", "y")
DIGEST = "0" * 64


def product_entry(entry: log_rules.Entry) -> ProductEntry:
    kind, subject, detail, _ = entry
    if kind == log_rules.FENCE:
        return Fence(generation=detail, job_key=KEYS[subject])
    name = NAMES[subject // log_rules.K_MAX]
    attempt = f"{name}.{subject % log_rules.K_MAX}"
    if kind == log_rules.SEAL:
        return Seal(attempt=attempt, name=name, generation=detail[0], event=SealEvent.RENAME)
    if kind == log_rules.CLOSE:
        return Close(attempt=attempt)
    if kind == log_rules.COMMIT:
        return Commit(attempt=attempt, name=name, manifest=DIGEST)
    return Abort(attempt=attempt, reason="test")


ATTEMPTS = (0, 1, log_rules.K_MAX)
ALPHABET: tuple[log_rules.Entry, ...] = (
    *((log_rules.FENCE, key, generation, 0) for key in (0, 1) for generation in (1, 2, 3)),
    *((log_rules.SEAL, a, (generation, ()), 0) for a in ATTEMPTS for generation in (0, 1, 2)),
    *(
        (kind, a, (), 0)
        for a in ATTEMPTS
        for kind in (log_rules.CLOSE, log_rules.COMMIT, log_rules.ABORT)
    ),
)
PRODUCT = tuple(product_entry(entry) for entry in ALPHABET)


def is_legal_in_product(state: RunState, entry: ProductEntry) -> bool:
    try:
        state.check(entry)
    except RefusedError:
        return False
    return True


def compare(state: RunState, folded: log_rules.Folded, depth: int) -> int:
    """Compare what may come next, and go on with all that may; how many were compared."""
    count = 0
    for entry, product in zip(ALPHABET, PRODUCT, strict=True):
        is_legal = log_rules.is_legal(folded, entry)
        assert is_legal == is_legal_in_product(state, product), (entry, folded)
        count += 1
        if not is_legal or depth == 0:
            continue
        after = append(copy.deepcopy(state), product)
        now = log_rules.step(folded, entry, state.length)
        check_same(after, now)
        count += compare(after, now, depth - 1)
    return count


def append(state: RunState, entry: ProductEntry) -> RunState:
    record = LogRecord(
        index=state.length,
        previous=state.last_digest,
        write_id="w",
        member="host-00000000",
        at="",
        entry=entry,
    )
    state.apply(record, DIGEST)
    return state


def check_same(state: RunState, folded: log_rules.Folded) -> None:
    assert state.generation == folded.generation
    phases = {"sealed": 1, "closed": 2, "committed": 3, "aborted": 4}
    for attempt in ATTEMPTS:
        name = NAMES[attempt // log_rules.K_MAX]
        view = state.attempts.get(f"{name}.{attempt % log_rules.K_MAX}")
        assert folded.phases[attempt] == (0 if view is None else phases[view.state])
    target, source = folded.latest
    pointer = state.pointers.get("latest")
    assert (pointer.source if pointer else -1) == source
    if pointer:
        assert pointer.value.target == NAMES[target // log_rules.K_MAX]


PREFIXES = {
    "nothing": (),
    "two seals": ((log_rules.SEAL, 0, (0, ()), 0), (log_rules.SEAL, 1, (0, ()), 0)),
    "two closed": (
        (log_rules.FENCE, 0, 1, 0),
        (log_rules.SEAL, 0, (1, ()), 0),
        (log_rules.SEAL, 1, (1, ()), 0),
        (log_rules.CLOSE, 1, (), 0),
        (log_rules.CLOSE, 0, (), 0),
        (log_rules.SEAL, log_rules.K_MAX, (1, ()), 0),
    ),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_model_and_the_product_have_the_same_rules(prefix: str) -> None:
    """Every sequence of up to four entries after each prefix: both allow the same next entries."""
    state, folded = RunState(), log_rules.EMPTY
    for entry in PREFIXES[prefix]:
        folded = log_rules.step(folded, entry, state.length)
        state = append(state, product_entry(entry))
    assert compare(state, folded, 4) > 1000
