"""`systemctl restart` and kill -9 under a save, in a real systemd: no rank notices."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import tree
from tests.systemd.conftest import Service

pytestmark = [pytest.mark.fuse]

RANK = Path(__file__).parents[1] / "e2e" / "calling_rank.py"
RANKS = 4
FAST = "[commit]\nidle_interval_s = 0.3\n[room]\nfree_min_share = 0.0\n"
COMMIT = 'import os, sys; os.setxattr(sys.argv[1], "user.ckptgate.commit", b"all")'


@pytest.fixture
def running(service: Service) -> Service:
    """A service that runs."""
    service.install(FAST)
    service.start()
    return service


def main_pid(service: Service) -> int:
    return int(service.show("MainPID"))


def mount_number(service: Service) -> list[str]:
    found = service.machine.ok("cat", "/proc/self/mountinfo").splitlines()
    return [" ".join(line.split()[:3]) for line in found if line.split()[4] == service.mnt]


def restarted(service: Service) -> None:
    before = main_pid(service)
    done = service.machine.run("systemctl", "restart", service.unit)
    assert done.returncode == 0, service.journal()
    assert main_pid(service) not in {0, before}


def killed(service: Service, who: str = "main") -> None:
    before = main_pid(service)
    service.machine.ok("systemctl", "kill", "-s", "KILL", f"--kill-who={who}", service.unit)
    service.machine.until(
        "another main process",
        lambda: main_pid(service) not in {0, before} and service.show("ActiveState") == "active",
        60,
    )


class Ranks:
    """A save by processes in the machine."""

    def __init__(self, service: Service, run: str) -> None:
        self.machine, self.run, self.store = service.machine, run, service.store
        self.step, self.plain = f"{service.mnt}/{run}/step-1", f"{service.mnt}/{run}-plain"
        self.jobs: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        code = "import os, sys; [os.makedirs(p) for p in sys.argv[1:]]"
        made = (sys.executable, "-c", code, self.step, self.plain)
        self.machine.ok(*made, CKPTGATE_RUN_ID=self.run)
        for number in range(RANKS):
            words = (sys.executable, "-u", str(RANK), self.step, self.plain, str(number))
            self.jobs.append(self.machine.start(*words, CKPTGATE_RUN_ID=self.run))
        for job in self.jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "begun\n", job.communicate()[1]

    def finish(self) -> list[dict[str, Any]]:
        reports = []
        for job in self.jobs:
            assert job.stdin is not None
            job.stdin.write("stop\n")
            job.stdin.flush()
        for job in self.jobs:
            out, err = job.communicate(timeout=90)
            assert job.returncode == 0, err
            reports.append(json.loads(out.splitlines()[-1]))
        for report in reports:
            assert report["failed"] == [], report["failed"][:10]
            assert report["calls"] > 50
        return reports

    def check_commit(self, reports: list[dict[str, Any]]) -> None:
        self.machine.ok(sys.executable, "-c", COMMIT, self.step, CKPTGATE_RUN_ID=self.run)
        saved = self.store / self.run / "step-1"
        self.machine.until("the commit", saved.is_dir, 60)
        expected = {
            f"rank{number}/{name}": text.encode()
            for number, report in enumerate(reports)
            for name, text in report["kept"][f"{self.step}/rank{number}"].items()
        }
        found = {name: data for name, data in tree(saved).items() if not name.endswith("/big")}
        assert found == expected

    def kill(self) -> None:
        for job in self.jobs:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
            job.communicate()


def while_saving(service: Service, run: str, disturb: Callable[[], None]) -> None:
    """Disturb a save; the ranks notice nothing, the mount stays, the save commits."""
    ranks = Ranks(service, run)
    before = mount_number(service)
    assert len(before) == 1
    try:
        ranks.start()
        disturb()
        time.sleep(0.2)
        reports = ranks.finish()
        assert mount_number(service) == before
        ranks.check_commit(reports)
    except BaseException:
        print(service.journal())
        raise
    finally:
        ranks.kill()


def test_a_restart_under_a_save_is_noticed_by_no_rank(running: Service) -> None:
    """I2, I10, I11: `systemctl restart`, then kill -9 of the main process; a stop then unmounts."""

    def disturb() -> None:
        restarted(running)
        killed(running)

    while_saving(running, "short", disturb)
    running.machine.ok("systemctl", "stop", running.unit)
    assert mount_number(running) == []
    assert running.show("NFileDescriptorStore") == "0"
    assert "drained left=0" in running.journal()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_restarts_and_kills_for_minutes_are_noticed_by_no_rank(running: Service) -> None:
    """I2, I10, I11: also of all processes of the unit at once."""
    chance = random.Random(5)
    until = time.monotonic() + 120

    def disturb() -> None:
        while time.monotonic() < until:
            what = chance.choice([restarted, killed, lambda service: killed(service, "all")])
            what(running)
            # It is about what is lost, not about how often a unit may be started.
            running.machine.run("systemctl", "reset-failed", running.unit)
            time.sleep(chance.random() * 2)

    while_saving(running, "long", disturb)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["mixed", "control-group"])
def test_a_unit_that_kills_all_its_processes_loses_no_call_either(
    running: Service, mode: str
) -> None:
    """I10: with another KillMode callers wait for the start of new processes, and for no more."""
    drop_in = running.machine.path(f"/run/systemd/system/{running.unit}.d/50-kill.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(f"[Service]\nKillMode={mode}\n")
    running.machine.ok("systemctl", "daemon-reload")

    def disturb() -> None:
        restarted(running)
        killed(running)

    while_saving(running, mode, disturb)


@pytest.mark.full
def test_a_restart_with_another_spool_is_refused_and_a_stop_and_start_isnt(
    running: Service,
) -> None:
    """I2: the old session is not served from another spool; who asked is told what to do."""
    running.configure(f"/disk/{running.name}/spool", f"/disk/{running.name}/elsewhere")
    assert running.machine.run("systemctl", "restart", running.unit).returncode != 0
    assert "has another spool" in running.journal()
    running.machine.run("systemctl", "stop", running.unit)
    running.machine.run("systemctl", "reset-failed", running.unit)
    running.machine.ok("systemctl", "start", running.unit)
    running.machine.ok("mkdir", f"{running.mnt}/here")


@pytest.mark.full
def test_a_service_is_replaced_by_its_manager_only(running: Service) -> None:
    done = running.machine.ckptgate("mount", "--replace", running.mnt)
    assert done.returncode == 3
    assert f"systemctl restart {running.unit}" in done.stderr
