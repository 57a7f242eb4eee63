"""Mounts that the tests of one module share, and a fresh run directory for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Cluster, Gateway, cluster
from tests.e2e.toy_mounts import Client, Toy, mounted


@pytest.fixture(scope="module")
def shared(require, tmp_path_factory, request) -> Iterator[Cluster]:
    """One node for a whole module; parametrise it indirectly with False for the fallback loop."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    is_passing = getattr(request, "param", True)
    config = f"passthrough = {'true' if is_passing else 'false'}\n{FAST}"
    with cluster(tmp_path_factory.mktemp("shared"), config=config) as made:
        yield made


@pytest.fixture
def node(shared: Cluster) -> Gateway:
    """The node of `shared`."""
    return shared.nodes[0]


@pytest.fixture
def run(node: Gateway, request) -> Path:
    """A new run directory of this test in the mount."""
    number = sum(1 for _ in node.mnt.iterdir())
    path = node.mnt / f"run{number}"
    path.mkdir()
    return path


@pytest.fixture(params=["checkpoint", "plain"])
def place(run: Path, request) -> Path:
    """A directory to work in: an open checkpoint, or a plain directory."""
    path = run / ("step-1" if request.param == "checkpoint" else "plain")
    path.mkdir()
    return path


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def other_client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture(params=["passthrough", "fallback", "partial"])
def toy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Toy]:
    options = {
        "passthrough": {},
        "fallback": {"passthrough": False},
        "partial": {"is_complete": False},
    }[request.param]
    with mounted(tmp_path, **options) as toy:
        yield toy


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Toy]:
    with mounted(tmp_path) as toy:
        yield toy


@pytest.fixture
def sticky(tmp_path: Path) -> Iterator[Toy]:
    """Names and attributes that the kernel keeps for an hour."""
    with mounted(tmp_path, timeout_s=3600.0) as toy:
        yield toy
