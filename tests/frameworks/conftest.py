"""A run of the unmodified trainer on a plain directory, and a cluster that runs share."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, cluster, until
from tests.frameworks.torch_job import training
from tests.frameworks.torch_seen import Run


@pytest.fixture(scope="session")
def has_torch(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    try:
        for name in ("safetensors.torch", "torch.distributed.checkpoint"):
            importlib.import_module(name)
    except ImportError as exc:
        require(False, str(exc))


@pytest.fixture(scope="session")
def plain(has_torch, tmp_path_factory) -> tuple[Path, list[str]]:
    """The run on a plain directory, and the digests that every run must end with."""
    base = tmp_path_factory.mktemp("plain")
    (base / "run").mkdir()
    with training(base / "out", [base / "run"]) as run:
        run.ends_well()
        return base / "run", run.final()


@pytest.fixture(scope="module")
def nodes(has_torch, tmp_path_factory) -> Iterator[Cluster]:
    """A started cluster for all tests here, each with a run of its own."""
    with cluster(tmp_path_factory.mktemp("nodes"), nodes=3) as c:
        yield c


@pytest.fixture
def run(nodes: Cluster, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A new run's directory; a failure shows the daemons' logs."""
    made = Run(nodes, hashlib.sha256(request.node.name.encode()).hexdigest()[:8])
    made.paths[0].mkdir()
    until("the run on the other nodes", lambda: all(path.is_dir() for path in made.seen))
    yield made
    print(nodes.logs())
