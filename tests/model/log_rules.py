"""The decision log of the protocol model: entries, fold and rules, abstract and small.

`test_commit_protocol` compares the rules with the product's on all short sequences.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeAlias

# Phases of an attempt in the log.
OPEN, SEALED, CLOSED, COMMITTED, ABORTED = range(5)
# Kinds of entries.
FENCE, SEAL, CLOSE, COMMIT, ABORT = "FENCE", "SEAL", "CLOSE", "COMMIT", "ABORT"
Entry: TypeAlias = tuple[str, int, Any, int]
"""Kind, generation key or attempt, detail, writer."""
Log: TypeAlias = tuple[Entry, ...]
NAMES, K_MAX = 2, 4
"""Attempts per name that can be made; attempt = name * K_MAX + k."""


class Folded(NamedTuple):
    """What a log says."""

    generation: int
    fenced: tuple[int, ...]
    phases: tuple[int, ...]
    seals: tuple[int, ...]
    committed_seals: tuple[int, ...]
    latest: tuple[int, int]


COUNT = NAMES * K_MAX
EMPTY = Folded(0, (), (OPEN,) * COUNT, (-1,) * COUNT, (-1,) * NAMES, (-1, -1))


def put(values: tuple[Any, ...], at: int, value: object) -> tuple[Any, ...]:
    """*values* with another one at *at*."""
    return (*values[:at], value, *values[at + 1 :])


def is_legal(folded: Folded, entry: Entry, flaw: str = "") -> bool:
    """The log's rules, abstractly; the product's are compared with these in the test."""
    kind, subject, detail, _ = entry
    if kind == FENCE:
        return subject not in folded.fenced and detail == folded.generation + 1
    phase = folded.phases[subject]
    if kind == SEAL:
        is_newest = detail[0] == folded.generation or flaw == "fence_in_separate_object"
        return phase == OPEN and is_newest
    if kind == CLOSE:
        return phase == SEALED
    if kind == COMMIT:
        if flaw == "success_marker":
            return phase == OPEN
        return phase == (SEALED if flaw == "no_close" else CLOSED) and (
            flaw == "older_seal_may_replace" or not is_superseded(folded, subject)
        )
    return phase < COMMITTED


def is_superseded(folded: Folded, attempt: int) -> bool:
    return folded.committed_seals[attempt // K_MAX] > folded.seals[attempt]


def step(folded: Folded, entry: Entry, index: int, flaw: str = "") -> Folded:
    kind, subject, detail, _ = entry
    if kind == FENCE:
        return folded._replace(generation=detail, fenced=(*folded.fenced, subject))
    phase = {SEAL: SEALED, CLOSE: CLOSED, COMMIT: COMMITTED, ABORT: ABORTED}[kind]
    folded = folded._replace(phases=put(folded.phases, subject, phase))
    if kind == SEAL:
        return folded._replace(seals=put(folded.seals, subject, index))
    if kind == COMMIT:
        seal = folded.seals[subject]
        moves = seal > folded.latest[1] or flaw == "pointer_follows_last_commit"
        return folded._replace(
            committed_seals=put(folded.committed_seals, subject // K_MAX, seal),
            latest=(subject, seal) if moves else folded.latest,
        )
    return folded


@cache
def fold(log: Log, flaw: str = "") -> Folded:
    if not log:
        return EMPTY
    return step(fold(log[:-1], flaw), log[-1], len(log) - 1, flaw)


@cache
def broken_by_log(log: Log, flaw: str = "") -> tuple[str, ...]:
    """I2 to I5 as far as the log alone shows them, without trusting `is_legal`."""
    found: list[str] = []
    generation, sealed, closed, done = 0, {}, set(), {}
    newest: dict[int, int] = {}
    for index, (kind, subject, detail, _) in enumerate(log):
        if kind == FENCE:
            generation = detail
        elif kind == SEAL:
            if detail[0] < generation:
                found.append("I4 SEAL of an older generation after a FENCE")
            sealed[subject] = index
        elif kind == CLOSE:
            closed.add(subject)
        else:
            if subject in done:
                found.append("I3 two decisions about one attempt")
            done[subject] = kind
        if kind == COMMIT:
            if subject not in sealed or (subject not in closed and flaw != "no_close"):
                found.append("I4 COMMIT without SEAL and CLOSE")
            name, seal = subject // K_MAX, sealed.get(subject, -1)
            if newest.get(name, -1) > seal:
                found.append("I2 an older seal replaced a newer committed checkpoint")
            newest[name] = max(seal, newest.get(name, -1))
            before, now = fold(log[:index], flaw).latest, fold(log[: index + 1], flaw).latest
            if now[1] < before[1]:
                found.append("I5 the pointer went back")
    return tuple(found)
