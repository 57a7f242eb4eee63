"""Shared by all tests: what to do where a facility is missing."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytest.register_assert_rewrite("ckptgate.testing")


@pytest.fixture(scope="session")
def require() -> Callable[[object, str], None]:
    """`require(condition, reason)`: skip where a facility is missing, but fail in CI."""

    def check(condition: object, reason: str) -> None:
        if condition:
            return
        if os.environ.get("CI") == "true":
            pytest.fail(f"missing in CI: {reason}", pytrace=False)
        pytest.skip(reason)

    return check
