"""Power loss of a whole node: a guest is killed together with its disk's cache, and booted again.

The guest is User-Mode Linux with a disk of its own for the spool; the store and the list of what
was promised lie on the host. What the guest's kernel had not yet given to the disk is lost with it.
(What a disk loses that it was given and not told to flush: `test_lost_writes.py`.)
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "power"
REPOSITORY = Path(__file__).parents[2]
INIT = REPOSITORY / "tests/contract/nfs/guest_init.sh"
DISK_BYTES = 300 << 20
BOOT_S = 150.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Machine:
    """A guest whose power can be cut; its disk and what it left on the host stay."""

    def __init__(self, base: Path, file_system: str) -> None:
        self.base = base
        self.file_system = file_system
        self.out = base / "out"
        self.out.mkdir()
        self.disk = base / "disk"
        with open(self.disk, "wb") as stream:
            stream.truncate(DISK_BYTES)
        subprocess.run(
            [f"mkfs.{file_system}", "-q", self.disk], check=True, env={**os.environ, "PATH": PATH}
        )
        modules = base / "modules/lib"
        modules.mkdir(parents=True)
        (modules / "modules").symlink_to("/usr/lib/uml/modules")
        self.boots = 0

    def boot(self, first_step: int | None) -> subprocess.Popen[bytes]:
        """Start it; without *first_step* it only checks, and powers off."""
        self.boots += 1
        for name in ("checked", "output", "exit-code"):
            (self.out / name).unlink(missing_ok=True)
        script = self.base / "guest.sh"
        script.write_text(
            f"export PYTHON={sys.executable} REPOSITORY={REPOSITORY}\n"
            f"FILE_SYSTEM={self.file_system}\n"
            f"FIRST_STEP={'' if first_step is None else first_step}\n"
            f"GUEST_OUT=/mnt/out; export GUEST_OUT\n. {HERE}/guest.sh\n"
        )
        command = [
            "linux.uml", "mem=512M", f"umid=power{os.getpid()}", f"uml_dir={self.base}/",
            f"ubda={self.disk}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
            "quiet", "con=null", "con0=null,fd:1", "ssl=null", f"init={INIT}",
            f"guest_script={script}", f"guest_out={self.out}",
            f"guest_modules={self.base}/modules", f"guest_here={INIT.parent}",
        ]  # fmt: skip
        with open(self.base / "console", "wb") as console:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                # The guest's memory is a file there.
                env={**os.environ, "PATH": PATH, "TMPDIR": "/dev/shm"},
            )

    def run_until_power_loss(self, first_step: int, delay_s: float) -> None:
        """Boot, check, save for *delay_s*, and cut the power."""
        with self.boot(first_step) as guest:
            try:
                deadline = time.monotonic() + BOOT_S
                while not (self.out / "checked").exists():
                    if guest.poll() is not None or time.monotonic() > deadline:
                        pytest.fail(f"boot {self.boots} did not get to the saves:\n{self.report()}")
                    time.sleep(0.05)
                before = self.promises()
                while self.promises() == before and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(delay_s)
            finally:
                os.killpg(guest.pid, signal.SIGKILL)

    def check(self) -> str:
        """Boot once more, only to check; returns what the check printed."""
        with self.boot(None) as guest:
            try:
                guest.wait(BOOT_S)
            finally:
                if guest.poll() is None:
                    os.killpg(guest.pid, signal.SIGKILL)
        code = self.out / "exit-code"
        assert code.exists(), self.report()
        assert code.read_text().strip() == "0", self.report()
        return (self.out / "output").read_text()

    def promises(self) -> int:
        path = self.out / "acknowledged"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def report(self) -> str:
        paths = (self.base / "console", self.out / "output", self.out / "ckptgate.log")
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-5000:]}"
            for path in paths
            if path.exists()
        )


def cut_power_again_and_again(base: Path, file_system: str, losses: int, seed: int) -> str:
    machine = Machine(base, file_system)
    chance = random.Random(seed)
    for number in range(losses):
        machine.run_until_power_loss(number * 1000, chance.uniform(0.0, 4.0))
    print(found := machine.check())
    assert machine.promises() > losses
    return found


@pytest.fixture(autouse=True)
def _needs_a_guest(require):
    for name in ("linux.uml", "mkfs.ext4", "modprobe"):
        require(shutil.which(name, path=PATH), f"not installed: {name}")
    require(os.geteuid() == 0, "a guest with the host's root directory needs root")


@pytest.mark.timeout(600)
def test_nothing_that_was_promised_is_lost_when_the_power_goes(disk_path: Path):
    """I11, I10: fsynced files and names are there, commits hold, the rest is refused loudly."""
    cut_power_again_and_again(disk_path, "ext4", 1, seed=1)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file_system", ["ext4", "xfs", "btrfs"])
def test_nothing_is_lost_by_many_power_losses(require, disk_path: Path, file_system: str):
    """I11, I10."""
    require(shutil.which(f"mkfs.{file_system}", path=PATH), f"not installed: mkfs.{file_system}")
    cut_power_again_and_again(disk_path, file_system, 8, seed=2)
