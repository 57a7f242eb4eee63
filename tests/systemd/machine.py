"""A real systemd as process 1, in namespaces of its own, on an overlay of this machine's root.

Nothing is installed and nothing of the host changes: /etc/systemd, /run, /tmp, /var and /dev are
new, other changes go into an overlay in memory. `disk` is a directory of the host, seen as /disk:
spools and stores are there, since the kernel does not pass through to an overlay. What the machine
runs dies with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["Machine", "booted", "missing"]

ROOT = Path(__file__).parents[2]
_SYSTEMD = "/lib/systemd/systemd"
_NEEDED = ("unshare", "nsenter", "mount", "systemctl", "journalctl", "systemd-analyze", "chroot")
_MASKED = (
    "systemd-sysctl.service systemd-modules-load.service systemd-udevd.service "
    "systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket "
    "systemd-binfmt.service systemd-random-seed.service kmod-static-nodes.service "
    "systemd-remount-fs.service systemd-update-utmp.service systemd-hwdb-update.service "
    "systemd-timesyncd.service systemd-pstore.service systemd-machine-id-commit.service "
    "systemd-journal-flush.service systemd-tmpfiles-setup-dev.service dev-hugepages.mount "
    "dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount "
    "proc-sys-fs-binfmt_misc.automount systemd-firstboot.service systemd-sysusers.service "
    "systemd-network-generator.service dbus.socket"
)
"""What would change the host's kernel, or only takes time."""

_COVERED = ("/run/", "/tmp/", "/var/lib/", "/var/log/", "/etc/systemd/", "/dev/")
"""What is empty in a machine."""

_BOOT = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$BASE/layer"
mkdir "$BASE/layer/upper" "$BASE/layer/work"
root="$BASE/root"
layer="$BASE/layer"
mount -t overlay overlay -o "lowerdir=/,upperdir=$layer/upper,workdir=$layer/work" "$root"
mkdir -p "$root/disk"
mount --bind "$BASE/disk" "$root/disk"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for place in run tmp var/lib var/log etc/systemd dev; do
  mkdir -p "$root/$place"
  mount -t tmpfs tmpfs "$root/$place"
done
for place in $PLACES; do
  mkdir -p "$root$place"
  mount --rbind "$place" "$root$place"
done
for device in null zero full random urandom tty fuse; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666
mount -t tmpfs tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s null "$root/dev/console"
ln -s /proc/self/fd "$root/dev/fd"
mkdir -p "$root/etc/systemd/system"
for unit in $MASKED; do ln -s /dev/null "$root/etc/systemd/system/$unit"; done
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' \
  > "$root/etc/systemd/system/booted.target"
rm -f "$root/etc/fstab"; : > "$root/etc/fstab"
echo 0123456789abcdef0123456789abcdef > "$root/etc/machine-id"
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  chroot "$root" /lib/systemd/systemd --unit=booted.target --log-target=journal --show-status=no
"""


def missing() -> str:
    """What this machine lacks to boot one, "" for nothing."""
    if os.geteuid() != 0:
        return "systemd is booted by root only"
    if not os.path.exists(_SYSTEMD):
        return "systemd is not installed"
    lacking = [name for name in _NEEDED if shutil.which(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    if _cgroups() is None:
        return "no cgroup2 is mounted"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    return ""


def _cgroups() -> Path | None:
    """Where cgroup2 is mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            return Path(left.split(" ")[4])
    return None


class Machine:
    """A booted one; `run` is done inside of it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.disk = base / "disk"
        for name in ("root", "layer", "disk"):
            (base / name).mkdir()
        self._boot: subprocess.Popen[bytes] | None = None
        self._cgroup: Path | None = None
        self.pid = 0

    def boot(self) -> None:
        """Start it, and return when it runs."""
        cgroups = _cgroups()
        assert cgroups is not None
        self._cgroup = cgroups / f"ckptgate-test-{os.getpid()}-{time.monotonic_ns()}"
        self._cgroup.mkdir()
        places = {str(ROOT), sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix)}
        # What is on the root's file system is in the overlay already, unless it is covered there.
        apart = [
            place
            for place in sorted(places)
            if os.stat(place).st_dev != os.stat("/").st_dev or place.startswith(_COVERED)
        ]
        environ = {
            **os.environ,
            "BASE": str(self.base),
            "PLACES": " ".join(apart),
            "MASKED": _MASKED,
        }
        join = f'echo $$ > "{self._cgroup}/cgroup.procs"; exec "$@"'
        words = [
            "unshare",
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--cgroup",
            "--fork",
            "--kill-child",
        ]
        with (self.base / "boot.log").open("wb") as log:
            self._boot = subprocess.Popen(
                ["bash", "-c", join, "bash", *words, "bash", "-c", _BOOT],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.until("the machine to run", self._is_up, timeout_s=60)

    def _is_up(self) -> bool:
        assert self._boot is not None
        if self._boot.poll() is not None:
            raise AssertionError(f"it did not boot:\n{(self.base / 'boot.log').read_text()}")
        if not self.pid:
            children = Path(f"/proc/{self._boot.pid}/task/{self._boot.pid}/children").read_text()
            if not children.split():
                return False
            pid = int(children.split()[0])
            with contextlib.suppress(OSError):
                if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "systemd":
                    self.pid = pid
            return False
        return self.run("systemctl", "is-active", "booted.target").stdout.strip() == "active"

    def words(self, *words: str | Path) -> list[str]:
        """A command as the host starts it."""
        entered = ["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-C", "-r", "-w", "--"]
        return [*entered, *map(str, words)]

    def run(
        self, *words: str | Path, timeout: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        return subprocess.run(
            self.words(*words),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def ok(self, *words: str | Path, timeout: float = 120, **env: str) -> str:
        """Run a command that must succeed; what it printed."""
        done = self.run(*words, timeout=timeout, **env)
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *words: str | Path, **env: str) -> subprocess.Popen[str]:
        """Begin a command inside; its standard streams are pipes."""
        return subprocess.Popen(
            self.words(*words),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ckptgate(self, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        """The command line of this source tree, inside."""
        return self.run(sys.executable, "-m", "ckptgate.app.cli", *words, **more)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.ok("systemctl", "show", "--value", "-p", name, unit).strip()

    def journal(self, unit: str) -> str:
        """What a unit logged, and what was logged of it."""
        return self.run("journalctl", "-o", "short-monotonic", "--no-pager", "-u", unit).stdout

    def path(self, inside: str) -> Path:
        """A file of the machine as the host sees it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    @staticmethod
    def until(what: str, look: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """What *look* gives once it isn't false."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)
        return found

    def destroy(self) -> None:
        """End everything in it, whatever state it is in."""
        if self._boot is not None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            elif self._boot.poll() is None:
                self._boot.kill()
            self._boot.wait(30)
        if self._cgroup is not None:
            for directory, _, _ in os.walk(self._cgroup, topdown=False):
                self.until("its processes to be gone", partial(_removed, directory), 30)


def _removed(cgroup: str) -> bool:
    try:
        os.rmdir(cgroup)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def booted(base: Path) -> Iterator[Machine]:
    """A machine that is gone in the end."""
    machine = Machine(base)
    try:
        machine.boot()
        yield machine
    finally:
        machine.destroy()
