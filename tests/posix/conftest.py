"""Mounts for real tools: one with kernel passthrough and one without, for a module's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Gateway


@pytest.fixture(scope="module", params=["passthrough", "loop"])
def node(request, require, tmp_path_factory) -> Iterator[Gateway]:
    """A mount."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    base = tmp_path_factory.mktemp(request.param)
    store = base / "store"
    store.mkdir()
    config = f"passthrough = {'true' if request.param == 'passthrough' else 'false'}\n{FAST}"
    made = Gateway(base, "node", store, config).start()
    try:
        yield made
    finally:
        made.destroy()


@pytest.fixture(params=["checkpoint", "plain"])
def place(node: Gateway, request) -> Path:
    """A fresh directory to work in: an open checkpoint, or a plain directory."""
    number = sum(1 for _ in node.mnt.iterdir())
    run = node.mnt / f"run{number}"
    run.mkdir()
    path = run / ("step-1" if request.param == "checkpoint" else "plain")
    path.mkdir()
    return path
