"""torchsnapshot, disturbed in a save, on two nodes' mounts; see `matrix`.

Needs `pip install --group frameworks`.
"""

from __future__ import annotations

import pytest
from tests.frameworks.cases import check, prepared
from tests.frameworks.matrix import FAULTS

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module", params=["torchsnapshot"])
def made(request, require, tmp_path_factory):
    with prepared(request.param, require, tmp_path_factory) as cases:
        yield cases


@pytest.mark.parametrize("fault", FAULTS)
def test_only_whole_checkpoints_are_seen_and_the_training_goes_on(made, fault):
    """I8, I12"""
    check(made, fault)
