"""What four saving ranks wait for when the gateway is replaced, killed, or restarted by systemd.

Each pair is a few seconds without anything and the same with a restart in their middle: the longest
call of any rank with it, less that without it, is the added stall. systemd is a real one, in name
spaces of its own (left out where it can't be booted).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.systemd.machine import Machine, booted, missing

from bench import mounts
from bench.plan import Plan
from bench.report import Figure, spread

__all__ = ["run"]

RANKS = 4
STALL_S = 1.0
UNIT = "ckptgate@bench.service"


def run(plan: Plan) -> Iterator[Figure]:
    """Added stalls of calls and writes, and failed calls, for each kind of restart."""
    window_s = 2.0 if plan.sizes.pairs > 1 else 0.3
    with mounts.scratch(plan.disk.path) as base, mounts.mounted(base) as mount:
        words = [sys.executable, "-m", "ckptgate.app.cli", "mount", "--replace", str(mount.path)]

        def replace() -> None:
            subprocess.run(words, check=True, capture_output=True)

        def kill() -> None:
            mount.find_processes()
            before = mount.supervisor
            os.kill(before, signal.SIGKILL)
            mounts.until("the next supervisor", lambda: _is_another(mount, before), 60)

        for name, restart in (("mount --replace", replace), ("kill -9 of the supervisor", kill)):
            with _ranks(mount.path / "run" / "step-1", lambda *words: list(words)) as ranks:
                yield from _compare(plan, ranks, name, restart, window_s)
    if not missing():
        with mounts.scratch(plan.disk.path) as base, booted(base) as machine:
            yield from _under_systemd(plan, machine, window_s)


def _is_another(mount: mounts.Mount, before: int) -> bool:
    with contextlib.suppress(AssertionError, OSError):
        mount.find_processes()
        return mount.supervisor != before
    return False


def _under_systemd(plan: Plan, machine: Machine, window_s: float) -> Iterator[Figure]:
    (machine.disk / "store").mkdir()
    machine.ok("mkdir", "-p", "/srv/ckpt", "/etc/ckptgate")
    machine.path("/etc/ckptgate/bench.toml").write_text(
        'store = "/disk/store"\nmountpoint = "/srv/ckpt"\nspool = "/disk/spool"\n' + mounts.CONFIG
    )
    program = os.path.join(sys.prefix, "bin", "ckptgate")
    assert machine.ckptgate("service", "install", "bench", "--exec", program).returncode == 0
    machine.ok("systemctl", "start", UNIT)
    with _ranks(Path("/srv/ckpt/run/step-1"), machine.words) as ranks:
        yield from _compare(
            plan, ranks, "systemctl restart",
            lambda: machine.ok("systemctl", "restart", UNIT), window_s,
        )  # fmt: skip
    machine.ok("systemctl", "stop", UNIT)


class _Ranks:
    """The processes, and what they say of a time."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def told(self) -> dict[str, float]:
        """The worst of all since the last question."""
        found: list[dict[str, float]] = []
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.readline()))
        worst = {key: max(row[key] for row in found) for key in ("call_s", "write_s")}
        return worst | {key: sum(row[key] for row in found) for key in ("calls", "failed")}


@contextlib.contextmanager
def _ranks(directory: Path, words: Callable[..., list[str]]) -> Iterator[_Ranks]:
    command = [sys.executable, "-m", "bench.restart_rank"]
    root = Path(__file__).parents[1]
    processes = [
        subprocess.Popen(
            words("env", f"--chdir={root}", "CKPTGATE_RUN_ID=bench", *command,
                  f"{directory}/rank{number}"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(RANKS)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
        yield _Ranks(processes)
    finally:
        for process in processes:
            process.communicate()


def _compare(
    plan: Plan, ranks: _Ranks, name: str, restart: Callable[[], object], window_s: float
) -> Iterator[Figure]:
    stalls: dict[str, list[float]] = {"call_s": [], "write_s": []}
    failed = calls = 0.0
    for _ in range(plan.sizes.pairs):
        ranks.told()
        time.sleep(2 * window_s)
        without = ranks.told()
        time.sleep(window_s)
        restart()
        time.sleep(window_s)
        told = ranks.told()
        failed, calls = failed + told["failed"], calls + told["calls"]
        for key, values in stalls.items():
            values.append(max(0.0, told[key] - without[key]))
    note = f"{RANKS} ranks, {calls:.0f} calls"
    for key, what in (("call_s", "call"), ("write_s", "write")):
        title = f"{name}: added to the longest {what}"
        yield spread("restart", title, stalls[key], "s", at_most=STALL_S, note=note)
    yield spread("restart", f"{name}: failed calls", [failed], "", at_most=0.0)
