"""The decision log's rules: one example for each."""

from __future__ import annotations

import pytest
from tests.unit.log_samples import (
    MANIFEST,
    A,
    B,
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

from ckptgate.errors import IntegrityError, RefusedError
from ckptgate.model.entries import (
    Close,
    Commit,
    Entry,
    Hold,
    Pin,
    Published,
    Quarantine,
    Reclaim,
)

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
