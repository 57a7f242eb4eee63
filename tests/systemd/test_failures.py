"""What goes wrong with a service in a real systemd, and what an operator sees of it."""

from __future__ import annotations

from functools import partial

import pytest
from tests.systemd.conftest import FAST, TRAINER, Service
from tests.systemd.machine import Machine

from ckptgate.errors import ExitCode

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.full]


def test_a_supervisor_that_stands_still_is_ended_by_the_watchdog_and_started_again(
    machine: Machine, service: Service
):
    service.install(FAST)
    service.start()
    service.save("step-1")
    main = service.show("MainPID")
    machine.ok("kill", "-STOP", main)
    machine.until(
        "another start",
        lambda: (
            service.show("MainPID") not in {"0", main} and service.show("ActiveState") == "active"
        ),
        timeout_s=100,
    )
    assert "watchdog" in service.journal().lower()
    assert service.show("NRestarts") == "1"
    service.save("step-2")


def test_what_is_left_is_told_and_finished_by_the_next_start(machine: Machine, service: Service):
    """I10, I11."""
    service.install(FAST)
    service.configure("timeout_s = 60", "timeout_s = 2")
    service.start()
    path = f"{service.mnt}/run1/step-1"
    code = TRAINER.replace("while not ended:", "while True:")
    trainer = machine.start(
        "python3", "-c", code, path, CKPTGATE_RUN_ID="job", RANK="3", WORLD_SIZE="4"
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline().strip() == "saving"
    machine.ok("systemctl", "stop", service.unit)
    machine.ok("pkill", "-KILL", "-f", "begun.bin")
    trainer.communicate(timeout=60)
    assert f"ended success exited {int(ExitCode.PENDING)}" in service.journal()
    assert "left name=run1/step-1 state=open" in service.journal()
    service.start()
    done = machine.ckptgate(
        "commit", path, "--all", "--wait", "--timeout", "60", CKPTGATE_RUN_ID="job"
    )
    assert done.returncode == 0, done.stderr
    assert (service.store / "run1/step-1/begun.bin").exists()


def test_a_stop_gets_the_time_that_its_configuration_says(machine: Machine, service: Service):
    """However short the unit's own limit is."""
    service.install(FAST)
    drop_in = machine.path(f"/etc/systemd/system/{service.unit}.d/50-short.conf")
    drop_in.write_text("[Service]\nTimeoutStopSec=3s\n")
    machine.ok("systemctl", "daemon-reload")
    service.start()
    path = f"{service.mnt}/run1/step-1"
    trainer = machine.start("python3", "-c", TRAINER, path, CKPTGATE_RUN_ID="job")
    assert trainer.stdout is not None
    assert trainer.stdout.readline().strip() == "saving"
    machine.ok("systemctl", "stop", "--no-block", service.unit)
    machine.run("sleep", "8")
    machine.ok("pkill", "-TERM", "-f", "begun.bin")
    _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err
    machine.until("its end", lambda: "ended" in service.journal())
    assert "ended success exited 0" in service.journal()
    assert (service.store / "run1/step-1/last.bin").exists()


def test_a_stop_waits_for_no_store_that_is_away(machine: Machine, service: Service):
    """I11: what is staged is there at the next start."""
    service.install(FAST)
    service.start()
    service.save("step-1")
    away = service.store.with_name("elsewhere")
    service.store.rename(away)
    path = f"{service.mnt}/run1/step-2"
    machine.ok("sh", "-c", f"mkdir {path} && echo 2 > {path}/w.bin")
    machine.ckptgate("commit", path, "--all")
    machine.until(
        "the outage", lambda: "the store is away" in service.show("StatusText"), timeout_s=90
    )
    # Far less than its 60 s; else this would end by its own limit.
    machine.ok("systemctl", "stop", service.unit, timeout=45)
    assert f"ended success exited {int(ExitCode.PENDING)}" in service.journal()
    assert "left name=run1/step-2" in service.journal()
    away.rename(service.store)
    service.start()
    done = machine.ckptgate("wait", path, "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert (service.store / "run1/step-2/w.bin").exists()


def failed(service: Service, code: ExitCode) -> str:
    """A start that must fail with *code*; its journal."""
    service.machine.run("systemctl", "start", service.unit)
    service.machine.until("the failure", lambda: service.show("ExecMainStatus") == str(int(code)))
    return service.journal()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("stroe = 1\n", "stroe"),
        ("[stop]\nnew_checkpoints = 7\n", "new_checkpoints"),
        ("not toml", "cannot read the configuration"),
        ('store = "/disk"\n', "no mount point is given"),
        ('mountpoint = "/disk/m"\n', "no store is given"),
        ('store = "/disk/x"\nmountpoint = "/disk/x/m"\n', "lies in the store"),
    ],
)
def test_a_wrong_configuration_is_a_failed_unit_that_says_so_and_is_not_tried_again(
    machine: Machine, service: Service, text: str, named: str
):
    """I13."""
    service.install()
    machine.path(f"/etc/ckptgate/{service.name}.toml").write_text(text)
    said = failed(service, ExitCode.USAGE)
    assert named in said
    assert service.show("ActiveState") == "failed"
    assert service.show("NRestarts") == "0"


def test_a_store_that_is_away_at_the_start_is_waited_for(machine: Machine, service: Service):
    service.install(FAST)
    service.store.rename(service.store.with_name("elsewhere"))
    machine.ok("systemctl", "start", "--no-block", service.unit)
    machine.until("its status", lambda: "waiting for the store" in service.show("StatusText"))
    assert service.show("ActiveState") == "activating"
    service.store.with_name("elsewhere").rename(service.store)
    machine.until("its start", lambda: service.show("ActiveState") == "active")
    service.save("step-1")


