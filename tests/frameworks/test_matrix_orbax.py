"""Orbax, disturbed in a save, on two nodes' mounts; see `cases`.

Needs `pip install --group frameworks`.
"""

from __future__ import annotations

import pytest
from tests.frameworks.cases import Disturbed

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow, pytest.mark.full]


class TestOrbax(Disturbed):
    trainings = ("orbax", "orbax-file")
