"""Real publisher processes for tests: each with its own spool, killed and started again at will.

The test is the mount: it stages files in a node's spool (see `engine_harness`); the publisher is
the product's own process function. Processes come from a fork server, so that a start costs
milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.engine_harness import Cluster, StagedNode

from ckptgate.app.config import Config
from ckptgate.app.publisher_process import run_publisher
from ckptgate.app.sections import CommitSection
from ckptgate.ports.store import Store
from ckptgate_adapters.system_clock import SystemClock

STARTING = multiprocessing.get_context("forkserver")
STARTING.set_forkserver_preload(["tests.publishers"])
COMMIT = CommitSection(survivor_delay_s=0.5, idle_interval_s=0.1)
END_S = 20.0


class Machine:
    """A node whose publisher is a process of its own.

    Args:
        cluster: its clock must be the real one.
        host: name of the node.
        store: as the staging side sees it.
        root: the store's directory as this node has it mounted.
    """

    def __init__(self, cluster: Cluster, host: str, store: Store, root: str) -> None:
        self.node: StagedNode = cluster.node(host, store=store)
        self.starts = 0
        spool = self.node.raw.path
        self._config = Config(
            store=root, spool=spool, mountpoint=spool, log_level="WARNING", commit=COMMIT
        )
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start the publisher on what its predecessor left."""
        assert self._process is None
        self._process = STARTING.Process(target=_serve, args=(self._config,), daemon=True)
        self._process.start()
        self.starts += 1

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.join(END_S)
        assert self._process.exitcode == -signal.SIGKILL
        self._process = None

    def stop(self) -> None:
        """SIGTERM, as at an unmount; it ends by itself."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.join(END_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
        self._process = None
        assert code == 0, code


def _serve(config: Config) -> None:
    os._exit(run_publisher(config, is_kept=False))


def real_cluster(tmp: Path, store: Store) -> Cluster:
    """A cluster on the real clock."""
    return Cluster(tmp, store=store, clock=SystemClock())  # type: ignore[arg-type]


def wait_until(is_done: object, limit_s: float, what: str) -> None:
    """Poll until *is_done* says so; AssertionError that names *what* after *limit_s* seconds."""
    assert callable(is_done)
    deadline = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < deadline, f"{what}: not after {limit_s:g} s"
        time.sleep(0.05)
