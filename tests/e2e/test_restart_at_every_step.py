"""A takeover of which a process is killed at its n-th step, for every n: the ranks notice nothing.

The processes count what they do (`faulty/sitecustomize.py`) from the moment at which a plan is
there: of a replacement the new supervisor, the old one, and both mount processes; after a kill the
supervisor that the keeper starts.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import FAST, Cluster, Gateway, cluster, until
from tests.e2e.restarting import back, kill_all, mount_number, processes_of, replace, saving

pytestmark = [pytest.mark.fuse]

HERE = Path(__file__).parent / "faulty"
KINDS: list[tuple[str, str, str]] = [
    ("successor", "step", "replace"),
    ("supervisor", "step", "replace"),
    ("mount", "statement", "replace"),
    ("mount", "write", "replace"),
    ("mount", "ioctl", "replace"),
    ("publisher", "statement", "replace"),
    ("successor", "step", "kill"),
    ("mount", "statement", "kill"),
]


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "passthrough needs root")


class Steps:
    """A mount under a save, of which one process is killed as planned in each takeover."""

    def __init__(self, made: Cluster, plan: Path) -> None:
        self.made = made
        self.plan = plan
        self.run = 0

    @property
    def node(self) -> Gateway:
        return self.made.nodes[0]

    def killed_at(self, process: str, call: str, how: str, places: list[int]) -> list[int]:
        """Take over once for each place; returns those that were reached."""
        self.run += 1
        reached: list[int] = []
        before = mount_number(self.node.mnt)
        with saving(self.node, f"run{self.run}") as ranks:
            for at in places:
                if self._takes_over(process, call, how, at):
                    reached.append(at)
                assert mount_number(self.node.mnt) == before
            reports = ranks.finish()
            ranks.check_commit(reports, self.made.store)
        return reached

    def _takes_over(self, process: str, call: str, how: str, at: int) -> bool:
        plan: dict[str, Any] = {"process": process, "call": call, "at": at, "kill": "before"}
        if how == "kill":
            # A keeper gives up a supervisor that dies too often in a minute; a new one begins anew.
            kill_all(processes_of(self.node)["keeper"])
            back(self.node)
        supervisor = processes_of(self.node)["supervisor"]
        self.plan.with_suffix(".new").write_text(json.dumps(plan))
        self.plan.with_suffix(".new").rename(self.plan)
        if how == "replace":
            replace(self.node)
        else:
            kill_all(supervisor)
            until("the next supervisor", lambda: self.node.info().pid != supervisor, 60)
        back(self.node)
        is_hit = not self.plan.exists()
        self.plan.unlink(missing_ok=True)
        back(self.node)
        # Whoever died, it can be replaced.
        (self.node.mnt / "plain").mkdir(exist_ok=True)
        return is_hit


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    plan = tmp_path / "fault.json"
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("FAULTS_OF_TEST", str(plan))
    with cluster(tmp_path, config=FAST) as made:
        yield Steps(made, plan)


def test_a_takeover_of_which_a_process_dies_at_some_step(steps: Steps) -> None:
    """I2, I10, I11: at places drawn from all steps of a replacement."""
    chance = random.Random(11)
    process, call, how = KINDS[0]
    assert steps.killed_at(process, call, how, [chance.randrange(2, 12)])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("process", "call", "how"), KINDS)
def test_a_takeover_of_which_a_process_dies_at_any_step(
    steps: Steps, process: str, call: str, how: str
) -> None:
    """I2, I10, I11: for every n, until a takeover has no such step any more."""
    last = 0
    for first in range(1, 400, 8):
        places = list(range(first, first + 8))
        reached = steps.killed_at(process, call, how, places)
        last = max([last, *reached])
        if not reached:
            assert last >= 1
            return
    pytest.fail("a takeover never ended")
