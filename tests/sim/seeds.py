"""Which seeds are run when, and how a test runs many of them.

`CKPTGATE_SEED` names one seed, for `test_one_seed`, and `CKPTGATE_PROFILE` its faults where they
aren't its own; `CKPTGATE_SEEDS` how many new ones a test takes. New ones rotate by date, so that
each day's run looks at histories that nobody has seen.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from tests.sim.simulation import run_seed

__all__ = ["REGRESSIONS", "fresh_seeds", "parts", "run_all"]

COUNT: Final = int(os.environ.get("CKPTGATE_SEEDS", "50"))
"""New seeds of one module in the default run; two modules take so many each."""
_AT_ONCE: Final = 100
_OF_A_DAY: Final = 1_000_000

REGRESSIONS: Final = {
    (2, ""): "an idle member waits for a SEAL that comes late",
    (16, ""): "a gateway that was away fenced off the incarnation that goes on",
    (42, ""): "a name was resolved inside of a transaction, while the log was being read",
    (43, ""): "a save whose event was seen was fenced off by the next job of the same machine",
    (95, ""): "a revision was committed with its base's shard in the place of one that came late",
    (108, ""): "a close promised nothing to `commit --all`",
    (311, ""): "a revision that was half written anew was sealed by silence",
    (
        20341,
        "",
    ): "a checkpoint was retired before it was shown, and what it had replaced stayed shown",
    (354, ""): "files were added to a checkpoint without a word",
    (
        739950000301,
        "",
    ): "jobs that began after the faults had ended fenced off the last incarnation",
    (22000036, "killed"): "a directory that another node had begun was begun a second time",
    (22000129, "stormy"): "the same, with a store that did not answer in between",
}
"""Seed and faults (its own where none are named) that found something once -> what."""


def fresh_seeds(count: int, *, series: int) -> range:
    """Seeds that are new each day; each *series* has its own."""
    day = datetime.now(UTC).toordinal()
    first = day * _OF_A_DAY + series * (_OF_A_DAY // 10)
    return range(first, first + count)


def parts(series: int) -> list[Any]:
    """The new seeds of one module, a hundred for each of its tests, whose names tell no date."""
    seeds = fresh_seeds(COUNT, series=series)
    starts = range(0, COUNT, _AT_ONCE)
    return [pytest.param(seeds[at : at + _AT_ONCE], id=f"from-{at}") for at in starts]


def run_all(seeds: Iterable[int]) -> Counter[str]:
    """Run them; how much was seen, in all.

    Raises:
        SeedFailedError: the first that breaks an invariant; others that do are named.
    """
    total: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_seed(seed)
        total += Counter(
            seeds=1,
            turns=outcome.turns,
            calls=outcome.calls,
            faults=outcome.faults,
            entries=outcome.entries,
            committed=len(outcome.committed),
            aborted=outcome.aborted,
            states=len(outcome.states),
        )
    print(f"simulated: {dict(total)}")
    return total
