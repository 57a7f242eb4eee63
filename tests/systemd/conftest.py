"""A machine for the tests of a module, and a service on it."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.systemd.machine import Machine, booted, missing

_COUNT = itertools.count(1)
FAST = """
[commit]
quiescence_s = 2
deadline_s = 20
survivor_delay_s = 1
idle_interval_s = 0.5
"""


TRAINER = """
import os, signal, sys, time
path = sys.argv[1]
ended = []
signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
os.makedirs(path)
with open(path + "/begun.bin", "wb") as stream:
    stream.write(b"b" * 100)
print("saving", flush=True)
while not ended:
    time.sleep(0.05)
with open(path + "/last.bin", "wb") as stream:
    stream.write(b"l" * 100)
try:
    os.makedirs(os.path.dirname(path) + "/step-9")
    print("begun", flush=True)
except OSError as exc:
    print(exc.errno, flush=True)
os.setxattr(path, "user.ckptgate.commit", b"all")
"""
"""Begins a save, and ends it at SIGTERM; it tries another one then."""


@pytest.fixture(scope="module")
def machine(require: Callable[[object, str], None]) -> Iterator[Machine]:
    """Booted once for a module."""
    lacking = missing()
    require(not lacking, lacking)
    # On a disk: the kernel passes through to few others.
    base = tempfile.TemporaryDirectory(prefix="ckptgate-machine-", dir="/var/tmp")
    with base as directory, booted(Path(directory)) as made:
        # A short watchdog, for all services: what takes a minute takes seconds here.
        drop_in = made.path("/etc/systemd/system/ckptgate@.service.d/99-fast.conf")
        drop_in.parent.mkdir(parents=True)
        # And its end in the journal: a unit that nothing wants is forgotten with it.
        ended = "/bin/echo ended $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS"
        drop_in.write_text(f"[Service]\nWatchdogSec=12s\nExecStopPost={ended}\n")
        yield made


@dataclass
class Service:
    """One service on the machine; its places are below /disk."""

    machine: Machine
    name: str

    @property
    def unit(self) -> str:
        return f"ckptgate@{self.name}.service"

    @property
    def mnt(self) -> str:
        return f"/disk/{self.name}/mnt"

    @property
    def store(self) -> Path:
        """As the host sees it."""
        return self.machine.disk / self.name / "store"

    @property
    def spool(self) -> Path:
        """As the host sees it."""
        return self.machine.disk / self.name / "spool"

    def install(self, more: str = "") -> None:
        """With the command, as an operator does; the configuration gets *more*."""
        self.store.mkdir(parents=True, exist_ok=True)
        base = f"/disk/{self.name}"
        done = self.machine.ckptgate(
            "service", "install", self.name, "--store", f"{base}/store", "--mountpoint", self.mnt,
            "--spool", f"{base}/spool", "--exec", str(Path(sys.executable).parent / "ckptgate"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.configure("", more)

    def configure(self, old: str, new: str) -> None:
        """Replace a text of its configuration; with "" append one."""
        config = self.machine.path(f"/etc/ckptgate/{self.name}.toml")
        text = config.read_text()
        assert old in text
        config.write_text(text.replace(old, new) if old else text + new)

    def start(self) -> None:
        """Start it; it is ready then."""
        done = self.machine.run("systemctl", "start", self.unit)
        assert done.returncode == 0, done.stderr + self.journal()

    def show(self, name: str) -> str:
        return self.machine.show(self.unit, name)

    def journal(self) -> str:
        return self.machine.journal(self.unit)

    def pid(self, kind: str) -> int:
        """Of one of its processes, as the host numbers them; 0 for none."""
        group = self.show("ControlGroup")
        procs = self.machine.path(f"/sys/fs/cgroup{group}/cgroup.procs")
        # Read from here, the numbers are those of the host's own name space.
        for pid in procs.read_text().split() if procs.exists() else ():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_it = kind.encode() in words or f"ckptgate.app.{kind}".encode() in words
            if is_it and (kind == "supervisor" or b"--foreground" not in words):
                return int(pid)
        return 0

    def save(self, name: str, **files: str) -> None:
        """A checkpoint that is committed on return."""
        path = f"{self.mnt}/run1/{name}"
        for file, text in (files or {"w.bin": name}).items():
            self.machine.ok("sh", "-c", f"mkdir -p {path} && printf %s {text} > {path}/{file}")
        done = self.machine.ckptgate("commit", path, "--all", "--wait", "--timeout", "60")
        assert done.returncode == 0, done.stderr


@pytest.fixture
def service(machine: Machine) -> Iterator[Service]:
    """A new one, installed by the test; it is gone in the end."""
    made = Service(machine, f"s{next(_COUNT)}")
    yield made
    machine.run("systemctl", "kill", "-s", "KILL", made.unit)
    machine.run("systemctl", "stop", made.unit)
    machine.run("systemctl", "reset-failed", made.unit)
    machine.run("umount", "-l", made.mnt)
