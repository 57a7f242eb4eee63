"""What may happen to a store call, drawn from the seed; and the store as one process sees it.

A request may be delayed, get lost, be answered never, arrive twice, or arrive long after its caller
gave it up; its caller may be killed before or after its effect, or stand still for hours.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import blake3
from tests.sim.scheduler import Killed, Process, Scheduler, TaskLock

from ckptgate.engine.verify import fold_log
from ckptgate.errors import CkptError, TransientStoreError
from ckptgate.model.documents import Manifest
from ckptgate.model.reclaim import Part
from ckptgate.ports.store import (
    DigestedFile,
    Store,
    VerifyMode,
    Won,
    always,
    put_each,
    reclaim_each,
)
from ckptgate_adapters.memory_store import MemoryStore

__all__ = ["CALM", "OTHERS", "PROFILES", "Faults", "Network", "ProcessStore", "Profile"]

READS: Final = frozenset({
    "get", "children", "read", "read_into", "verify", "published_attempt", "published_problems",
    "pointer_content", "plain_stat", "plain_list", "plain_read", "probe", "attempt_parts",
    "unfinished",
})  # fmt: skip
"""Calls that change nothing; all others may arrive late or twice, except those of plain names,
which are last-writer-wins by contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How often what happens: a share of the calls.

    Attributes:
        lost: the request never arrives.
        mute: it has its effect, the reply gets lost.
        late: its caller is told that nothing is known; it arrives later.
        twice: it arrives now, and once more later.
        slow: it takes up to a few seconds.
        kill: the caller's process is killed, before or after the effect.
        spares_mounts: no mount is killed, and so no job ends early.
        down_s: a killed publisher is started again after one of these.
        crash: so many of these kills take the whole machine.
        dead: so many of these machines never come back.
        hold: the machine stands still, for up to some hours.
        outage: a machine loses the store for minutes.
    """

    lost: float = 0.0
    mute: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    slow: float = 0.1
    kill: float = 0.0
    spares_mounts: bool = False
    down_s: tuple[float, ...] = (0.2, 3.0, 90.0)
    crash: float = 0.0
    dead: float = 0.0
    hold: float = 0.0
    outage: float = 0.0


CALM: Final = Profile(slow=0.0)
PROFILES: Final = {
    "calm": Profile(slow=0.2),
    "lossy": Profile(lost=0.05, mute=0.05, late=0.03, twice=0.03),
    "stormy": Profile(lost=0.12, mute=0.12, late=0.12, twice=0.1),
    "killed": Profile(mute=0.01, kill=0.03),
    "crashing": Profile(mute=0.02, late=0.02, kill=0.02, crash=0.5),
    "dying": Profile(mute=0.02, late=0.03, kill=0.015, crash=0.8, dead=0.5),
    "zombies": Profile(mute=0.03, late=0.05, hold=0.02),
    "outages": Profile(lost=0.02, mute=0.02, late=0.03, outage=0.01),
    "everything": Profile(
        lost=0.03, mute=0.04, late=0.04, twice=0.03, kill=0.01, crash=0.4, dead=0.2, hold=0.01,
        outage=0.003,
    ),
}  # fmt: skip
"""A seed takes one of these."""
OTHERS: Final = {
    # Nothing takes so long that a mount gives a close up and tells its caller so.
    "quiet": CALM,
    "publishers": Profile(slow=0.0, kill=0.03, spares_mounts=True, down_s=(0.2, 3.0)),
    # One that is down for hours only comes back when the faults have ended.
    "absent": Profile(kill=0.05, spares_mounts=True, down_s=(90.0, 200.0, 20_000.0)),
}
"""Taken by name only."""


class Faults:
    """Draws the fate of each call."""

    def __init__(self, rng: random.Random, profile: Profile) -> None:
        self.rng = rng
        self.profile = profile
        self.count = 0
        """Faults so far."""

    def end(self) -> None:
        """From now on all is well."""
        self.profile = CALM

    def hits(self, share: float) -> bool:
        """Whether something of that share happens now."""
        return share > 0 and self.rng.random() < share

    def delay_s(self) -> float:
        """How long a request or its reply is on its way; mostly only others come in between."""
        if not self.hits(self.profile.slow):
            return 0.0
        return self.rng.choice([0.001, 0.02, 0.3, 2.0, 8.0])

    def fate(self, *, is_late_possible: bool) -> str:
        """One of `ok`, `lost`, `mute`, `late`, `twice`."""
        at = self.rng.random()
        profile = self.profile
        for fate, share in (("lost", profile.lost), ("mute", profile.mute)):
            if at < share:
                return fate
            at -= share
        if is_late_possible:
            for fate, share in (("late", profile.late), ("twice", profile.twice)):
                if at < share:
                    return fate
                at -= share
        return "ok"


class Network:
    """The store, and all ways to it."""

    def __init__(self, scheduler: Scheduler, faults: Faults, spare: str) -> None:
        self.scheduler = scheduler
        self.faults = faults
        self.store = MemoryStore()
        self.on_effect: Callable[[str, tuple[Any, ...]], None] = lambda _name, _args: None
        """Called after each change of the store."""
        self.on_kill: Callable[[Process], None] = lambda _process: None
        self.on_hold: Callable[[Process], None] = lambda _process: None
        self.on_outage: Callable[[Process], None] = lambda _process: None
        self.locks: dict[str, TaskLock] = {}
        self.has_locks = faults.rng.random() < 0.5
        """Whether `lock_run` excludes anybody: it is advisory."""
        self.calls = 0
        self.version = 0
        """Changes of the store so far."""
        self._spare = spare
        self._spares = 0

    def apply(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do it, and look at the store if it changed."""
        self.calls += 1
        result = getattr(self.store, name)(*args, **kwargs)
        if name not in READS:
            self.version += 1
            self.on_effect(name, args)
        return result

    def send_late(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """It arrives some time; its sender is asked nothing then."""
        args = self._kept(args)
        kwargs = {name: value for name, value in kwargs.items() if name != "is_due"}
        label = f"{name} {shown(args)}"
        may_land = self._publication(args[0], args[1]) if name == "publish" else always

        def land() -> None:
            if not may_land():
                self.scheduler.note(f"late {label} -> refused")
                return
            try:
                self.apply(name, args, kwargs)
                said = "ok"
            except CkptError as exc:
                said = type(exc).__name__
            self.scheduler.note(f"late {label} -> {said}")

        self.scheduler.late.append((label, land))

    def _publication(self, run: str, manifest: Manifest) -> Callable[[], bool]:
        """By the contract it replaces only what its sender had seen, and asked the log about."""
        is_due = fold_log(self.store, run).current.get(manifest.name) == manifest.attempt
        seen = self.store.published_attempt(run, manifest.name)
        return lambda: is_due and self.store.published_attempt(run, manifest.name) == seen

    def close(self) -> None:
        for number in range(1, self._spares + 1):
            os.unlink(f"{self._spare}/late-{number}")

    def _kept(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Bytes on their way stay what they were when they were sent."""
        if not (len(args) > 1 and isinstance(args[1], DigestedFile)):
            return args
        self._spares += 1
        path = f"{self._spare}/late-{self._spares}"
        shutil.copyfile(args[1].path, path)
        return args[0], dataclasses.replace(args[1], path=path)


class ProcessStore:
    """`ports.store.Store` as one process has it."""

    url = "memory:"
    default_verify = VerifyMode.READBACK
    verify_modes = frozenset({VerifyMode.READBACK})

    def __init__(self, network: Network, process: Process, *, is_cut: Callable[[], bool]) -> None:
        self._network = network
        self._process = process
        self._is_cut = is_cut

    def local_path(self, key: str) -> str | None:
        del key
        return None

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        """Call by call, so that something may happen to each."""
        return put_each(cast("Store", self), files, mode)

    def reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        """Call by call, too."""
        return reclaim_each(cast("Store", self), run, parts)

    @contextmanager
    def lock_run(self, run: str) -> Generator[None]:
        network = self._network
        if not network.has_locks:
            yield
            return
        lock = network.locks.setdefault(run, TaskLock(network.scheduler))
        with lock:
            yield

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        setattr(self, name, call)
        return call

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        network, scheduler, faults = self._network, self._network.scheduler, self._network.faults
        self._check_alive()
        if scheduler.current is None:
            return network.apply(name, args, kwargs)
        label = f"{name} {shown(args)}"
        scheduler.pause(faults.delay_s())
        self._check_alive()
        fate = faults.fate(is_late_possible=name not in READS and not name.startswith("plain_"))
        kill = self._kill_at()
        if self._is_cut() and not kill:
            fate = "lost"
        if faults.hits(faults.profile.outage):
            network.on_outage(self._process)
        if fate != "ok" or kill:
            faults.count += 1
        if kill == "before":
            if fate in {"late", "twice"}:
                network.send_late(name, args, kwargs)
            self._kill(f"{label} ({fate})")
        if fate in {"lost", "late"}:
            if fate == "late":
                network.send_late(name, args, kwargs)
            scheduler.note(f"{label} -> {fate}")
            scheduler.pause(faults.delay_s())
            self._no_reply(name)
        if fate == "twice":
            network.send_late(name, args, kwargs)
        try:
            result = network.apply(name, args, kwargs)
        except CkptError as exc:
            scheduler.note(f"{label} -> {type(exc).__name__} {fate}")
            self._after(name, fate, kill, label)
            raise
        scheduler.note(f"{label} -> {fate} {shown((result,))}")
        self._after(name, fate, kill, label)
        return result

    def _kill_at(self) -> str:
        """Whether the caller is killed, `before` or `after` the effect."""
        faults = self._network.faults
        if faults.profile.spares_mounts and self._process.is_mount:
            return ""
        return faults.rng.choice(("before", "after")) if faults.hits(faults.profile.kill) else ""

    def _after(self, name: str, fate: str, kill: str, label: str) -> None:
        """The reply's way back."""
        scheduler, faults = self._network.scheduler, self._network.faults
        if kill:
            self._kill(label)
        if faults.hits(faults.profile.hold):
            self._network.on_hold(self._process)
        scheduler.pause(faults.delay_s())
        self._check_alive()
        if fate == "mute":
            self._no_reply(name)

    def _kill(self, label: str) -> None:
        self._network.scheduler.note(f"killed at {label}")
        self._network.on_kill(self._process)
        raise Killed

    def _check_alive(self) -> None:
        if not self._process.is_alive:
            raise Killed

    @staticmethod
    def _no_reply(name: str) -> None:
        msg = f"no reply to {name}"
        raise TransientStoreError(msg, subject=name)


def shown(args: tuple[Any, ...]) -> str:
    """Arguments or a result for the trace; bytes by their digest, no local paths."""
    return " ".join(_shown(arg) for arg in args)


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)}:{blake3.blake3(value).hexdigest()[:8]}"
    if isinstance(value, DigestedFile):
        return f"{value.size}:{value.digest[:8]}"
    if isinstance(value, (str, int, type(None))):
        return str(value)
    if isinstance(value, list):
        return f"[{' '.join(_shown(item) for item in value)}]"
    attempt = getattr(value, "attempt", None) or getattr(value, "pointer", None)
    return str(attempt or getattr(value, "name", type(value).__name__))
