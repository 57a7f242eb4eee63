"""Framework x fault: trainings on a raw directory and on mounts, disturbed in their second save.

Each case is a start of a training with a fault, a second start where the first didn't end, and an
observer that looks at the run meanwhile. Which calls a save consists of is counted in the case
without a fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.e2e.harness import FAST, Cluster, cluster, until
from tests.frameworks.observer import Observer, Sight
from tests.frameworks.trainings import known
from tests.frameworks.trainings.rules import Rules

__all__ = ["BEHIND", "FAULTS", "POINTS", "Case", "Matrix", "Result", "matrix"]

POINTS: Final = 10
BEHIND: Final = "the newest isn't found"
FAULTS: Final = ("none", "late", *(f"kill-{at}" for at in range(POINTS)), "kill-all")
STEPS, EVERY, SAVE, KEEP = 6, 2, 2, 2
LATE_S = 3.0
RUN_S = 45.0
ROOT = Path(__file__).parents[2]
# Silence is shorter than a rank may be late: it alone must never be what commits.
CONFIG = FAST.replace("[commit]\n", "[commit]\nquiescence_s = 1.5\ndeadline_s = 20.0\n")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case.

    Attributes:
        framework, place, fault: which one; the place is `raw` or `ckptgate`.
        wrong: what was seen that must not be.
        misled: the same, as far as the framework's own rule led there.
        resumed: what the second start began from; None where there was none.
        is_equal: the training ended as an undisturbed one.
        error: the end of the log of a second start that failed, or that the last checkpoint isn't
            what the framework's own rule leads to in the end.
        seconds: it took.
    """

    framework: str
    place: str
    fault: str
    wrong: tuple[str, ...]
    misled: tuple[str, ...]
    resumed: str | None
    is_equal: bool
    error: str
    seconds: float


