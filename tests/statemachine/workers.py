"""Processes that do moves on a mount, each with its own pid, session and job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Observer", "Worker"]

_PROGRAM = str(Path(__file__).with_name("moves.py"))


def _start(job: str, rank: int | None, *words: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key != "CKPTGATE_RUN_ID"}
    if job:
        env["CKPTGATE_RUN_ID"] = job
    if rank is not None:
        env |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-S", "-u", _PROGRAM, *words],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Worker:
    """A long-lived process of a job ("" for a session of its own) on one node."""

    def __init__(self, name: str, mnt: Path, job: str = "", rank: int | None = None) -> None:
        self.name = name
        self.mnt = mnt
        self.job = job or f"session of {name}"
        self.rank = rank
        self._process = _start(job, rank)

    def call(self, move: str, root: Path | str, *words: Any) -> tuple[str, Any]:
        """Do a move below *root*: ("ok", value) or ("error", errno)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([move, str(root), words]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"worker {self.name} died"
        kind, value = json.loads(line)
        return kind, value

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Observer:
    """A process of nobody's job that reads whole checkpoints all the time."""

    def __init__(self, runs: list[Path], names: list[str]) -> None:
        self._process = _start("", None, json.dumps([[str(run) for run in runs], names]))
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> list[tuple[str, str, str]]:
        """What it saw: (run, name, digest)."""
        out, _ = self._process.communicate("x", timeout=60)
        return [(run, name, digest) for run, name, digest in json.loads(out)]

    def kill(self) -> None:
        """End it whatever it does."""
        self._process.kill()
        self._process.communicate()
