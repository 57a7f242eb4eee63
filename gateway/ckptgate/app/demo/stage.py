"""The demo's scenery: a store, two mounts with a spool each, four rank processes; and its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from typing import Any, Final

from ckptgate.errors import CkptError
from ckptgate_adapters.channels import control_call

__all__ = ["NODES", "RUN", "WORLD_SIZE", "Stage"]

NODES: Final = 2
WORLD_SIZE: Final = 4
RUN: Final = "run1"
_CONFIG: Final = "[commit]\nidle_interval_s = 0.5\n"


class Stage:
    """Everything lies in one temporary directory, which `close` removes."""

    def __init__(self) -> None:
        self.base = tempfile.mkdtemp(prefix="ckptgate-demo-")
        self.store = os.path.join(self.base, "store")
        self.mounts = [os.path.join(self.base, f"node{i + 1}") for i in range(NODES)]
        self.spools = [os.path.join(self.base, f"spool{i + 1}") for i in range(NODES)]
        self.job = f"demo-{uuid.uuid4().hex[:8]}"
        self._ranks: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        """Make the store and mount it on both nodes."""
        os.mkdir(self.store)
        config = os.path.join(self.base, "ckptgate.toml")
        with open(config, "w", encoding="utf-8") as stream:
            stream.write(_CONFIG)
        for mount, spool in zip(self.mounts, self.spools, strict=True):
            self.command("mount", self.store, mount, "--spool", spool, "--config", config)
            os.makedirs(os.path.join(mount, RUN), exist_ok=True)

    def command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a `ckptgate` command."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ckptgate.app.cli", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            msg = f"ckptgate {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}"
            raise CkptError(msg, subject=words[0])
        return done

    def start_rank(
        self, name: str, rank: int, *, mib: int, pause_s: float
    ) -> subprocess.Popen[str]:
        """Start one rank's save of the checkpoint *name* on its node."""
        node = rank * NODES // WORLD_SIZE
        checkpoint = os.path.join(self.mounts[node], RUN, name)
        environ = dict(os.environ, CKPTGATE_RUN_ID=self.job)
        words = [checkpoint, str(rank), str(WORLD_SIZE), str(mib), str(pause_s)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ckptgate.app.demo.trainer", *words],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ranks.append(process)
        return process

    def report(self, node: int) -> dict[str, Any]:
        """A node's status, empty while its daemon doesn't answer."""
        try:
            found: dict[str, Any] = control_call(self.spools[node], {"op": "status"})
        except CkptError:
            return {}
        return found

    def close(self) -> None:
        """End the ranks, unmount, remove everything."""
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for mount in self.mounts:
            if os.path.ismount(mount):
                with contextlib.suppress(CkptError, subprocess.TimeoutExpired):
                    self.command("umount", mount, "--timeout", "2", "--lazy", check=False)
        if not any(os.path.ismount(mount) for mount in self.mounts):
            shutil.rmtree(self.base, ignore_errors=True)
