"""Trainings with native hooks, disturbed in a save, on two nodes' mounts; see `matrix`.

Needs `pip install --group frameworks`.
"""

from __future__ import annotations

import pytest
from tests.frameworks.cases import HOOKED, check, prepared
from tests.frameworks.matrix import FAULTS

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module", params=HOOKED)
def made(request, require, tmp_path_factory):
    with prepared(request.param, require, tmp_path_factory) as cases:
        yield cases


@pytest.mark.parametrize("fault", FAULTS)
def test_only_whole_checkpoints_are_seen_and_recorded_and_the_training_goes_on(made, fault):
    """I4, I8, I12"""
    check(made, fault)
