"""A store, a spool, and the daemon that the first use of `ckpt://` starts."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest
from tests.ckpt.places import Place, placed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A local store with a spool on the same disk."""
    with placed(tmp_path_factory.mktemp("ckpt")) as made:
        yield made


@pytest.fixture
def fs(place: Place) -> fsspec.AbstractFileSystem:
    """The file system on it."""
    return place.fs()


@pytest.fixture
def run(fs: fsspec.AbstractFileSystem, request: pytest.FixtureRequest) -> str:
    """A run's directory of this test's own."""
    path = f"run{len(fs.ls('', detail=False))}"
    fs.mkdir(path)
    return path