def test_a_store_that_goes_ends_nothing_and_is_told(machine: Machine, service: Service):
    """The watchdog's time passes several times meanwhile."""
    service.install(FAST)
    service.start()
    service.save("step-1")
    main, mount = service.show("MainPID"), service.pid("mount")
    away = service.store.with_name("elsewhere")
    service.store.rename(away)
    path = f"{service.mnt}/run1/step-2"
    machine.ok("sh", "-c", f"mkdir {path} && echo 2 > {path}/w.bin")
    machine.ckptgate("commit", path, "--all")
    machine.until(
        "the outage", lambda: "the store is away" in service.show("StatusText"), timeout_s=90
    )
    machine.run("sleep", "26")
    assert (service.show("MainPID"), service.pid("mount")) == (main, mount)
    assert service.show("NRestarts") == "0"
    away.rename(service.store)
    done = machine.ckptgate("wait", path, "--timeout", "90")
    assert done.returncode == 0, done.stderr
    machine.until("its end", lambda: service.show("StatusText") == "everything is in the store")


def test_a_mount_point_in_use_and_a_spool_in_use_are_told(machine: Machine, service: Service):
    service.install(FAST)
    machine.ok("sh", "-c", f"mkdir -p {service.mnt} && echo x > {service.mnt}/left")
    assert "is not empty" in failed(service, ExitCode.UNUSABLE)
    machine.until("another try", lambda: service.show("NRestarts") not in {"", "0"})
    machine.run("systemctl", "stop", service.unit)
    machine.ok("rm", f"{service.mnt}/left")
    machine.run("systemctl", "reset-failed", service.unit)
    machine.ok("mount", "-t", "tmpfs", "tmpfs", service.mnt)
    assert "is a mount point already" in failed(service, ExitCode.BUSY)
    machine.ok("umount", service.mnt)
    machine.run("systemctl", "stop", service.unit)
    machine.run("systemctl", "reset-failed", service.unit)
    service.start()
    base = f"/disk/{service.name}"
    done = machine.ckptgate("mount", f"{base}/store", f"{base}/other", "--spool", f"{base}/spool")
    assert done.returncode == ExitCode.BUSY
    assert service.mnt in done.stderr


def test_processes_that_are_killed_are_started_again(machine: Machine, service: Service):
    service.install(FAST)
    service.start()
    for kind in ("mount", "publisher", "watch_process"):
        pid = service.pid(kind)
        assert pid, kind
        machine.ok("kill", "-KILL", _inside(pid))
        machine.until(f"another {kind}", partial(_is_another, service, kind, pid))
    service.save("step-1")
    assert service.show("NRestarts") == "0"


def _is_another(service: Service, kind: str, pid: int) -> bool:
    return service.pid(kind) not in {0, pid}


def _inside(pid: int) -> str:
    """The number of a process in the machine."""
    with open(f"/proc/{pid}/status", encoding="ascii") as stream:
        (line,) = (line for line in stream if line.startswith("NSpid:"))
    return line.split()[-1]


def test_a_mount_by_fstab_is_one_of_the_helper(machine: Machine, service: Service):
    service.install(FAST)
    base = f"/disk/{service.name}"
    options = f"_netdev,x-systemd.mount-timeout=60,spool={base}/spool"
    fstab = machine.path("/etc/fstab")
    fstab.write_text(f"{base}/store {service.mnt} ckptgate {options} 0 0\n")
    machine.ok("mkdir", "-p", service.mnt)
    machine.ok("systemctl", "daemon-reload")
    unit = machine.ok("systemd-escape", "--path", "--suffix=mount", service.mnt).strip()
    try:
        machine.ok("systemctl", "start", unit)
        service.save("step-1")
        # All of fstab again changes nothing.
        machine.ok("mount", "-a")
        assert len(machine.ok("findmnt", "-n", service.mnt).splitlines()) == 1
        machine.ok("systemctl", "stop", unit)
        assert not machine.run("findmnt", service.mnt).stdout
        fstab.write_text(f"{base}/store {service.mnt} ckptgate sopol=/x 0 0\n")
        done = machine.run("mount", service.mnt)
        assert done.returncode == 1
        assert "sopol" in done.stderr
    finally:
        machine.run("systemctl", "stop", unit)
        fstab.write_text("")


def test_what_a_packager_ships_is_valid_as_it_is(machine: Machine):
    for name in ("ckptgate.tmpfiles.conf", "ckptgate.sysusers.conf"):
        text = (machine_files() / name).read_text()
        machine.path(f"/tmp/{name}").write_text(text)
    machine.ok("systemd-tmpfiles", "--dry-run", "--create", "/tmp/ckptgate.tmpfiles.conf") if (
        "--dry-run" in machine.run("systemd-tmpfiles", "--help").stdout
    ) else machine.ok("systemd-tmpfiles", "--cat-config")
    machine.ok("systemd-sysusers", "--dry-run", "/tmp/ckptgate.sysusers.conf")
    unit = machine.path("/etc/systemd/system/shipped@.service")
    text = (machine_files() / "ckptgate@.service").read_text()
    unit.write_text(text.replace("/usr/bin/ckptgate", "/bin/true"))
    done = machine.run("systemd-analyze", "verify", "shipped@x.service")
    assert (done.returncode, done.stderr) == (0, "")
    score = machine.ok("systemd-analyze", "security", "--no-pager", "shipped@x.service")
    assert "Overall exposure level for shipped@x.service: 4.9" in score


def machine_files():
    from tests.systemd.machine import ROOT

    return ROOT / "systemd"
