"""Holes stay holes in copies: a huge sparse file takes neither room nor time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptgate.errors import IntegrityError
from ckptgate.vfs.bytes import copy_file, data_ranges
from ckptgate_adapters.posix_store import PosixStore, syscalls
from ckptgate_adapters.posix_store.copying import copy_bytes

HUGE = 1 << 43
MIDDLE = 1 << 41


def unsupported(*args: object) -> int:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.fixture(params=["as it is", "through memory"])
def sparse(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 8 TiB with three pieces of data; on disks with reflinks these aren't used."""
    monkeypatch.setattr(syscalls, "clone", unsupported)
    monkeypatch.setattr("ckptgate.vfs.bytes._FICLONE", 0)
    if request.param == "through memory":
        monkeypatch.setattr(syscalls, "copy_range", unsupported)
        monkeypatch.setattr(os, "copy_file_range", unsupported)
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        stream.write(b"first" * 3000)
        stream.seek(MIDDLE + 5)
        stream.write(b"middle")
        stream.truncate(HUGE)
    return path


def check(copy: Path) -> None:
    """It is the same, and takes as little."""
    found = copy.stat()
    assert found.st_size == HUGE
    assert found.st_blocks * 512 < 1 << 20
    with copy.open("rb") as stream:
        assert stream.read(15_000) == b"first" * 3000
        assert stream.read(5) == bytes(5)
        stream.seek(MIDDLE)
        assert stream.read(15) == bytes(5) + b"middle" + bytes(4)
        stream.seek(HUGE - 4)
        assert stream.read() == bytes(4)


def test_a_live_file_comes_to_the_store_with_its_holes(sparse: Path, tmp_path: Path):
    root = tmp_path / "store"
    root.mkdir()
    PosixStore(str(root)).plain_put("runs/sparse", str(sparse), mode=0o600, mtime_ns=5)
    check(root / "runs" / "sparse")


def test_a_copy_in_the_spool_has_the_holes(sparse: Path, tmp_path: Path):
    fd = os.open(sparse, os.O_RDONLY)
    try:
        copy_file(fd, str(tmp_path / "copy"))
    finally:
        os.close(fd)
    check(tmp_path / "copy")


@pytest.mark.parametrize("value", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_holes_cannot_be_asked_for_all_is_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: int
):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)

    def refuse(*args: object) -> int:
        raise OSError(value, os.strerror(value))

    with path.open("rb") as stream:
        monkeypatch.setattr(os, "lseek", refuse)
        assert list(data_ranges(stream.fileno(), 100)) == [(0, 100)]


@pytest.mark.parametrize("left", [0, 50, 4096])
def test_a_source_that_was_cut_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int):
    monkeypatch.setattr(syscalls, "clone", unsupported)
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * left)
    with (
        source.open("rb") as stream,
        target.open("wb") as written,
        pytest.raises(IntegrityError, match=f"ends after {left} bytes"),
    ):
        copy_bytes(stream.fileno(), written.fileno(), 9000, "a")
