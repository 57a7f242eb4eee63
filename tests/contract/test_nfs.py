"""The directory store on real NFS, with two client machines and default mount options."""

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

CHECKS = [
    "one-creator-wins",
    "records-are-fresh",
    "directories-are-fresh",
    "publications-are-fresh",
    "publishers-agree",
]


def test_the_contract_holds_between_two_machines_on_nfs(run_in_guest: RunInGuest) -> None:
    """I2, I7, I8, I10 where a store is really shared."""
    done = run_in_guest(CONTRACT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[3-9][0-9] passed", done.stdout), done.stdout


@pytest.mark.parametrize("version", ["4.2", pytest.param("3", marks=pytest.mark.full, id="3")])
def test_what_one_machine_stores_another_sees_at_once(
    run_in_guest: RunInGuest, version: str
) -> None:
    """I2, I5, I7, I8: racing creators have one winner, and no client cache answers."""
    done = run_in_guest(TWO_MACHINES, nfs_options=f"vers={version}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line in CHECKS] == CHECKS
