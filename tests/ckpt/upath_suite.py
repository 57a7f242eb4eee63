"""universal_pathlib's own tests of a path that is read and written, on `ckpt://`.

Collected by `test_universal_pathlib.py` alone, in an interpreter that finds the release's source
with its tests before what is installed. `OPTIONS_OF_TEST` has the file system's options.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from upath import UnsupportedOperation, UPath
from upath.tests.cases import BaseTests

OPTIONS = json.loads(os.environ["OPTIONS_OF_TEST"])


@pytest.fixture
def local_testdir(tmp_path: Path) -> str:
    """What is under test, as local files."""
    (tmp_path / "folder1").mkdir()
    for name in ("file1.txt", "file2.txt"):
        (tmp_path / "folder1" / name).write_text(name)
        (tmp_path / name).write_text("hello world")
    return str(tmp_path)


@pytest.fixture
def pathlib_base(local_testdir: str) -> Path:
    """The same."""
    return Path(local_testdir)


@pytest.fixture
def clear_fsspec_memory_cache() -> Iterator[None]:
    """Nothing stays in memory."""
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


class TestOutsideOfCheckpoints(BaseTests):  # type: ignore[misc]
    path: UPath

    @pytest.fixture(autouse=True, name="path")
    def _path(self) -> None:
        self.path = UPath(f"ckpt://plain-{uuid.uuid4().hex}", **OPTIONS)
        self.prepare_file_system()

    def test_is_correct_class(self) -> None:
        assert self.path.protocol == "ckpt"

    @pytest.mark.parametrize("is_text", [True, False], ids=["str_absolute", "self_upath_absolute"])
    def test_rename_with_target_absolute(self, is_text: bool) -> None:
        """Those that say their protocol. (As with its WebDAV, no other name is an absolute one.)"""

        def target(path: Any, name: str) -> Any:
            found = path.absolute().joinpath(name)
            return found.as_posix() if is_text else found

        super().test_rename_with_target_absolute(target)

    @pytest.mark.parametrize("kind", [UPath, Path])
    def test_a_target_that_does_not_say_its_protocol_is_refused(self, kind: Any) -> None:
        source = self.path / "folder1/file2.txt"
        with pytest.raises(UnsupportedOperation):
            source.rename(kind((self.path / "renamed.txt").path))
        assert source.exists()


class TestInACheckpoint(TestOutsideOfCheckpoints):
    @pytest.fixture(autouse=True, name="path")
    def _path(self) -> None:
        self.path = UPath(f"ckpt://run/step-{uuid.uuid4().hex}", **OPTIONS)
        self.prepare_file_system()
