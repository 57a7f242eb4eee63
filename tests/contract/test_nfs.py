"""The store and the engine on real NFS, with two client machines and default mount options."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.contract.conftest import RunInGuest

pytestmark = [pytest.mark.nfs, pytest.mark.slow]

CONTRACT = """
export CKPTGATE_TEST_STORE_ROOT=/mnt/client1 CKPTGATE_TEST_SECOND_ROOT=/mnt/client2
exec $PYTHON -m pytest -p no:cacheprovider -q --basetemp=/run/pytest \\
    --durations=12 $REPOSITORY/tests/contract/test_posix_store.py
"""

TWO_MACHINES = """
exec $PYTHON $REPOSITORY/tests/contract/nfs/two_machines.py /mnt/client1 /mnt/client2
"""

TWO_PUBLISHERS = """
export PYTHONPATH=$REPOSITORY
exec $PYTHON $REPOSITORY/tests/contract/nfs/two_publishers.py \\
    /mnt/client1 /mnt/client2 /mnt/export
"""

CHECKS = [
    "one-creator-wins",
    "records-are-fresh",
    "directories-are-fresh",
    "publications-are-fresh",
    "publishers-agree",
]

COMMITS = [
    "explicit-commits-agree",
    "a-rename-commits-both",
    "killed-publishers-finish",
    "changed-bytes-are-refused",
]


def test_the_contract_holds_between_two_machines_on_nfs(run_in_guest: RunInGuest) -> None:
    """I2, I7, I8, I10 where a store is really shared."""
    done = run_in_guest(CONTRACT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[3-9][0-9] passed", done.stdout), done.stdout


@pytest.mark.full
@pytest.mark.parametrize("version", ["4.2", "3"])
def test_what_one_machine_stores_another_sees_at_once(
    run_in_guest: RunInGuest, version: str
) -> None:
    """I2, I5, I7, I8: racing creators have one winner, and no client cache answers."""
    done = run_in_guest(TWO_MACHINES, nfs_options=f"vers={version}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line in CHECKS] == CHECKS


@pytest.mark.parametrize("version", ["4.2", pytest.param("3", marks=pytest.mark.full, id="3")])
def test_two_machines_commit_together(run_in_guest: RunInGuest, version: str) -> None:
    """I1, I8, I10, I12: ranks on both, a publisher killed in the middle, verified reads."""
    done = run_in_guest(TWO_PUBLISHERS, nfs_options=f"vers={version}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line in COMMITS] == COMMITS
