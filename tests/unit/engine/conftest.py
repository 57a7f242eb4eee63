"""Fixtures of the engine's tests: a store (in memory and on disk) and nodes on it."""

from __future__ import annotations

import pytest
from tests.unit.engine.kit import Node

from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.posix_store import PosixStore


@pytest.fixture(params=["memory", "posix"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


@pytest.fixture
def make_node(store, tmp_path):
    made = []

    def make(host: str, *, on=None) -> Node:
        node = Node(on or store, tmp_path / "spools", host)
        made.append(node)
        return node

    yield make
    for node in made:
        node.spool.close()
