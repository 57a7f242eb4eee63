"""One seed: a store, machines, jobs and faults, run to its end, with every invariant checked.

First the jobs run under the seed's faults. Then the faults stop, what is still on its way arrives,
every machine that isn't lost comes back, and a last incarnation saves once more: all must come to
an end that is whole, shown and told (I12).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.sim.checker import Checker
from tests.sim.faults import OTHERS, PROFILES, Faults, Network
from tests.sim.machines import RUN, Machine, Mount
from tests.sim.plans import Plan, plan_of
from tests.sim.readers import read_once
from tests.sim.scheduler import BrokenError, Process, Scheduler, Task
from tests.sim.stand_ins import simulated_threads
from tests.sim.trainers import Action, Job, Script

from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.vfs.interface import Caller
from ckptgate_adapters.sqlite_spool.files import DATA_FANOUT

__all__ = ["Outcome", "Plan", "SeedFailedError", "plan_of", "run_seed"]

PHASE_S: Final = 4 * 3600.0
"""Simulated seconds after which the faults stop in any case."""
SETTLE_S: Final = 12 * 3600.0
READS_MAX: Final = 12
LAST: Final = "step-99"
_HEALTHY: Final = frozenset({"calm", "lossy", "stormy", "quiet", "publishers"})
"""Profiles in which every save of the only job comes true, if nobody stands in its way."""


@dataclass(kw_only=True)
class Outcome:
    """What a run came to.

    Attributes:
        digest: of the trace.
        turns, calls, entries, faults: how much happened.
        committed: name -> path -> digest, in the end.
        pointers: name -> target.
        aborted: attempts.
    """

    digest: str
    turns: int
    calls: int
    entries: int
    faults: int
    committed: dict[str, dict[str, str]]
    pointers: dict[str, str]
    aborted: int
    states: set[int] = field(default_factory=set, repr=False)


class SeedFailedError(AssertionError):
    """A seed broke an invariant; the message says which, and how to see it again."""


class _Simulation:
    """The parts of one run."""

    def __init__(self, plan: Plan, places: Sequence[str]) -> None:
        self.plan = plan
        self.rng = random.Random(f"run {plan.seed}")
        self.scheduler = Scheduler(random.Random(f"turns {plan.seed}"))
        self.faults = Faults(
            random.Random(f"faults {plan.seed}"), (PROFILES | OTHERS)[plan.profile]
        )
        self.network = Network(self.scheduler, self.faults, places[-1])
        self.checker = Checker(self.network.store, RUN, self.scheduler.fail)
        self.machines = [
            Machine(
                self.network,
                f"n{at}",
                places[at],
                plan.skews_s[at],
                plan.close_delays_s[at % len(plan.close_delays_s)],
            )
            for at in range(plan.hosts + plan.has_reader)
        ]
        self.control = Process("control")
        self.jobs: list[Job] = []
        self.jobs_task: Task | None = None
        """Starts the plan's incarnations, one after the other."""
        self.states: set[int] = set()
        self.is_faulty = True
        self.network.on_effect = self._effect
        self.network.on_kill = self._killed
        self.network.on_hold = self._held
        self.network.on_outage = self._cut

    # What happens to machines

    def _effect(self, name: str, args: tuple[Any, ...]) -> None:
        self.checker.after(name, args)
        self.states.add(hash((len(self.network.store._nodes), tuple(self.checker.log))))

    def _machine(self, process: Process) -> Machine:
        host = process.name.partition(".")[0]
        return next(machine for machine in self.machines if machine.host == host)

    def _killed(self, process: Process) -> None:
        machine = self._machine(process)
        is_all = machine.mount is None or process is machine.mount.process
        if is_all or self.faults.hits(self.faults.profile.crash):
            self._crash(machine)
            return
        machine.kill_publisher()
        down_s = self.rng.choice(self.faults.profile.down_s)
        self._later(down_s, lambda: self._restart_publisher(machine))

    def _crash(self, machine: Machine) -> None:
        machine.crash()
        for job in self.jobs:
            if machine in job.machines:
                job.fail(f"{machine.host} crashed")
        if self.faults.hits(self.faults.profile.dead) and len(self._living()) > 1:
            machine.is_dead = True
            self.scheduler.note(f"{machine.host} is lost for ever")
            return
        self._later(self.rng.choice([1.0, 60.0, 2000.0]), lambda: self._reboot(machine))

    def _living(self) -> list[Machine]:
        return [machine for machine in self.machines if not machine.is_dead]

    def _restart_publisher(self, machine: Machine) -> None:
        if machine.mount is not None and machine.publisher_task is None:
            machine.start_publisher()

    def _reboot(self, machine: Machine) -> None:
        if machine.mount is None and not machine.is_dead:
            self.scheduler.note(f"{machine.host} comes up")
            machine.boot()

    def _held(self, process: Process) -> None:
        machine = self._machine(process)
        seconds = self.rng.choice([1.0, 30.0, 700.0, 7000.0])
        self.scheduler.note(f"{machine.host} stands still for {seconds:g} s")
        if machine.publisher_process is not None:
            self.scheduler.hold(machine.publisher_process, seconds)
        if machine.mount is not None:
            self.scheduler.hold(machine.mount.process, seconds)
        machine.held_until_s = max(machine.held_until_s, self.scheduler.now_s) + seconds
        self.scheduler.pause(seconds)

    def _cut(self, process: Process) -> None:
        machine = self._machine(process)
        seconds = self.rng.choice([1.0, 5.0, 60.0, 1000.0])
        self.scheduler.note(f"{machine.host} loses the store for {seconds:g} s")
        machine.cut_until_s = self.scheduler.now_s + seconds

    def _later(self, seconds: float, call: Any) -> None:
        def wait() -> None:
            self.scheduler.pause(seconds)
            call()

        self.scheduler.spawn("control", self.control, wait)

    def _said(self, machine: Machine, row: Any, state: object) -> None:
        if row.attempt and state in {
            AttemptState.COMMITTED,
            AttemptState.ABORTED,
            AttemptState.ABANDONED,
        }:
            self.checker.tell(machine.member, row.attempt, str(state))

    # The run

    def run(self) -> Outcome:
        for machine in self.machines:
            machine.on_state = self._said
            machine.boot()
        self.jobs_task = self.scheduler.spawn("control", self.control, self._run_jobs)
        if self.plan.has_reader:
            self.scheduler.spawn("reader", self.control, self._read)
        scheduler = self.scheduler
        scheduler.run(lambda: not self.is_faulty or scheduler.now_s > PHASE_S)
        self._heal()
        return self._outcome()

    def _run_jobs(self) -> None:
        for number in range(len(self.plan.jobs)):
            start_s = self.plan.starts_s[number]
            if start_s is None:
                self.scheduler.wait_until(lambda: self.jobs[-1].is_over)
            else:
                self.scheduler.pause(start_s)
            members = [self.machines[at] for at in self.plan.members[number]]
            members = [machine for machine in members if not machine.is_dead]
            up = lambda members=members: all(m.mount is not None or m.is_dead for m in members)  # noqa: E731
            self.scheduler.wait_until(up)
            self._start(f"job-{number}", members, self.plan.jobs[number], number)
        self.scheduler.wait_until(lambda: all(job.is_over for job in self.jobs))
        self.is_faulty = False

    def _start(self, key: str, members: list[Machine], script: Script, number: int) -> Job:
        members = [machine for machine in members if machine.mount is not None]
        job = Job(
            key=key,
            number=number,
            machines=members or self._living()[:1],
            script=script,
            scheduler=self.scheduler,
            checker=self.checker,
            seed=str(self.plan.seed),
            is_careless=number < len(self.plan.is_careless) and self.plan.is_careless[number],
        )
        self.jobs.append(job)
        job.start()
        return job

    def _read(self) -> None:
        reader = self.machines[-1]
        for count in range(READS_MAX):
            self.scheduler.pause(self.rng.choice([0.1, 1.0, 20.0]) * (1 + count * count))
            mount = reader.mount
            if mount is not None:
                self._read_by(mount)

    def _read_by(self, mount: Mount) -> None:
        caller = Caller(0, 0, 0, may_block=True)
        task = self.scheduler.spawn(
            f"{mount.machine.host}/read",
            mount.process,
            lambda: read_once(mount, caller, self.checker, self.scheduler),
        )
        self.scheduler.wait_until(lambda: task.is_over)

    # The end

    def _heal(self) -> None:
        """No more faults; what is on its way arrives; a last incarnation saves once more."""
        scheduler = self.scheduler
        self.faults.end()
        scheduler.note("faults end")
        scheduler.late_share = 0.1
        self.is_faulty = False
        for machine in self._living():
            machine.cut_until_s = -1.0
            self._reboot(machine)
            self._restart_publisher(machine)
        held_s = max(machine.held_until_s for machine in self._living())
        scheduler.run(
            lambda: not scheduler.late and scheduler.now_s >= held_s and self._are_jobs_gone()
        )
        limit_s = scheduler.now_s + SETTLE_S
        if self._is_simple() or self.rng.random() < 0.5:
            # Else the last incarnation fences off what isn't sealed yet.
            wait_s = scheduler.now_s + SETTLE_S / 4
            scheduler.run(lambda: self._is_quiet() or scheduler.now_s > wait_s)
        members = [machine for machine in self.machines[: self.plan.hosts] if not machine.is_dead]
        members = members or self._living()[:1]
        last = self._start("job-last", members, (Action("save", LAST, "explicit"),), 99)
        scheduler.run(lambda: last.is_over)
        if last.has_failed:
            self._end(f"I12 the last incarnation failed: {last.reasons}")
        scheduler.run(lambda: self._is_settled() or scheduler.now_s > limit_s)
        self._check_end()

    def _are_jobs_gone(self) -> bool:
        """Whether all of the plan has been played: what begins later would fence the last one."""
        has_begun_all = self.jobs_task is not None and self.jobs_task.is_over
        return has_begun_all and all(job.is_gone for job in self.jobs)

    def _is_settled(self) -> bool:
        """Cheap: whether there is nothing left that could change."""
        if LAST not in self.checker.current or not self._is_quiet():
            return False
        with contextlib.suppress(_NotYetError):
            checker = Checker.__new__(Checker)
            checker.__dict__.update(self.checker.__dict__)
            checker._fail = _not_yet
            checker.settled()
            return True
        return False

    def _is_quiet(self) -> bool:
        """Whether nothing waits for a decision."""
        if self.scheduler.steps % 8 or any(
            view.phase not in {"COMMITTED", "ABORTED"} for view in self.checker.attempts.values()
        ):
            return False
        return not self._undecided()

    def _undecided(self) -> list[Any]:
        found = []
        for machine in self._living():
            found += machine.spool.attempts(run=RUN, states=UNDECIDED)
        return found

    def _check_end(self) -> None:
        checker = self.checker
        checker._fail = self._end
        checker.settled()
        for row in self._undecided():
            self._end(
                f"I12 {row.name} ({row.attempt}) stays {row.state}: {row.reason} {row.missing}"
            )
        if LAST not in checker.current:
            self._end(f"I12 the save of the last incarnation is not committed: {checker.attempts}")
        for machine in self._living():
            for row in machine.spool.attempts(run=RUN):
                self._check_row(machine, row)
        self._check_saves()

    def _check_row(self, machine: Machine, row: Any) -> None:
        """I6, I11: the spool says what the log says, and keeps what isn't committed."""
        phase = self.checker._phase(row.attempt)
        if row.state in {AttemptState.COMMITTED, AttemptState.REPLACED} and phase != "COMMITTED":
            self._end(f"I6 {machine.host} says {row.state} of {row.attempt}, the log {phase}")
        if row.state in {AttemptState.ABORTED, AttemptState.ABANDONED}:
            if not row.reason:
                self._end(f"I6 {machine.host} gives no reason why {row.name} is {row.state}")
            for path, _, file in machine.spool.files_of_attempt(row.id):
                if file.local == "full" and not os.path.exists(machine.spool.data_path(file.file)):
                    self._end(f"I11 {machine.host} lost the bytes of {path} of {row.name}")

    def _check_saves(self) -> None:
        """I12: with one incarnation, on machines that live, every save comes true."""
        if not self._is_simple():
            return
        for id in self.jobs[0].acked:
            save = self.checker.saves[id]
            if save.name not in self.checker.current and not save.is_contradicting:
                self._end(f"I12 {id} of {save.name} was acknowledged and is not committed")

    def _is_simple(self) -> bool:
        """Whether nothing but the faults of a healthy profile stands in the way of a save."""
        plan = self.plan
        names = [action.name for action in plan.jobs[0]]
        verbs = {action.verb for action in plan.jobs[0]}
        is_plain = len(names) == len(set(names)) and verbs <= {"save", "read", "wait"}
        return is_plain and len(plan.jobs) == 1 and plan.profile in _HEALTHY

    def _end(self, what: str) -> None:
        self.scheduler.note(f"!!! {what}")
        raise BrokenError(what)

    def _outcome(self) -> Outcome:
        checker, scheduler = self.checker, self.scheduler
        committed = {
            name: {
                entry["path"]: entry["digest"]
                for entry in checker.attempts[attempt].manifest["entries"]
                if entry["type"] == "file"
            }
            for name, attempt in sorted(checker.current.items())
        }
        return Outcome(
            digest=scheduler.digest(),
            turns=scheduler.steps,
            calls=self.network.calls,
            entries=checker.entries,
            faults=self.faults.count,
            committed=committed,
            pointers={name: target for name, (target, _) in sorted(checker.pointers.items())},
            aborted=sum(view.phase == "ABORTED" for view in checker.attempts.values()),
            states=self.states,
        )

    def close(self) -> None:
        self.scheduler.close()
        for machine in self.machines:
            machine.close()
        self.network.close()


