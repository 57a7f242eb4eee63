"""A node's mount that the tests of one module share, and a run directory for each test.

And a store without a mount, for those of `ckpt://`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ckpt.places import Place, placed
from tests.e2e.harness import Cluster, cluster


@pytest.fixture(scope="module")
def one(require, tmp_path_factory) -> Iterator[Cluster]:
    """One node."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    with cluster(tmp_path_factory.mktemp("hooks")) as made:
        yield made


@pytest.fixture
def run(one: Cluster, request) -> Path:
    """A new run directory of this test in the mount."""
    number = sum(1 for _ in one.nodes[0].mnt.iterdir())
    path = one.nodes[0].mnt / f"run{number}"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A local store whose daemon the first use starts."""
    with placed(tmp_path_factory.mktemp("urls")) as made:
        yield made
