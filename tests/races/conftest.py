"""Two nodes that mount one store, shared by a module's tests, and a fresh run for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, cluster, until
from tests.races.kit import Run


@pytest.fixture(scope="module")
def pair(require, tmp_path_factory) -> Iterator[Cluster]:
    """Two nodes for a whole module."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    with cluster(tmp_path_factory.mktemp("pair"), nodes=2) as made:
        yield made


@pytest.fixture
def run(pair: Cluster) -> Run:
    """A new run directory of this test, seen by both nodes."""
    here, there = (node.mnt for node in pair.nodes)
    name = f"run{sum(1 for _ in here.iterdir())}"
    (here / name).mkdir()
    until("the run on the other node", (there / name).is_dir)
    return Run(pair, Path(here / name), Path(there / name))
