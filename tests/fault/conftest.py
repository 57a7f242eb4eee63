"""These tests sync thousands of files, and few are about a disk: they have theirs in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fault.posix_breaker import RUN, Breaker, rich_checkpoint, snapshot
from tests.in_memory import disk_path, tmp_path, tmp_path_factory

from ckptgate_adapters.posix_store import PosixStore

__all__ = ["disk_path", "tmp_path", "tmp_path_factory"]


@pytest.fixture
def breaker(monkeypatch: pytest.MonkeyPatch) -> Breaker:
    return Breaker(monkeypatch)


@pytest.fixture
def tmpfs(tmp_path: Path, require: Callable[[object, str], None]) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0777", "ckptgate-test", str(place)]
    done = subprocess.run(mounting, capture_output=True, check=False)
    require(done.returncode == 0, "mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, ...]]:
    """The tree as a publication without any fault makes it."""
    base = tmp_path_factory.mktemp("reference")
    (base / "store").mkdir()
    store = PosixStore(str(base / "store"))
    store.publish(RUN, *rich_checkpoint(store, base / "spool"))
    return snapshot(base / "store" / RUN / "step-1")
