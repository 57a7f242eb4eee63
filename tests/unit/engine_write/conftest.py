"""A cluster for each test, and DCP's own files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine_harness import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a real DCP shard."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save({"w": torch.arange(100.0)}, checkpoint_id=str(folder), no_dist=True)
    return (folder / "__0_0.distcp").read_bytes()


@pytest.fixture(scope="session")
def dcp_metadata(shard: bytes) -> bytes:
    """A `.metadata` that names a shard of each of two ranks."""
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    storage = {
        metadata.MetadataIndex(f"w{rank}"): filesystem._StorageInfo(
            f"__{rank}_0.distcp", 0, len(shard)
        )
        for rank in (0, 1)
    }
    return pickle.dumps(metadata.Metadata(state_dict_metadata={}, storage_data=storage))
