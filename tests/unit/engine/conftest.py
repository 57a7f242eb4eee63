"""Fixtures of the engine's tests: a store (in memory and on disk) and nodes on it."""

from __future__ import annotations

import pytest
from tests.unit.engine import kit
from tests.unit.engine.kit import CHUNK, Node

from ckptgate.engine import chunks, fetch, ranges, readahead
from ckptgate.model import documents, ids
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


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 KiB, so that small files have several."""
    for module in (ids, documents, fetch, chunks, readahead, kit):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ranges, "PIECE_BYTES", 1000)
    assert ids.chunk_count(CHUNK + 1) == 2
