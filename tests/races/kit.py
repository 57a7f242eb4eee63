"""What the races share: runs on two nodes, saves, and children that watch until they are told."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.harness import Cluster, job, start_job, until

__all__ = ["WATCH", "Run", "commit", "save", "watching"]


@dataclass(frozen=True)
class Run:
    """A run directory as the first node (`here`) and the second (`there`) show it."""

    pair: Cluster
    here: Path
    there: Path


SAVE = """
import os, sys, ckptgate
path, data = sys.argv[1:]
os.mkdir(path)
open(path + "/a.bin", "w").write(data)
ckptgate.commit(path, 0, 1)
ckptgate.wait(path, 60)
"""


def save(path: Path, data: str = "1", run_id: str = "job1") -> Path:
    """A committed checkpoint with one file, by a process of a job."""
    done = job(SAVE, path, data, run_id=run_id)
    assert done.returncode == 0, done.stderr
    return path


def commit(path: Path) -> None:
    """Commit for all ranks, and wait."""
    os.setxattr(path, "user.ckptgate.commit", b"all")
    state = "user.ckptgate.state"
    until(path.name, lambda: json.loads(os.getxattr(path, state))["state"] == "committed")


WATCH = """
import json, os, sys, time
words = sys.argv[1:]
problems, count = [], 0
def bad(what):
    if len(problems) < 5:
        problems.append(what)
def is_told():
    try:
        return bool(os.read(0, 1))
    except BlockingIOError:
        return False
os.set_blocking(0, False)
{setup}
print("ready", flush=True)
while not is_told():
    count += 1
    try:
{body}
    except OSError as exc:
        bad(repr(exc))
print(json.dumps([count, problems]))
"""
"""A program that does `body` until a byte comes on its standard input; `bad` notes a problem."""


def watcher(body: str, setup: str = "") -> str:
    """`WATCH` with these lines."""
    lines = "\n".join("        " + line for line in body.strip("\n").splitlines())
    return WATCH.replace("{setup}", setup).replace("{body}", lines)


@contextlib.contextmanager
def watching(*children: tuple[str, str, list[str | Path]]) -> Iterator[list[int]]:
    """Run watchers meanwhile: (code, job, arguments); afterwards none may have a problem.

    Yields a list which in the end holds how many looks each took.
    """
    counts: list[int] = []
    with contextlib.ExitStack() as stack:
        started: list[Any] = []
        for code, run_id, words in children:
            child = stack.enter_context(start_job(code, *words, run_id=run_id))
            started.append(child)
        for child in started:
            assert child.stdout.readline() == "ready\n", child.communicate()[1]
        yield counts
        reports = [child.communicate("x", timeout=120) for child in started]
    for (_, run_id, words), child, (out, error) in zip(children, started, reports, strict=True):
        assert child.returncode == 0, error
        count, problems = json.loads(out)
        assert not problems, (run_id, *map(str, words), problems)
        counts.append(count)
