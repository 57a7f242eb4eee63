"""Directories of tests in memory: for those that sync thousands of files and aren't about a disk.

A conftest imports the fixtures for all tests below it. Where the system has no tmpfs with room,
they are on the disk as usual.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

__all__ = ["disk_path", "tmp_path", "tmp_path_factory"]

MEMORY: Final = "/dev/shm"
ROOM_BYTES: Final = 1 << 30


class Directories:
    """What of pytest's factory of directories these tests use."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def mktemp(self, name: str) -> Path:
        """A new directory; its name begins with *name*."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._base))


@pytest.fixture(scope="session")
def tmp_path_factory() -> Iterator[Directories]:
    """Removed with all that was made in it when the worker ends."""
    base = Path(tempfile.mkdtemp(prefix="ckptgate-tests-", dir=_place()))
    yield Directories(base)
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def tmp_path(tmp_path_factory: Directories) -> Iterator[Path]:
    """A new directory, removed when the test has ended."""
    path = tmp_path_factory.mktemp("test")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A new directory that isn't in memory, for the guests: they have a /dev/shm of their own."""
    with tempfile.TemporaryDirectory(prefix="ckptgate-test-") as name:
        yield Path(name)


def _place() -> str | None:
    try:
        room = os.statvfs(MEMORY)
    except OSError:
        return None
    has_room = room.f_bavail * room.f_frsize >= ROOM_BYTES and os.access(MEMORY, os.W_OK)
    return MEMORY if has_room else None
