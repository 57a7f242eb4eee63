"""fio writes in every way and finds each block again: sync, direct, queued, mapped, odd."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway

pytestmark = [pytest.mark.fuse]

JOBS = Path(__file__).with_name("verified.fio")


def _verified(directory: Path, size: str, work: Path) -> None:
    """Run all jobs in a fresh directory, as one job: fio gives each process its own session."""
    done = subprocess.run(
        ["sh", "-c", 'mkdir -p "$DIR" && exec fio --output-format=normal "$0"', JOBS],
        env=dict(os.environ, DIR=str(directory), SIZE=size, CKPTGATE_RUN_ID="fio"),
        # It leaves the states of its verifications where it is started.
        cwd=work,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    failed = [
        line for line in done.stdout.splitlines() if ": err=" in line and "err= 0" not in line
    ]
    problems = [line for line in done.stderr.splitlines() if "multiple writers" not in line]
    assert (done.returncode, failed) == (0, []), (problems, done.stdout[-3000:])


@pytest.mark.parametrize("name", ["step-1", "plain"])
def test_every_block_is_read_back_as_it_was_written(node: Gateway, name, require, tmp_path):
    require(shutil.which("fio"), "fio is not installed")
    _verified(node.mnt / f"short-{name}" / name, "1m", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["step-1", "plain"])
def test_large_files_are_read_back_as_they_were_written(node: Gateway, name, require, tmp_path):
    require(shutil.which("fio"), "fio is not installed")
    for number in range(3):
        _verified(node.mnt / f"long-{number}-{name}" / name, "32m", tmp_path)
