"""Ranks that save while the gateway is killed, replaced and restarted, and what they must see."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.harness import Gateway, Job, cli, job, tree, until, users_of

SCRIPT = Path(__file__).parent / "calling_rank.py"
RANKS = 4
PREPARE = "import os, sys\nfor place in sys.argv[1:]: os.makedirs(place)\n"
COMMIT = 'import os, sys\nos.setxattr(sys.argv[1], "user.ckptgate.commit", b"all")\n'


def mount_number(path: Path) -> str:
    """What tells this mount from another one that is put over it or in its place."""
    found = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if fields[4] == str(path):
            found = f"{fields[0]} {fields[2]}"
    return found


def keeper_of(node: Gateway) -> int:
    """Pid of the process that keeps the node's mount, 0 if there is none."""
    for pid in users_of(node.spool, "lock"):
        with contextlib.suppress(OSError):
            if b"/keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def processes_of(node: Gateway) -> dict[str, int]:
    """All processes of the mount, by what they are."""
    return {
        "supervisor": node.info().pid,
        "mount": node.child("mount"),
        "publisher": node.child("publisher"),
        "keeper": until("a keeper", lambda: keeper_of(node)),
    }


def kill_all(*pids: int) -> None:
    """SIGKILL them, as near to at once as can be."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def back(node: Gateway, timeout_s: float = 60.0) -> None:
    """Wait until the mount has a supervisor with both children, and a keeper."""

    def is_back() -> bool:
        with contextlib.suppress(AssertionError, OSError):
            return node.info().pid > 0 and bool(node.child("mount") and node.child("publisher"))
        return False

    until("the mount's processes", is_back, timeout_s)
    until("a keeper", lambda: keeper_of(node), timeout_s)


def replace(node: Gateway, env: dict[str, str] | None = None) -> Any:
    """Run `ckptgate mount --replace`."""
    return cli("mount", "--replace", node.mnt, env=env)


class Ranks:
    """The save: four processes and what they report."""

    def __init__(self, node: Gateway, run: str = "run") -> None:
        self.node = node
        self.run = run
        self.step = node.mnt / run / "step-1"
        self.plain = node.mnt / f"{run}-plain"
        self.env = {"CKPTGATE_RUN_ID": run}
        self.jobs: list[Job] = []

    def start(self) -> Ranks:
        done = job(PREPARE, self.step, self.plain, run_id=self.run)
        assert done.returncode == 0, done.stderr
        for number in range(RANKS):
            self.jobs.append(
                Job(
                    [
                        sys.executable,
                        "-u",
                        str(SCRIPT),
                        str(self.step),
                        str(self.plain),
                        str(number),
                    ],
                    env=dict(os.environ, **self.env),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for rank in self.jobs:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "begun\n", rank.communicate()[1]
        return self

    def kill(self) -> None:
        for rank in self.jobs:
            rank.__exit__(None, None, None)

    def finish(self) -> list[dict[str, Any]]:
        """Let them end; each call must have come to what it should."""
        for rank in self.jobs:
            assert rank.stdin is not None
            rank.stdin.write("stop\n")
            rank.stdin.flush()
        reports = []
        for rank in self.jobs:
            out, err = rank.communicate(timeout=90)
            assert rank.returncode == 0, err
            reports.append(json.loads(out.splitlines()[-1]))
        for report in reports:
            assert report["failed"] == [], report["failed"][:10]
            assert report["calls"] > 50
        return reports

    def check_commit(self, reports: list[dict[str, Any]], store: Path) -> None:
        """The save commits, and holds what the ranks left."""
        done = job(COMMIT, self.step, run_id=self.run)
        assert done.returncode == 0, done.stderr
        saved = store / self.run / "step-1"
        until("the commit", saved.is_dir, 60)
        expected: dict[str, bytes] = {}
        for number, report in enumerate(reports):
            for name, text in report["kept"][f"{self.step}/rank{number}"].items():
                expected[f"rank{number}/{name}"] = text.encode()
        found = tree(saved)
        big = {name: data for name, data in found.items() if name.endswith("/big")}
        assert {name: found[name] for name in found if name not in big} == expected
        assert sorted(big) == [f"rank{number}/big" for number in range(RANKS)]
        assert all(len(data) == 1 << 20 for data in big.values())


@contextlib.contextmanager
def saving(node: Gateway, run: str = "run") -> Iterator[Ranks]:
    """Four ranks at work; killed in the end if they are still there."""
    ranks = Ranks(node, run)
    try:
        yield ranks.start()
    finally:
        ranks.kill()


def while_saving(
    node: Gateway, store: Path, disturb: Callable[[], None], run: str = "run"
) -> list[dict[str, Any]]:
    """Disturb a save; no rank notices, the mount is the same, and the save commits."""
    before = mount_number(node.mnt)
    with saving(node, run) as ranks:
        time.sleep(0.2)
        disturb()
        time.sleep(0.2)
        reports = ranks.finish()
        assert mount_number(node.mnt) == before
        ranks.check_commit(reports, store)
    return reports
