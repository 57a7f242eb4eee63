"""A spool for each test."""

from __future__ import annotations

import pytest
from tests.unit.sqlite_spool.kit import make


@pytest.fixture
def spool(tmp_path):
    opened = make(tmp_path / "spool")
    yield opened
    opened.close()
