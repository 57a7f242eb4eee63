"""Real NFS for tests: scripts run in a User-Mode Linux guest, with a server and two clients."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

SCRIPTS = Path(__file__).parent / "nfs"
REPOSITORY = Path(__file__).parents[2]
PROGRAMS = ("linux.uml", "rpc.nfsd", "rpc.mountd", "exportfs", "mount.nfs", "rpcbind", "mkfs.ext4")


class RunInGuest(Protocol):
    def __call__(
        self, script: str, *, nfs_options: str = ..., timeout_s: int = ...
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def run_in_guest(require: Callable[[object, str], None], tmp_path: Path) -> RunInGuest:
    """Run a bash script as root in the guest; its output and exit code as of a local process.

    In the script: /mnt/client1 and /mnt/client2 are one NFS export, mounted by two machines with
    *nfs_options*; /mnt/export is the server's own view. $PYTHON is the interpreter that runs the
    tests, and $REPOSITORY the checkout, both read-only; /run and /dev/shm are local disks.
    """
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    require(not missing, f"not installed: {', '.join(missing)}")
    require(os.geteuid() == 0, "a guest with the host's root directory needs root")

    def run(
        script: str, *, nfs_options: str = "vers=4.2", timeout_s: int = 120
    ) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "guest.sh"
        file.write_text(
            "set -u\n"
            f"NFS_OPTIONS={nfs_options}\n"
            "{ . $GUEST_HERE/nfs_server.sh; . $GUEST_HERE/two_clients.sh; } >/run/setup 2>&1\n"
            "mountpoint -q /mnt/client2 || { cat /run/setup; exit 98; }\n"
            f"export PYTHON={sys.executable} REPOSITORY={REPOSITORY} PYTHONDONTWRITEBYTECODE=1\n"
            "cd $REPOSITORY\n" + script
        )
        return subprocess.run(
            [str(SCRIPTS / "boot_uml.sh"), str(file)],
            env={**os.environ, "PATH": _path(), "UML_TIMEOUT_S": str(timeout_s)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