class Started:
    """A starter's two servers."""

    def __init__(self, name: str, log: Path) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        env = {key: value for key, value in os.environ.items() if not key.startswith("CKPTGATE")}
        # A rank's environment takes the place of its starter's.
        env |= {"OMP_NUM_THREADS": "1", "CKPT_ROOM": "." * 4096}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.frameworks.starter", name, *map(str, theirs)],
                env=env,
                cwd=ROOT,
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.log = log
        self.lines = []
        for ours, other in pairs:
            other.close()
            self.lines.append(ours.makefile("rw"))
            ours.close()
        for lines in self.lines:
            assert lines.readline() == "{}\n", log.read_text()[-3000:]

    def ask(self, server: int, words: Mapping[str, Any]) -> dict[str, Any]:
        lines = self.lines[server]
        lines.write(json.dumps(words) + "\n")
        lines.flush()
        answer = lines.readline()
        assert answer, self.log.read_text()[-3000:]
        return json.loads(answer)

    def start(self, words: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask(0, words)

    def read(self, path: Path) -> dict[str, Any]:
        return self.ask(1, {"path": str(path), "log": str(self.log.with_suffix(".reads"))})

    def end(self) -> None:
        for lines in self.lines:
            lines.close()
        self.process.wait(20)


@dataclass(slots=True)
class Case:
    """A run's directory for one case: at a raw place, or on the nodes' mounts.

    Attributes:
        roots: the directory as each node has it.
        seen: name of a place -> the directory there.
    """

    roots: list[Path]
    seen: dict[str, Path]


@dataclass(slots=True)
class Matrix:
    """All cases of a framework; the first start on a raw directory says what must come of others.

    Attributes:
        known: checkpoint -> its files and digest.
        final: digests of the ranks' last state.
        ops: place -> rank -> the calls of its second save.
    """

    name: str
    base: Path
    started: Started
    rules: Rules
    cluster: Cluster | None = None
    known: dict[str, Any] = field(default_factory=dict)
    final: list[str] = field(default_factory=list)
    ops: dict[str, dict[int, list[Any]]] = field(default_factory=dict)
    count: int = 0

    def undisturbed(self) -> None:
        """The run on a raw directory that all others are compared with."""
        case = self._raw("reference")
        run = self.rules.run_of(case.roots[0])
        ended, out = self._start("raw", "reference", case)
        assert not any(ended["codes"].values()), self._log(out)
        names = [name for name in sorted(os.listdir(run)) if self.rules.step.fullmatch(name)]
        self.known = {name: self.started.read(run / name) for name in names}
        assert not [found for found in self.known.values() if "error" in found], self.known
        self.final = self._final(out)
        assert len(self.known) == STEPS // EVERY, sorted(self.known)
        # Another one ends alike, or nothing could be told.
        again = self._raw("again")
        ended, out = self._start("raw", "again", again)
        assert self._final(out) == self.final, "the training isn't deterministic"

    def case(self, place: str, fault: str) -> Result:
        """A training with that fault at that place, and what came of it."""
        began = time.monotonic()
        case = self._raw(fault) if place == "raw" else self._mounted(fault)
        places = {name: self.rules.run_of(path) for name, path in case.seen.items()}
        resumed: str | None = None
        error = ""
        with Observer(self.rules, places, self.started.read, self.known) as observer:
            watched = self._watched(place, fault)
            ended, out = self._start(place, fault, case, watched, counted=fault == "none")
            if watched:
                assert ended["has_struck"], f"{fault} was not reached: {self._log(out)}"
            if place == "ckptgate" and fault == "kill-all":
                self._kill_daemons()
            if any(ended["codes"].values()):
                assert fault.startswith("kill"), self._log(out)
                ended, out = self._start(place, f"{fault}-again", case)
                resumed = (out / "began-0").read_text() if (out / "began-0").exists() else ""
                error = self._log(out) if any(ended["codes"].values()) else ""
            else:
                assert not fault.startswith("kill"), self._log(out)
            if place == "ckptgate" and not error:
                error = self._settle(places, observer)
        assert observer.rounds >= 3
        return Result(
            self.name,
            place,
            fault,
            _lines(observer.wrong),
            _lines({sight for sight in observer.wrong if sight.is_newest}),
            resumed,
            not error and self._final(out) == self.final,
            error,
            round(time.monotonic() - began, 2),
        )

    # Places

    def _raw(self, fault: str) -> Case:
        path = self.base / "raw" / f"run-{fault}"
        path.parent.mkdir(exist_ok=True)
        return Case([path] * self.rules.nodes, {"raw": path})

    def _mounted(self, fault: str) -> Case:
        assert self.cluster is not None
        name = f"run-{fault}"
        seen = {node.name: node.mnt / name for node in self.cluster.nodes}
        roots = list(seen.values())[: self.rules.nodes]
        roots[0].mkdir()
        return Case(roots, seen | {"store": self.cluster.store / name})

    def _settle(self, places: Mapping[str, Path], observer: Observer) -> str:
        """Wait until the newest is what it must be everywhere; what is wrong if it never is."""
        last = max(self.known, key=_number)

        def is_there() -> bool:
            observer_saw = {(place, last) for place in places} <= observer.whole
            return observer_saw and all(self._newest(run) == last for run in places.values())

        try:
            until(f"{last} everywhere", is_there, 40)
        except AssertionError as exc:
            seen = {place: self._newest(run) for place, run in places.items()}
            return f"{BEHIND}: {exc}: newest {seen}, seen whole {observer.whole}"
        return ""

    def _newest(self, run: Path) -> str:
        if not run.is_dir():
            return ""
        found = self.rules.newest(run)
        return "" if found is None else found.resolve().name

    def _kill_daemons(self) -> None:
        assert self.cluster is not None
        for node in self.cluster.nodes:
            for kind in ("publisher", "mount"):
                node.kill(kind)

    # Starts

    def _start(
        self,
        place: str,
        fault: str,
        case: Case,
        watched: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        counted: bool = False,
    ) -> tuple[dict[str, Any], Path]:
        self.count += 1
        out = self.base / f"out-{place}-{fault}"
        ranks = range(self.rules.world)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ended = self.started.start(
            {
                "roots": [str(path) for path in case.roots],
                "out": str(out),
                "job": f"job{self.count}-{os.getpid()}",
                "port": port,
                "steps": STEPS,
                "every": EVERY,
                "keep": None if fault == "reference" else KEEP,
                "timeout_s": RUN_S,
                "watched": {rank: {} for rank in ranks} if counted else dict(watched or {}),
            }
        )
        if counted:
            ops = {int(rank): saves.get(str(SAVE), []) for rank, saves in ended["ops"].items()}
            self.ops[place] = {rank: calls for rank, calls in ops.items() if calls}
        return ended, out

    def _watched(self, place: str, fault: str) -> dict[int, dict[str, Any]]:
        """Which rank is disturbed, where."""
        if fault == "none":
            return {}
        if place not in self.ops:
            self.case(place, "none")
        ops = self.ops[place]
        ranks = sorted(ops, reverse=True)
        if fault == "late":
            return {ranks[0]: {"save": SAVE, "op": 0, "kind": "late", "seconds": LATE_S}}
        if fault == "kill-all":
            return {ranks[-1]: {"save": SAVE, "op": len(ops[ranks[-1]]) // 2, "kind": "kill-all"}}
        point = int(fault.rpartition("-")[2])
        rank = ranks[point % len(ranks)]
        op = round(point * (len(ops[rank]) - 1) / (POINTS - 1))
        return {rank: {"save": SAVE, "op": op, "kind": "kill"}}

    def _final(self, out: Path) -> list[str]:
        found = [out / f"final-{rank}" for rank in range(self.rules.world)]
        return [path.read_text() if path.exists() else "" for path in found]

    def _log(self, out: Path) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(out.glob("log-*"))
        )


def _lines(sights: set[Sight]) -> tuple[str, ...]:
    return tuple(sorted({f"{s.place}/{s.name}: {s.what}" for s in sights}))


def _number(name: str) -> int:
    return int("".join(letter if letter.isdigit() else " " for letter in name).split()[-1])


@contextlib.contextmanager
def matrix(name: str, base: Path, *, mounted: bool) -> Iterator[Matrix]:
    """The cases of a framework, with two nodes' mounts if they are wanted."""
    started = Started(name, base / "starter.log")
    try:
        with contextlib.ExitStack() as stack:
            made = Matrix(name, base, started, known.rules_of(name))
            made.undisturbed()
            if mounted:
                made.cluster = stack.enter_context(cluster(base, nodes=2, config=CONFIG))
            yield made
    finally:
        started.end()
