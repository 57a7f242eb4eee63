"""The state machine: two nodes, workers of several jobs, and a model that is a plain directory.

Jobs: `A` has rank 0 on the first node and rank 1 on the second, `S` is a session on the first node
that shares its job with nobody, `B` and `O` only look, from the second and the first node. After
each step every worker sees exactly what the model says.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.e2e.harness import Cluster
from tests.statemachine.moves import Moves
from tests.statemachine.versions import World
from tests.statemachine.workers import Observer, Worker

__all__ = ["Machine", "Stage"]

NAMES = ("step-1", "step-2")
PATHS = ("a.bin", "b.bin", "d", "d/a.bin", "d/c", "d/e", "e", "e/a.bin", "link")
LONG = "long"
"""Stands for more than a page."""
RANK1 = "r1"
"""What rank 1 writes is below this, so that the ranks never mean the same path."""
TEXTS = st.sampled_from(["", "x", "yy\n", "z" * 40, LONG])
FLAGS = (
    os.O_RDWR,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT | os.O_APPEND,
    os.O_RDONLY,
)
WAIT_S = 60.0


class Stage:
    """What all examples share: the nodes, and processes that live as long as they do."""

    def __init__(self, pair: Cluster, base: Path) -> None:
        self.pair = pair
        self.base = base
        self.runs = 0
        self.counts: Counter[str] = Counter()
        """How often something really happened, over all examples."""
        here, there = (node.mnt for node in pair.nodes)
        self.observed: list[tuple[Observer, dict[str, set[str]]]] = []
        self.outside = Worker("outside", here)
        self.looker = Worker("looker", there, "B")
        self.workers: list[Worker] = []

    def cast(self, job: str) -> dict[str, Worker]:
        """Fresh writers for an example: a job that was fenced off stays so."""
        for worker in self.workers:
            worker.stop()
        here, there = (node.mnt for node in self.pair.nodes)
        self.workers = [
            Worker("A0", here, job, 0),
            Worker("A1", there, job, 1),
            Worker("S", here),
        ]
        return {worker.name: worker for worker in self.workers}

    def stop(self) -> None:
        """End all processes."""
        for worker in (*self.workers, self.outside, self.looker):
            worker.stop()


class Machine(RuleBasedStateMachine):
    """See the module; `stage` is set by the test."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        stage = self.stage
        stage.runs += 1
        self.run = f"run{stage.runs}"
        self.job = f"A{stage.runs}"
        self.cast = stage.cast(self.job)
        self.local = Moves()
        self.trace: list[str] = []
        self.world = World(stage.base / self.run)
        self.world.base.mkdir()
        self.open: dict[str, tuple[str, str]] = {}
        """Worker -> (checkpoint, path) that it has open."""
        self.places = {worker.name: worker.mnt / self.run for worker in self.everybody()}
        self.call("S", "mkdir", "")
        for name in self.places:
            self.until(f"the run for {name}", partial(self.is_there, name))
        runs = [node.mnt / self.run for node in stage.pair.nodes] + [stage.pair.store / self.run]
        self.observer: Observer | None = Observer(runs, list(NAMES))

    def is_there(self, name: str) -> bool:
        """Whether a worker finds the run."""
        return self.call(name, "listdir", "")[0] == "ok"

    def everybody(self) -> list[Worker]:
        """All workers."""
        return [*self.cast.values(), self.stage.outside, self.stage.looker]

    def worker(self, name: str) -> Worker:
        """By its name."""
        return next(worker for worker in self.everybody() if worker.name == name)

    def call(self, name: str, move: str, below: str, *words: Any) -> tuple[str, Any]:
        """A move of a worker in this run."""
        place = self.worker(name).mnt / self.run
        got = self.worker(name).call(move, place / below if below else place, *words)
        if move not in {"tree", "state"}:
            self.trace.append(f"{name}.call({move!r}, {below!r}, *{words!r})  # {got!r}")
        return got

    def check(self, is_right: object, *what: object) -> None:
        """Fail with what was done so far, in its order.

        It is printed too: a failure that needs its moment may not come again when it is repeated.
        """
        if not is_right:
            text = "\n".join([" ".join(map(str, what)), *self.trace])
            print(text, flush=True)
            raise AssertionError(text)

    def until(self, what: str, is_true: Callable[[], object], limit_s: float = WAIT_S) -> None:
        """Wait; fails with its name."""
        deadline = time.monotonic() + limit_s
        while not is_true():
            self.check(time.monotonic() < deadline, f"not within {limit_s} s: {what}")
            time.sleep(0.03)

    def both(self, name: str, checkpoint: str, move: str, *words: Any) -> tuple[str, Any]:
        """The same move on the mount and on the model; both must answer the same."""
        worker = self.worker(name)
        words = tuple(word * 1500 if word == LONG else word for word in words)
        seen = self.world.seen(worker.job, checkpoint)
        got = self.call(name, move, checkpoint, *words)
        if seen is None:
            self.check(got == ("error", errno.ENOENT), name, checkpoint, move, words, got)
            return got
        before = seen.path
        version = self.world.changed(worker.job, checkpoint)
        kind, value = self.local.call(move, str(version.path), list(words))
        self.check(got == (kind, value), name, move, words, "is", got, "and not", kind, value)
        self.stage.counts["move that is refused" if kind == "error" else "move"] += 1
        if kind == "error" and version.path != before:
            # Refused: nothing was changed, so no revision began either.
            del self.world.own[worker.job, checkpoint]
        return got

    def path_of(self, name: str, path: str) -> str:
        """Where a worker means *path*."""
        return f"{RANK1}/{path}" if name == "A1" else path

    def is_writable(self, name: str, checkpoint: str) -> bool:
        """Whether the worker may change it: rank 1 writes only in what rank 0 began."""
        seen = self.world.seen(self.worker(name).job, checkpoint)
        if seen is None:
            return False
        return name != "A1" or (seen.job == self.job and seen.base is None)

    # Whole checkpoints

    @initialize()
    def begins(self) -> None:
        """Something is there, and something is committed."""
        self.begin("A0", "step-1")
        self.both("A0", "step-1", "put", "a.bin", "1")
        self.begin("S", "step-2")
        self.both("S", "step-2", "mkdir", "d")
        self.both("S", "step-2", "put", "d/a.bin", "2")
        self.commit("S", "step-2")

    @rule(name=st.sampled_from(["A0", "S"]), checkpoint=st.sampled_from(NAMES))
    def begin(self, name: str, checkpoint: str) -> None:
        """mkdir of a checkpoint: EEXIST if it means something to the worker."""
        job = self.worker(name).job
        got = self.call(name, "mkdir", checkpoint, "")
        if self.world.seen(job, checkpoint) is not None:
            self.check(got == ("error", errno.EEXIST), "mkdir", got)
            return
        self.check(got == ("ok", None), checkpoint, got)
        self.world.begin(job, checkpoint)
        if name == "A0":
            # Whoever writes next, on the other node, finds it: mkdir returned.
            self.until(
                "the checkpoint on the other node",
                lambda: self.call("A1", "mkdir", checkpoint, RANK1)[0] == "ok",
                10.0,
            )
            (self.world.own[job, checkpoint].path / RANK1).mkdir()

    @rule(name=st.sampled_from(["A0", "S"]), checkpoint=st.sampled_from(NAMES))
    def commit(self, name: str, checkpoint: str) -> None:
        """Everybody closes, all ranks commit, and it is there for all."""
        job = self.worker(name).job
        version = self.world.own.get((job, checkpoint))
        if version is None or not any(path.is_file() for path in version.path.rglob("*")):
            return
        ranks = ["A0", "A1"] if name == "A0" and version.base is None else [name]
        for rank in ranks:
            self.close(rank)
            value = f"{ranks.index(rank)}/{len(ranks)}"
            self.until(f"{rank} to commit", partial(self.commits, rank, checkpoint, value))
        self.until("the commit", lambda: self.state(name, checkpoint) == "committed")
        self.stage.counts["commit" if version.base is None else "commit of a revision"] += 1
        self.world.commit(job, checkpoint)
        for gone in self.world.retired():
            self.retire(gone)

    def retire(self, gone: str) -> None:
        """What was removed and is kept by nothing goes for everybody."""
        self.until(
            f"{gone} to be retired", lambda: self.call("outside", "tree", gone)[0] == "error"
        )
        self.stage.counts["retirement"] += 1
        self.world.retire(gone)

    def commits(self, rank: str, checkpoint: str, value: str) -> bool:
        """Whether the commit was taken."""
        kind, found = self.call(rank, "commit", checkpoint, value)
        is_soon = found in {errno.ENOENT, errno.EBUSY}
        self.check(kind == "ok" or is_soon, rank, "commits", checkpoint, found)
        return kind == "ok"

    def state(self, name: str, checkpoint: str) -> str:
        """The state of what the worker sees."""
        kind, value = self.call(name, "state", checkpoint)
        return value["state"] if kind == "ok" else ""

    @rule(name=st.sampled_from(["A0", "S"]), checkpoint=st.sampled_from(NAMES))
    def remove(self, name: str, checkpoint: str) -> None:
        """rm -rf: of an open one, a revision, a committed one."""
        job = self.worker(name).job
        seen = self.world.seen(job, checkpoint)
        if seen is not None and job == self.job and seen.job and seen.base is None:
            # On the other node it goes on: a removal is local until something is committed.
            return
        got = self.call(name, "rmtree", checkpoint)
        if seen is None:
            self.check(got == ("error", errno.ENOENT), "rmtree", got)
            return
        self.check(got == ("ok", None), checkpoint, got)
        self.stage.counts["removal"] += 1
        self.forget_open(job, checkpoint)
        self.world.remove(job, checkpoint)
        for gone in self.world.retired():
            self.retire(gone)

    def forget_open(self, job: str, checkpoint: str) -> None:
        """What was open in a removed tree is closed."""
        for name in ("A0", "A1", "S"):
            if self.worker(name).job == job and self.open.get(name, ("", ""))[0] == checkpoint:
                self.close(name)

    # Files and names inside

    @rule(
        name=st.sampled_from(["A0", "A1", "S"]),
        checkpoint=st.sampled_from(NAMES),
        path=st.sampled_from(PATHS),
        text=TEXTS,
        move=st.sampled_from(["put", "append"]),
    )
    def write(self, name: str, checkpoint: str, path: str, text: str, move: str) -> None:
        """open, write, close."""
        if self.is_writable(name, checkpoint):
            self.both(name, checkpoint, move, self.path_of(name, path), text)

    @rule(
        name=st.sampled_from(["A0", "A1", "S"]),
        checkpoint=st.sampled_from(NAMES),
        path=st.sampled_from(PATHS),
        other=st.sampled_from(PATHS),
        move=st.sampled_from(
            ["exclusive", "unlink", "rename", "mkdir", "rmdir", "symlink", "chmod", "utime", "cut"]
        ),
        number=st.integers(0, 60),
    )
    def change(
        self, name: str, checkpoint: str, path: str, other: str, move: str, number: int
    ) -> None:
        """One call that changes names or attributes."""
        if not self.is_writable(name, checkpoint):
            return
        path, other = self.path_of(name, path), self.path_of(name, other)
        seen = self.world.seen(self.worker(name).job, checkpoint)
        assert seen is not None
        match move:
            case "rename":
                self.both(name, checkpoint, move, path, other)
            case "symlink":
                self.both(name, checkpoint, move, "a.bin", path)
            case "chmod" | "utime" | "cut" if (seen.path / path).is_symlink():
                # Through the link: where that leads nowhere, there is nothing to compare.
                return
            case "chmod":
                self.both(name, checkpoint, move, path, 0o700 | number % 8)
            case "utime":
                self.both(name, checkpoint, move, path, 10**18 + number)
            case "cut":
                size = (seen.path / path).stat().st_size if (seen.path / path).is_file() else 0
                self.both(name, checkpoint, "truncate", path, min(number, size))
            case _:
                self.both(name, checkpoint, move, path)

    @rule(
        name=st.sampled_from(["A0", "A1", "S"]),
        checkpoint=st.sampled_from(NAMES),
        path=st.sampled_from(PATHS),
        flags=st.sampled_from(FLAGS),
    )
    def open_file(self, name: str, checkpoint: str, path: str, flags: int) -> None:
        """Open and keep open; in what is not committed."""
        seen = self.world.seen(self.worker(name).job, checkpoint)
        if not self.is_writable(name, checkpoint) or seen is None or not seen.job:
            return
        path = self.path_of(name, path)
        self.close(name)
        if self.both(name, checkpoint, "open", name, path, flags)[0] == "ok":
            self.open[name] = (checkpoint, path)

    @rule(
        name=st.sampled_from(["A0", "A1", "S"]),
        move=st.sampled_from(
            ["pwrite", "write", "fork_write", "ftruncate", "fsync", "map", "pread"]
        ),
        text=TEXTS,
        number=st.integers(0, 60),
    )
    def use_file(self, name: str, move: str, text: str, number: int) -> None:
        """Through a descriptor, whatever became of its name."""
        if name not in self.open:
            return
        checkpoint, _ = self.open[name]
        size = self.both(name, checkpoint, "fstat", name)[1][0]
        match move:
            case "pwrite":
                self.both(name, checkpoint, move, name, min(number, size), text)
            case "write" | "fork_write":
                self.both(name, checkpoint, move, name, text)
            case "map":
                self.both(name, checkpoint, move, name, text)
            case "ftruncate":
                self.both(name, checkpoint, move, name, min(number, size))
            case _:
                self.both(name, checkpoint, move, name)

    @rule(name=st.sampled_from(["A0", "A1", "S"]))
    def close(self, name: str) -> None:
        """Close what the worker has open."""
        if self.open.pop(name, None) is not None:
            self.call(name, "close", "", name)
            self.local.call("close", "", [name])

    # The world

    @rule(node=st.integers(0, 1), kind=st.sampled_from(["mount", "publisher"]))
    def kill(self, node: int, kind: str) -> None:
        """kill -9 of a process of a node; its supervisor starts another one."""
        self.trace.append(f"nodes[{node}].kill({kind!r})")
        self.stage.pair.nodes[node].kill(kind)
        self.stage.counts[f"kill of a {kind}"] += 1

    @rule()
    def time_passes(self) -> None:
        """What is due happens: digests, uploads, votes."""
        time.sleep(0.3)

    # What must hold

    @invariant()
    def everybody_sees_what_the_model_says(self) -> None:
        """I8, I11: names, kinds, modes, sizes, links and bytes of every checkpoint."""
        if not hasattr(self, "places"):
            return
        for worker in self.everybody():
            for checkpoint in NAMES:
                self.compare(worker, checkpoint)

    def compare(self, worker: Worker, checkpoint: str) -> None:
        """One worker's view of one checkpoint; what happens on another node may take a moment."""
        expected = self.view_of(worker, checkpoint)
        deadline = time.monotonic() + 10.0
        while True:
            got = self.call(worker.name, "tree", checkpoint)
            found = got[1] if got[0] == "ok" else None
            if got[0] == "error":
                self.check(got[1] == errno.ENOENT, worker.name, checkpoint, got)
            shown = self.without_the_other_rank(worker, checkpoint, found)
            if shown == expected:
                return
            is_late = worker.name in {"A1", "looker"} and time.monotonic() < deadline
            what = f"{worker.name} sees in {checkpoint}: {shown}\nbut not: {expected}"
            self.check(is_late, what)
            time.sleep(0.05)

    def view_of(self, worker: Worker, checkpoint: str) -> list[list[Any]] | None:
        """What the worker should see."""
        seen = self.world.seen(worker.job, checkpoint)
        if worker.name == "A1" and (seen is None or seen.base is not None or not seen.job):
            # Removals and revisions are seen on the node where they are made.
            seen = self.world.committed.get(checkpoint)
        if seen is None:
            return None
        tree = self.local.call("tree", str(seen.path), [])[1]
        return self.without_the_other_rank(worker, checkpoint, tree)

    def without_the_other_rank(
        self, worker: Worker, checkpoint: str, tree: list[list[Any]] | None
    ) -> list[list[Any]] | None:
        """A rank sees the other one's files of an open checkpoint sooner or later."""
        if tree is None or worker.job != self.job:
            return tree
        own = self.world.own.get((self.job, checkpoint))
        if own is None or own.base is not None:
            return tree
        is_first = worker.name == "A0"
        return [
            item
            for item in tree
            if (item[0] != RANK1 and not item[0].startswith(RANK1 + "/")) == is_first
        ]

    def teardown(self) -> None:
        """I8: nobody ever saw anything but a committed version, also in the store itself."""
        for name in ("A0", "A1", "S"):
            self.close(name)
        observer, self.observer = self.observer, None
        if observer is not None:
            for run, name, digest in observer.stop():
                allowed = self.world.allowed.get(name, set())
                what = f"a part of {name} was seen in {run}: {digest}\nallowed: {allowed}"
                self.check(digest in allowed, what)
                self.stage.counts["version observed"] += 1
