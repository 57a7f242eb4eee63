"""What trainers do, through the product's own name space (`Vfs`), as a kernel would ask for it.

A job is one incarnation: ranks on machines, which run one script of saves, re-saves, revisions,
pointers and deletions, in step where a framework has a barrier. The content of each file tells who
wrote it when, so that the checker can tell whole from mixed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any, Final

from tests.sim.checker import Checker
from tests.sim.contents import content, dcp_metadata
from tests.sim.machines import RUN, Machine, Mount
from tests.sim.readers import read_once
from tests.sim.saves import Save
from tests.sim.scheduler import Scheduler, Task

from ckptgate.errors import CkptError, ExistsError, MissingError
from ckptgate.model.jobkey import JobKey, JobKind, RankInfo
from ckptgate.model.states import UNDECIDED
from ckptgate.vfs.interface import Caller

__all__ = ["KINDS", "Action", "Job", "Script"]

BARRIER_S: Final = 300.0
DECIDED_S: Final = 200.0
LAST: Final = 99
"""Number of the incarnation whose save is plain."""
KINDS: Final = ("explicit", "explicit", "dcp", "dcp", "rename", "all")


class JobFailedError(Exception):
    """The trainer gives up: a call failed, or another rank did."""


@dataclass(frozen=True)
class Action:
    """One thing that a job does; *kind* and *name* as its verb needs them."""

    verb: str
    name: str = ""
    kind: str = ""


Script = tuple[Action, ...]


@dataclass
class Job:
    """One incarnation."""

    key: str
    number: int
    machines: list[Machine]
    script: Script
    scheduler: Scheduler
    checker: Checker
    seed: str
    is_careless: bool = False
    """Its ranks go on though others have failed, until they have to wait for them."""
    has_failed: bool = False
    finished: int = 0
    acked: set[str] = field(default_factory=set)
    """Saves of which every rank was told that all went well."""
    reasons: list[str] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    undecided: set[int] = field(default_factory=set)
    """Actions before which a rank found no end of what it had done there before."""
    _arrived: dict[str, int] = field(default_factory=dict)
    _acks: dict[str, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.machines)

    @property
    def is_over(self) -> bool:
        return self.has_failed or self.finished == self.world

    @property
    def is_gone(self) -> bool:
        """Whether none of its processes runs any more."""
        return all(task.is_over for task in self.tasks)

    def start(self) -> None:
        for rank, machine in enumerate(self.machines):
            mount = machine.mount
            if mount is None:
                self.fail("its machine is down")
                return
            trainer = _Rank(self, rank, mount)
            task = self.scheduler.spawn(f"{self.key}/{rank}", mount.process, trainer.run)
            self.tasks.append(task)

    def fail(self, why: str) -> None:
        if not self.has_failed:
            self.scheduler.note(f"{self.key} fails: {why}")
        self.has_failed = True
        self.reasons.append(why)

    def barrier(self, tag: str) -> None:
        self._arrived[tag] = self._arrived.get(tag, 0) + 1
        is_met = self.scheduler.wait_until(
            lambda: self._arrived[tag] >= self.world or self.has_failed, BARRIER_S
        )
        if not is_met or self._arrived[tag] < self.world:
            msg = f"barrier {tag}"
            raise JobFailedError(msg)

    def acknowledged(self, save: Save) -> None:
        self._acks[save.id] = self._acks.get(save.id, 0) + 1
        if self._acks[save.id] == save.world:
            self.acked.add(save.id)

    def save_of(self, action: Action, number: int) -> Save:
        id = f"{self.key}#{number}"
        if id not in self.checker.saves:
            world = 1 if action.verb == "revise" and action.kind == "one" else self.world
            made = Save(id, self.key, action.name, action.kind, world)
            rng = random.Random(f"{self.seed}{id}")
            made.has_shared = action.kind == "explicit" and rng.random() < 0.25
            made.is_contradicting = made.has_shared and rng.random() < 0.3 and self.number < LAST
            self.checker.saves[id] = made
        return self.checker.saves[id]


class _Rank:
    """One process of a job."""

    def __init__(self, job: Job, rank: int, mount: Mount) -> None:
        self.job = job
        self.rank = rank
        self.mount = mount
        self.scheduler = job.scheduler
        machine = mount.machine
        pid = 1000 + 100 * len(machine.identify.processes) + rank
        key = JobKey(JobKind.RUN_ID, job.key)
        machine.identify.add(pid, key, RankInfo(rank, job.world))
        self.pid = pid
        self.caller = Caller(0, 0, pid, may_block=True)
        self.world = mount.world
        self.vfs = mount.vfs

    def run(self) -> None:
        try:
            self._makedirs(RUN)
            for number, action in enumerate(self.job.script):
                if self.job.has_failed and not self.job.is_careless:
                    break
                self.scheduler.pause()
                if self._is_due(action, number):
                    getattr(self, f"_{action.verb}")(action, number)
            self.job.finished += 1
        except (JobFailedError, OSError) as exc:
            self.job.fail(f"rank {self.rank}: {type(exc).__name__}: {exc}")
        finally:
            identify = self.mount.machine.identify
            identify.dead.add(self.pid)
            identify.exiting.add(self.pid)

    def _is_due(self, action: Action, number: int) -> bool:
        """Who wrote a name before waits for what became of it: else two saves would be one."""
        earlier = [past for past in self.job.script[:number] if past.name == action.name]
        if action.verb not in {"save", "revise", "delete"} or not earlier:
            return True
        self.job.barrier(f"before-{number}")
        is_decided = self.scheduler.wait_until(lambda: not self._undecided(action.name), DECIDED_S)
        if not is_decided:
            self.job.undecided.add(number)
        self.job.barrier(f"decided-{number}")
        return number not in self.job.undecided

    def _undecided(self, name: str) -> bool:
        rows = self.mount.machine.spool.attempts(run=RUN, states=UNDECIDED)
        return any(row.name in {name, f"{name}.tmp"} for row in rows)

    # Verbs

    def _save(self, action: Action, number: int) -> None:
        save = self.job.save_of(action, number)
        name = action.name
        path = f"{RUN}/{name}.tmp" if action.kind == "rename" else f"{RUN}/{name}"
        if self.rank == 0 or action.kind == "explicit":
            self._makedirs(path)
        if action.kind != "explicit":
            self.job.barrier(f"made-{number}")
        self._write_part(save, path)
        getattr(self, f"_finish_{action.kind}")(save, path, number)
        self.job.acknowledged(save)

    def _write_part(self, save: Save, path: str) -> None:
        rng = random.Random(f"{self.job.seed}{save.id}/{self.rank}")
        for file in self._files_of(save, rng):
            # What all ranks write alike is merged; what they don't is an error.
            is_alike = file == "shared.bin" and not save.is_contradicting
            rank = 0 if is_alike else self.rank
            for version in range(1 + (not is_alike and rng.random() < 0.15)):
                data = content(save.id, rank, file, version, None if is_alike else rng)
                self._write(f"{path}/{file}", data, save, file)

    def _files_of(self, save: Save, rng: random.Random) -> list[str]:
        if save.kind == "dcp":
            return [f"__{self.rank}_0.distcp"]
        files = [f"shard-{self.rank}.bin"]
        if rng.random() < 0.3:
            files.append(f"sub/state-{self.rank}.bin")
        if save.has_shared:
            files.append("shared.bin")
        return files

    def _finish_explicit(self, save: Save, path: str, number: int) -> None:
        del number
        self.job.checker.done(save, self.rank)
        self._commit(path, f"{self.rank}/{save.world}")

    def _finish_all(self, save: Save, path: str, number: int) -> None:
        # Nothing proves a commit for all whole but that each member is registered by then: DESIGN,
        # rule 2. A close that waited for it in vain is told to nobody.
        rows = self.mount.machine.spool.attempts(name=save.name, states=UNDECIDED)
        mine = [row for row in rows if row.job_key == f"run:{self.job.key}"]
        is_known = all(row.is_joined for row in mine)
        self.job.checker.done(save, self.rank, is_promised=is_known)
        if mine:
            save.part(self.rank).attempt = mine[-1].attempt
        self.job.barrier(f"written-{number}")
        if self.rank == 0:
            self._commit(path, "all")

    def _finish_dcp(self, save: Save, path: str, number: int) -> None:
        self.job.checker.done(save, self.rank)
        self.job.barrier(f"written-{number}")
        if self.rank == 0:
            shards = [f"__{rank}_0.distcp" for rank in range(save.world)]
            data = dcp_metadata(shards, save.id)
            self._write(f"{path}/.metadata.tmp", data, save, ".metadata")
            self.job.checker.done(save, self.rank)
            self._rename(f"{path}/.metadata.tmp", f"{path}/.metadata")

    def _finish_rename(self, save: Save, path: str, number: int) -> None:
        self.job.checker.done(save, self.rank)
        self.job.barrier(f"written-{number}")
        if self.rank == 0:
            self._rename(path, path.removesuffix(".tmp"))

    def _revise(self, action: Action, number: int) -> None:
        """Change one file of what is committed and add one; nothing, if it isn't there."""
        save = self.job.save_of(action, number)
        if save.world == 1 and self.rank:
            return
        path = f"{RUN}/{action.name}"
        if not self.world.exists(self.caller, path):
            return
        rng = random.Random(f"{self.job.seed}{save.id}/{self.rank}")
        files = [f"extra-{self.rank}.bin", f"shard-{self.rank}.bin"]
        for file in files[: rng.choice([1, 2])]:
            data = content(save.id, self.rank, file, 0, rng)
            self._write(f"{path}/{file}", data, save, file)
        self.job.checker.done(save, self.rank)
        self._commit(path, f"{self.rank}/{save.world}" if save.world > 1 else "all")

    def _point(self, action: Action, number: int) -> None:
        """The framework's own pointer, as a link or a text."""
        if self.rank or not self.world.exists(self.caller, f"{RUN}/{action.name}"):
            return
        if action.kind == "link":
            spare = f"{RUN}/spare-{number}"
            self.world.symlink(self.caller, action.name, spare)
            self.world.rename(self.caller, spare, f"{RUN}/latest")
        else:
            opened = self._open(f"{RUN}/latest.txt")
            os.pwrite(opened.fd, action.name.encode(), 0)
            self._close(opened)

    def _delete(self, action: Action, number: int) -> None:
        """rm -r by one rank, or by all at once."""
        del number
        if action.kind == "one" and self.rank:
            return
        path = f"{RUN}/{action.name}"
        try:
            self._note_removed(action.name)
            for name in self.world.names(self.caller, path):
                self._remove(f"{path}/{name}")
            self._note_removed(action.name)
            self.world.rmdir(self.caller, path)
        except CkptError as exc:
            # Another rank was faster, or it was never there, or somebody writes it.
            self.scheduler.note(f"rm {path}: {type(exc).__name__}")

    def _note_removed(self, name: str) -> None:
        """Whatever that name is now, or was when this began, may be retired."""
        checker = self.job.checker
        checker.deleted.update((name, a) for a, v in checker.attempts.items() if v.name == name)

    def _remove(self, path: str) -> None:
        for name in self._names_below(path):
            self._remove(f"{path}/{name}")
        try:
            self.world.unlink(self.caller, path)
        except CkptError as exc:
            if isinstance(exc, MissingError):
                raise
            self.world.rmdir(self.caller, path)

    def _names_below(self, path: str) -> list[str]:
        try:
            return self.world.names(self.caller, path)
        except CkptError:
            return []

    def _abort(self, action: Action, number: int) -> None:
        """An operator gives the save up that is under way."""
        del number
        if self.rank:
            return
        machine = self.mount.machine
        rows = [row for row in machine.spool.attempts(name=action.name) if row.job_key]
        process, publisher = machine.publisher_process, machine.publisher
        if not rows or process is None or not process.is_alive or publisher is None:
            return
        self.job.checker.abort_asked.update(self.job.checker.saves)

        def ask() -> None:
            try:
                publisher.request_abort(rows[-1].id, "asked for")
            except CkptError as exc:
                self.scheduler.note(f"abort: {type(exc).__name__}")

        self.scheduler.spawn(f"{process.name}:abort", process, ask)

    def _wait(self, action: Action, number: int) -> None:
        del number
        self.scheduler.pause(float(action.name))

    def _read(self, action: Action, number: int) -> None:
        del action, number
        read_once(self.mount, Caller(0, 0, 0, may_block=True), self.job.checker, self.scheduler)

    # Calls

    def _makedirs(self, path: str) -> None:
        try:
            ino = self.world.mkdir(self.caller, path)
        except ExistsError:
            return
        self._settle(ino)

    def _open(self, path: str) -> Any:
        above = path.rpartition("/")[0]
        if not self.world.exists(self.caller, above):
            self._makedirs(above)
        opened = self.world.open_new(self.caller, path)
        self.mount.opened[opened.fh] = opened.fd
        return opened

    def _write(self, path: str, data: bytes, save: Save, file: str) -> None:
        opened = self._open(path)
        os.pwrite(opened.fd, data, 0)
        now_ns = self.mount.machine.clock.now_ns()
        os.utime(opened.fd, ns=(now_ns, now_ns))
        self.scheduler.pause()
        self.job.checker.wrote(save, self.rank, file, data)
        self._close(opened)

    def _close(self, opened: Any) -> None:
        handle = self.mount.spool.handle(opened.fh)
        if self.vfs.flush(self.caller, opened.fh):
            self.vfs.settle(self.caller, handle.ino, is_close=True)
        self.mount.opened.pop(opened.fh)
        self.vfs.release(opened.fh)

    def _settle(self, ino: int) -> None:
        if self.vfs.must_settle(ino):
            try:
                self.vfs.settle(self.caller, ino)
            except CkptError as exc:
                self.scheduler.note(f"not settled: {exc}")

    def _rename(self, old: str, new: str) -> None:
        parent = self.world.walk(self.caller, old.rpartition("/")[0]).attr.ino
        self.world.rename(self.caller, old, new)
        self._settle(parent)

    def _commit(self, path: str, value: str) -> None:
        ino = self.world.walk(self.caller, path).attr.ino
        self.vfs.setxattr(self.caller, ino, "user.ckptgate.commit", value.encode(), 0)
