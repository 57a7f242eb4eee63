"""Stores with daemons for tests of `ckpt://`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from tests.e2e.harness import FAST

from ckptgate.app.registry import MountInfo, list_mounts
from ckptgate_adapters.fsspec_ckpt.connection import open_clients


@dataclass
class Place:
    """A store and a spool, with what a client is told of them."""

    store: str
    spool: Path
    config: Path
    env: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def make(base: Path, *, store: str = "", env: Mapping[str, str] | None = None) -> Place:
        """A new one below *base*; its daemon is started by the first use."""
        if not store:
            (base / "store").mkdir()
            store = str(base / "store")
        config = base / "ckptgate.toml"
        config.write_text(FAST)
        return Place(store, base / "spool", config, dict(env or {}))

    @property
    def options(self) -> dict[str, Any]:
        """Of the file system."""
        return {
            "store": self.store,
            "spool": str(self.spool),
            "config": str(self.config),
            "idle_exit_s": 120,
        }

    def fs(self, **options: Any) -> Any:
        """The file system."""
        return fsspec.filesystem("ckpt", **self.options | options)

    def python(self, code: str, *words: str, run_id: str = "", **more: Any) -> Any:
        """Run Python code, to which `ckpt://` is this place, as a process of its own."""
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            env=self.environment(run_id),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **more,
        )

    def start(self, code: str, *words: str, run_id: str = "") -> subprocess.Popen[str]:
        """The same, not waited for; its streams are pipes."""
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code, *words],
            env=self.environment(run_id),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self, run_id: str = "") -> dict[str, str]:
        """Of a process to which `ckpt://` is this place."""
        env = dict(os.environ, **self.env)
        env |= {f"FSSPEC_CKPT_{key.upper()}": str(value) for key, value in self.options.items()}
        return env | ({"CKPTGATE_RUN_ID": run_id} if run_id else {})

    def info(self) -> MountInfo | None:
        """The daemon that runs, None if none does."""
        found = [info for info in list_mounts() if info.spool == os.path.realpath(self.spool)]
        return found[0] if found else None

    def child(self, kind: str) -> int:
        """Pid of the daemon's `clients` (or `mount`) or `publisher` process; 0 for none."""
        info = self.info()
        if info is None:
            return 0
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{info.pid}/task/{info.pid}/children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if b"ckptgate.app.child" in words and kind.encode() in words:
                    return int(child)
        return 0

    def log(self) -> str:
        """The daemon's log."""
        path = self.spool / "ckptgate.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        """End the daemon, and this process's connections to it."""
        info = self.info()
        for client in open_clients():
            client.close()
        if info is None:
            return
        os.kill(info.pid, signal.SIGTERM)
        deadline = time.monotonic() + 40
        while info.is_alive and time.monotonic() < deadline:
            time.sleep(0.05)
        if info.is_alive:
            os.kill(info.pid, signal.SIGKILL)


@contextlib.contextmanager
def placed(base: Path, *, store: str = "", env: Mapping[str, str] | None = None) -> Iterator[Place]:
    """A place below *base*; its daemon is ended afterwards."""
    made = Place.make(base, store=store, env=env)
    try:
        yield made
    finally:
        made.end()
