"""A hypothesis state machine: real mounts against plain directories. See `machine`.

Each day explores other examples, the same all day: CKPTGATE_SEED repeats a day's. A failure prints
what was done as calls with their answers. Nothing is shrunk: what needs its moment does not come
again when it is repeated.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.e2e.harness import cluster
from tests.statemachine.machine import Machine, Stage

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

DAY = int(os.environ.get("CKPTGATE_SEED") or datetime.datetime.now(datetime.UTC).toordinal())


@pytest.fixture(scope="module")
def stage(require, tmp_path_factory) -> Iterator[Stage]:
    """Two nodes and the processes on them."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    base = tmp_path_factory.mktemp("machine")
    (base / "model").mkdir()
    with cluster(base, nodes=2) as pair:
        made = Stage(pair, base / "model")
        try:
            yield made
        finally:
            made.stop()


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        (4, 25),
        pytest.param(300, 50, marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
    ],
)
def test_two_mounts_are_like_plain_directories(stage: Stage, examples: int, steps: int):
    """I8, I10, I11: whatever is done, killed and committed."""
    print(f"CKPTGATE_SEED={DAY}")
    run_state_machine_as_test(
        seed(DAY)(type("TwoMounts", (Machine,), {"stage": stage})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
    print(dict(stage.counts))
    assert stage.counts["commit"] >= examples
    assert stage.counts["move"] >= examples
