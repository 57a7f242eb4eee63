"""fsspec's own suite for file systems, on a directory outside of checkpoints and in an open one.

All of it takes two minutes; of each kind of calls one place is in `make test`.
"""

from __future__ import annotations

import uuid

import pytest
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)


class _Fixtures(AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, place):
        return place.fs()

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_sanitize_path(self):
        return lambda path: path


class _Plain(_Fixtures):
    @pytest.fixture
    def fs_path(self, fs):
        path = f"plain-{uuid.uuid4().hex}"
        fs.mkdir(path)
        return path


class _Checkpoint(_Fixtures):
    @pytest.fixture
    def fs_path(self, fs):
        path = f"run/step-{uuid.uuid4().hex}"
        fs.mkdir(path)
        return path


@pytest.mark.full
class TestCopyPlain(AbstractCopyTests, _Plain):  # type: ignore[misc]
    pass


@pytest.mark.full
class TestGetPlain(AbstractGetTests, _Plain):  # type: ignore[misc]
    pass


@pytest.mark.full
class TestPutPlain(AbstractPutTests, _Plain):  # type: ignore[misc]
    pass


class TestPipePlain(AbstractPipeTests, _Plain):  # type: ignore[misc]
    pass


class TestOpenPlain(AbstractOpenTests, _Plain):  # type: ignore[misc]
    pass


@pytest.mark.full
class TestCopyCheckpoint(AbstractCopyTests, _Checkpoint):  # type: ignore[misc]
    pass


class TestGetCheckpoint(AbstractGetTests, _Checkpoint):  # type: ignore[misc]
    pass


@pytest.mark.full
class TestPutCheckpoint(AbstractPutTests, _Checkpoint):  # type: ignore[misc]
    pass


class TestPipeCheckpoint(AbstractPipeTests, _Checkpoint):  # type: ignore[misc]
    pass


class TestOpenCheckpoint(AbstractOpenTests, _Checkpoint):  # type: ignore[misc]
    pass
