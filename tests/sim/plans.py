"""What a seed is going to do: machines, clocks, jobs and their scripts, and the kind of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from tests.sim.faults import PROFILES
from tests.sim.trainers import KINDS, Action, Script

__all__ = ["CLOSE_DELAYS_S", "Plan", "plan_of"]

DAY_S: Final = 86_400.0
SKEWS_S: Final = (0.0, 0.0, 3.0, -40.0, DAY_S, -DAY_S)
CLOSE_DELAYS_S: Final = (0.0, 0.005, 0.3, 5.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a seed is going to do.

    Attributes:
        seed: which one.
        profile: name of the faults.
        hosts: how many machines.
        skews_s: how far each machine's clock is off.
        jobs: script of each incarnation.
        members: machine of each rank of each incarnation.
        is_careless: whether an incarnation goes on though it is replaced.
        starts_s: when each incarnation begins; None: once the one before has ended.
        has_reader: a machine that only reads.
        close_delays_s: how long after a close was answered each machine takes it over; 0: before.
    """

    seed: int
    profile: str
    hosts: int
    skews_s: tuple[float, ...]
    jobs: tuple[Script, ...]
    members: tuple[tuple[int, ...], ...]
    is_careless: tuple[bool, ...]
    starts_s: tuple[float | None, ...]
    has_reader: bool
    close_delays_s: tuple[float, ...] = (0.0,)


def plan_of(seed: int, *, profile: str = "") -> Plan:
    """The plan that *seed* stands for; its own profile, named, changes nothing."""
    rng, closes = random.Random(f"plan {seed}"), random.Random(f"closes {seed}")
    own = rng.choice(sorted(PROFILES))
    profile = profile or own
    hosts = rng.choice([1, 2, 2, 2, 3])
    count = rng.choice([1, 1, 2, 2, 3])
    jobs, members = [], []
    for _ in range(count):
        size = hosts if rng.random() < 0.7 else rng.randint(1, hosts)
        members.append(tuple(rng.sample(range(hosts), size)))
        jobs.append(_script(rng))
    starts: list[float | None] = [0.0]
    starts += [rng.choice([None, None, 0.0, 1.0, 30.0]) for _ in range(count - 1)]
    return Plan(
        seed=seed,
        profile=profile,
        hosts=hosts,
        skews_s=tuple(rng.choice(SKEWS_S) for _ in range(hosts + 1)),
        jobs=tuple(jobs),
        members=tuple(members),
        is_careless=tuple(rng.random() < 0.4 for _ in range(count)),
        starts_s=tuple(starts),
        has_reader=rng.random() < 0.4,
        close_delays_s=tuple(closes.choice(CLOSE_DELAYS_S) for _ in range(hosts + 1)),
    )


def _script(rng: random.Random) -> Script:
    actions: list[Action] = []
    names = ["step-1", "step-2", "step-3"]
    for name in names[: rng.choice([1, 1, 2, 2, 3])]:
        actions.append(Action("save", name, rng.choice(KINDS)))
        actions += [_extra(rng, rng.choice(names)) for _ in range(rng.choice([0, 0, 1, 2]))]
    return tuple(actions)


def _extra(rng: random.Random, name: str) -> Action:
    verb = rng.choice(["save", "revise", "point", "delete", "delete", "abort", "wait", "read"])
    if verb == "save":
        return Action(verb, name, rng.choice(KINDS))
    if verb == "wait":
        return Action(verb, rng.choice(["1", "20", "700", "4000"]))
    kind = {"point": ["link", "text"], "read": [""], "abort": [""]}.get(verb, ["one", "all"])
    return Action(verb, name, rng.choice(kind))
