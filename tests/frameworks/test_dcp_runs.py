"""Real PyTorch on real mounts: FSDP2 with DCP under torchrun.

The trainer (`train_dcp.py`) knows nothing of ckptgate. All its runs end in the same state, so each
is compared bit for bit with one on a plain directory. An observer outside of the job looks at the
store and at mounts meanwhile, with PyTorch's own reader.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, until
from tests.frameworks.torch_job import Training, training
from tests.frameworks.torch_seen import STEPS, Observer, Run, is_latest, load, writers

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow]


def kill_in_saves(training_: Training, c: Cluster) -> None:
    """kill -9 the daemons of both nodes while the run saves."""
    one, two, _ = c.nodes
    victims = {
        2: [(one, "mount"), (two, "publisher")],
        4: [(two, "mount"), (one, "publisher")],
        6: [(node, kind) for node in (one, two) for kind in ("publisher", "mount")],
    }
    for step, killed in victims.items():
        mark = training_.out / f"saving-{step}-0"
        training_.until(f"save {step}", mark.exists)
        for node, kind in killed:
            node.kill(kind)
            time.sleep(0.05)


def test_dcp_save_of_two_nodes_is_committed_by_its_metadata(run: Run, plain, tmp_path: Path):
    """I1, I5, I8: two torchrun agents; visible whole, loadable without ckptgate, the same state."""
    plain_run, expected = plain
    with Observer(run.places) as observer:
        with training(tmp_path / "out", run.paths, "--pause", "0.5", agents=2) as job:
            job.ends_well()
        run.check(plain_run)
    assert job.final() == expected
    assert run.committed() == ["step-2.0", "step-4.0", "step-6.0"]
    assert sorted(observer.seen) == STEPS
    observer.check(run)


@pytest.mark.parametrize(
    ("mode", "is_killing"),
    [
        pytest.param("async", True, marks=pytest.mark.full),
        pytest.param("async", False, marks=pytest.mark.full),
        pytest.param("save", True, marks=pytest.mark.full),
    ],
)
def test_a_run_does_not_notice_killed_daemons(
    run: Run, plain, tmp_path: Path, mode: str, is_killing: bool
):
    """I8, I10, I11: kill -9 of mount and publisher on both nodes in the middle of saves."""
    plain_run, expected = plain
    words = ["--mode", mode, "--pause", "1", "--slow", "0.03"]
    with Observer(run.places) as observer:
        with training(tmp_path / "out", run.paths, *words) as job:
            if is_killing:
                kill_in_saves(job, run.c)
            job.ends_well()
        run.check(plain_run)
    assert job.final() == expected
    assert run.committed() == ["step-2.0", "step-4.0", "step-6.0"]
    observer.check(run)


def test_a_rank_killed_in_a_save_leaves_nothing_to_see(run: Run, plain, tmp_path: Path):
    """I4, I8: `latest` stays; the restarted job resumes from it and ends in the same state."""
    plain_run, expected = plain
    with Observer(run.places) as observer:
        words = ["--kill-rank", "2", "--kill-step", "4"]
        with training(tmp_path / "killed", run.paths, *words) as job:
            assert job.wait() != 0
        until("step-2", lambda: run.committed() == ["step-2.0"])
        for place in run.places:
            until(f"latest in {place}", partial(is_latest, place, "step-2"))
        time.sleep(1.5)  # longer than anything waits that could still commit
        for place in (run.stored, *run.seen):
            assert sorted(set(os.listdir(place)) - {".ckptgate"}) == ["latest", "step-2"]
            assert os.readlink(place / "latest") == "step-2"
        assert list(observer.seen) == ["step-2"]
        with training(tmp_path / "again", run.paths) as again:
            again.ends_well()
        run.check(plain_run)
    assert again.resumed_after() == {2}
    assert again.final() == expected
    assert run.committed() == ["step-2.0", "step-4.1", "step-6.0"]
    assert writers(load(run.stored / "step-2")) != writers(load(run.stored / "step-4"))
    observer.check(run)


@pytest.mark.full
def test_a_restarted_job_waits_for_a_sealed_checkpoint(run: Run, plain, tmp_path: Path):
    """I12: its predecessor's last one is sealed, but not committed; it is what it resumes from."""
    plain_run, expected = plain
    one, two, _ = run.c.nodes
    with Observer(run.places) as observer:
        with training(tmp_path / "first", run.paths, "--steps", "4", "--pause", "2") as job:
            job.until("step-2", lambda: (run.stored / "step-2").is_dir())
            publisher = two.child("publisher")
            os.kill(publisher, signal.SIGSTOP)
            try:
                job.ends_well()
                until("the SEAL", lambda: len(run.entries("SEAL")) == 2)
                with training(tmp_path / "second", run.paths) as again:
                    line = f"resume-waits run={run.stored.name!r} for=step-4.0"
                    again.until("the wait", lambda: line in one.log())
                    assert run.committed() == ["step-2.0"]
                    os.kill(publisher, signal.SIGCONT)
                    again.ends_well()
            finally:
                os.kill(publisher, signal.SIGCONT)
        run.check(plain_run)
    assert again.resumed_after() == {4}
    assert again.final() == expected
    assert run.committed() == ["step-2.0", "step-4.0", "step-6.0"]
    observer.check(run)
