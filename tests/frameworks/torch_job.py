"""Starts of an unmodified trainer (`train_dcp`) under torchrun, on one node's path or several."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.e2e.harness import until

__all__ = ["RANKS", "Training", "training"]

TRAINER: Final = Path(__file__).with_name("train_dcp.py")
RANKS: Final = 4
RUN_S: Final = 150.0


class Training:
    """One start of the job: torchrun with four ranks, the first half of them on the first path.

    Attributes:
        out: where the ranks leave marks.
        agents: torchrun's processes, one for all ranks or one a node.
    """

    def __init__(self, out: Path, runs: list[Path], *words: str, agents: int = 1) -> None:
        out.mkdir()
        self.out = out
        self.agents: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"),
            *("--nnodes", str(agents), "--nproc-per-node", str(RANKS // agents)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            # As many letters for each run, so that its shards are as long.
            *("--rdzv-id", hashlib.sha256(os.fsencode(out)).hexdigest()[:16]),
            *(str(TRAINER), *map(str, runs), "--out", str(out), *words),
        ]
        for node in range(agents):
            with (out / f"log{node}").open("w") as log:
                self.agents.append(
                    subprocess.Popen(
                        command,
                        env=dict(os.environ, OMP_NUM_THREADS="1"),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                        start_new_session=True,
                    )
                )

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.out.glob("log*")))

    def wait(self) -> int:
        """Its exit code."""
        deadline = time.monotonic() + RUN_S
        try:
            return max(abs(a.wait(max(0.1, deadline - time.monotonic()))) for a in self.agents)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {RUN_S} s:\n{self.log()}") from None

    def ends_well(self) -> None:
        assert self.wait() == 0, self.log()

    def end(self) -> None:
        """Kill what is left."""
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()

    def until(self, what: str, is_true: Callable[[], object], timeout_s: float = 60.0) -> Any:
        """Wait for a condition, while the run goes on."""

        def check() -> object:
            value = is_true()
            assert value or any(a.poll() is None for a in self.agents), f"{what}\n{self.log()}"
            return value

        return until(what, check, timeout_s)

    def final(self) -> list[str]:
        """Digest of the last state, for each rank."""
        return [(self.out / f"final-{rank}").read_text() for rank in range(RANKS)]

    def resumed_after(self) -> set[int]:
        """The steps that ranks began after."""
        return {int(n) for n in re.findall(r"starts after step (\d+)", self.log())}


@contextlib.contextmanager
def training(out: Path, runs: list[Path], *words: str, agents: int = 1) -> Iterator[Training]:
    run = Training(out, runs, *words, agents=agents)
    try:
        yield run
    finally:
        run.end()