class _NotYetError(Exception):
    pass


def _not_yet(what: str) -> None:
    raise _NotYetError(what)


_ROOTS: dict[int, str] = {}
"""Process -> its directory; made once, since making and removing so many takes long."""


def _places(count: int) -> list[str]:
    """Directories of so many spools, empty; in memory where the system has such."""
    root = _ROOTS.get(os.getpid())
    if root is None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        root = _ROOTS[os.getpid()] = tempfile.mkdtemp(prefix="ckptgate-sim-", dir=base)
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return [_place(root, at) for at in range(count)]


def _place(root: str, at: int) -> str:
    path = f"{root}/{at}"
    if not os.path.exists(path):
        for sub in range(DATA_FANOUT):
            os.makedirs(f"{path}/data/{sub:02x}")
    return path


def run_seed(seed: int, *, profile: str = "", plan: Plan | None = None) -> Outcome:
    """Run one seed to its end.

    Raises:
        SeedFailedError: an invariant broke; `__notes__` hold the trace.
    """
    plan = plan or plan_of(seed, profile=profile)
    logging.disable(logging.CRITICAL)
    gc.disable()
    simulation: _Simulation | None = None
    try:
        simulation = _Simulation(plan, _places(plan.hosts + plan.has_reader + 1))
        with simulated_threads(simulation.scheduler):
            try:
                return simulation.run()
            except BrokenError as exc:
                raise _explained(plan, simulation, exc) from exc
            finally:
                simulation.close()
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def _explained(plan: Plan, simulation: _Simulation, failure: BrokenError) -> SeedFailedError:
    head = (
        f"seed {plan.seed} ({plan.profile}): {failure}\n"
        f"again: CKPTGATE_SEED={plan.seed} CKPTGATE_PROFILE={plan.profile} "
        "pytest tests/sim/test_seeds.py -k one_seed"
    )
    error = SeedFailedError(head)
    states = [
        f"{machine.host} {row.name} {row.attempt!r} {row.job_key} {row.state}: "
        f"{row.reason} {row.missing}"
        for machine in simulation.machines
        for row in machine.spool.attempts(run=RUN)
    ]
    phases = [f"{a} {v.name} {v.phase}" for a, v in simulation.checker.attempts.items()]
    lines = [str(plan), *simulation.scheduler.trace, *states, *phases]
    error.add_note("\n".join(lines))
    return error
