"""The service in a real systemd: from its installation to its removal."""

from __future__ import annotations

import re

import pytest
from tests.systemd.conftest import FAST, TRAINER, Service
from tests.systemd.machine import Machine

from ckptgate.errors import ExitCode

pytestmark = [pytest.mark.fuse, pytest.mark.slow]


def test_a_service_from_its_installation_to_its_removal(machine: Machine, service: Service):
    service.install(FAST)
    done = machine.run("systemd-analyze", "verify", service.unit)
    assert (done.returncode, done.stderr) == (0, "")
    machine.ok("systemctl", "enable", "--now", service.unit)
    # Ready: a look through the mount is answered.
    assert machine.ok("stat", "-f", "-c", "%T", service.mnt).strip().startswith("fuse")
    assert service.show("StatusText") == "everything is in the store"
    service.save("step-1")
    assert (service.store / "run1/step-1/w.bin").read_text() == "step-1"
    machine.ok("sh", "-c", f"mkdir {service.mnt}/run1/step-2; echo > {service.mnt}/run1/step-2/w")
    machine.until(
        "the queue's depth", lambda: "1 checkpoint under way" in service.show("StatusText")
    )
    assert machine.ckptgate("abort", f"{service.mnt}/run1/step-2").returncode == 0
    done = machine.ckptgate("service", "uninstall", service.name)
    assert done.returncode == ExitCode.BUSY
    assert f"systemctl disable --now {service.unit}" in done.stderr
    machine.ok("systemctl", "disable", "--now", service.unit)
    assert "ended success exited 0" in service.journal()
    assert not machine.run("findmnt", service.mnt).stdout
    done = machine.ckptgate("service", "uninstall", service.name)
    assert done.returncode == 0, done.stderr
    assert machine.run("systemctl", "cat", service.unit).returncode != 0
    assert (service.spool / "spool.db").exists()


def test_a_mount_that_stands_still_is_replaced_and_its_callers_go_on(
    machine: Machine, service: Service
):
    service.install(FAST)
    service.start()
    service.save("step-1")
    main, mount = service.show("MainPID"), service.pid("mount")
    machine.ok("kill", "-STOP", _inside(mount))
    # Waits for the mount that stands still, and is answered by the next one.
    looking = machine.start("ls", f"{service.mnt}/run1")
    out, err = looking.communicate(timeout=100)
    assert (looking.returncode, out.split()) == (0, ["latest", "step-1"]), err
    assert service.pid("mount") not in {0, mount}
    assert service.show("MainPID") == main
    assert "mount-stuck" in service.journal()
    service.save("step-2")


def _inside(pid: int) -> str:
    """The number of a process in the machine."""
    with open(f"/proc/{pid}/status", encoding="ascii") as stream:
        (line,) = (line for line in stream if line.startswith("NSpid:"))
    return line.split()[-1]


def test_a_stop_lets_a_trainer_finish_and_publishes_it(machine: Machine, service: Service):
    """The node's notice: SIGTERM to the trainer and to the service, at about the same time."""
    service.install(FAST)
    service.start()
    service.save("step-1")
    path = f"{service.mnt}/run1/step-2"
    trainer = machine.start("python3", "-c", TRAINER, path, CKPTGATE_RUN_ID="job")
    assert trainer.stdout is not None
    assert trainer.stdout.readline().strip() == "saving"
    machine.ok("systemctl", "stop", "--no-block", service.unit)
    machine.until("the stop", lambda: "budget_s" in service.journal())
    machine.ok("pkill", "-TERM", "-f", "begun.bin")
    out, err = trainer.communicate(timeout=60)
    assert (trainer.returncode, out.strip()) == (0, "30"), err  # EROFS: no other one is begun
    machine.until("its end", lambda: "ended" in service.journal())
    assert (service.store / "run1/step-2/last.bin").read_bytes() == b"l" * 100
    assert re.search("checkpoint-refused path=.*run1/step-9", service.journal())
    assert "ended success exited 0" in service.journal()
