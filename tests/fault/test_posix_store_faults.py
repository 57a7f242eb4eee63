"""The directory store under failing system calls and crashes: records and data objects.

Every mutating call of the adapter goes through its module `syscalls`; here each one fails in turn,
before or after its effect, or ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path

import pytest
from tests.fault.posix_breaker import CODES, Breaker, each_fault, temps

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FullError,
    IntegrityError,
    MissingError,
    TransientStoreError,
    UnusableError,
)
from ckptgate.ports.store import VerifyMode
from ckptgate.testing.faults import CrashError
from ckptgate.testing.samples import digested
from ckptgate_adapters.posix_store import PosixStore, syscalls


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", CODES)
def test_create_is_right_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, when: str, code: int
) -> None:
    """I6: what a caller is told never contradicts what is stored; I10."""
    for root in each_fault(breaker, tmp_path, when, code):
        store = PosixStore(str(root))
        try:
            store.create("exp/log/0", b"record")
        except FullError:
            with pytest.raises(MissingError):
                store.get("exp/log/0")
        except (TransientStoreError, UnusableError):
            pass
        else:
            assert store.get("exp/log/0") == b"record"
        breaker.end()
        store.create("exp/log/0", b"record")
        assert store.get("exp/log/0") == b"record"
        assert store.children("exp/log") == ["0"]
        with pytest.raises(ExistsError):
            store.create("exp/log/0", b"another")


@pytest.mark.parametrize("when", ["crash", "crash-after"])
def test_create_leaves_all_or_nothing_when_the_process_dies(
    breaker: Breaker, tmp_path: Path, when: str
) -> None:
    """I10, I13: there is never a torn record."""
    for root in each_fault(breaker, tmp_path, when):
        with contextlib.suppress(CrashError):
            PosixStore(str(root)).create("exp/log/0", b"record")
        breaker.end()
        store = PosixStore(str(root))
        try:
            assert store.get("exp/log/0") == b"record"
        except MissingError:
            store.create("exp/log/0", b"the next process's")
            assert store.children("exp/log") == ["0"]


@pytest.mark.parametrize("may_link", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", CODES)
def test_put_is_right_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, when: str, code: int, may_link: bool
) -> None:
    """I1, I6."""
    local = tmp_path / "f"
    data = os.urandom(300_001)
    local.write_bytes(data)
    source = digested(str(local), may_link=may_link)
    for root in each_fault(breaker, tmp_path, when, code):
        store = PosixStore(str(root))
        try:
            store.put("exp/data/1", source)
        except IntegrityError:
            raise
        except CkptError:
            assert (
                not (root / "exp/data/1").exists() or store.read("exp/data/1", 0, 400_000) == data
            )
        else:
            store.verify("exp/data/1", source, VerifyMode.READBACK)
        breaker.end()
        store.put("exp/data/1", source)
        store.verify("exp/data/1", source, VerifyMode.READBACK)
        assert store.children("exp/data") == ["1"]
        assert local.read_bytes() == data


@pytest.mark.parametrize("name", ["write", "fsync", "close_written"])
def test_after_a_failed_fsync_the_bytes_are_written_again_under_another_name(
    breaker: Breaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """I11: the kernel tells of a lost page once, so the same file is never fsynced again."""
    monkeypatch.setattr(syscalls, "clone", _unsupported)
    monkeypatch.setattr(syscalls, "copy_range", _unsupported)
    local = tmp_path / "f"
    local.write_bytes(b"bytes" * 1000)
    store = PosixStore(str(tmp_path))
    store.create("d/first", b"the directory is there")
    breaker.set(at=0)
    source = digested(str(local))
    store.put("d/1", source)
    breaker.set(at=breaker.calls.index(name) + 1)
    store.put("d/2", source)
    calls = Counter(breaker.calls)
    assert calls["create_file"] == 2
    assert calls["fsync"] == {"write": 2, "fsync": 3, "close_written": 3}[name]
    store.verify("d/2", source, VerifyMode.READBACK)
    assert temps(tmp_path) == []


def test_when_a_linked_files_fsync_fails_only_bytes_with_the_right_digest_are_taken(
    breaker: Breaker, tmp_path: Path
) -> None:
    """I1: its pages may be lost, so it is copied and each byte is digested again."""
    local = tmp_path / "f"
    local.write_bytes(b"right")
    source = digested(str(local), may_link=True)
    store = PosixStore(str(tmp_path))
    store.create("d/first", b"the directory is there")
    breaker.set(at=0)
    store.put("d/1", source)
    at = breaker.calls.index("fsync") + 1
    breaker.set(at=at)
    store.put("d/2", source)
    assert (tmp_path / "d/2").stat().st_ino != local.stat().st_ino
    local.write_bytes(b"wrong")
    breaker.set(at=at)
    with pytest.raises(IntegrityError, match="no longer has the bytes"):
        store.put("d/3", source)
    assert store.children("d") == ["1", "2", "first"]


def test_a_store_that_always_fails_is_given_up_after_three_names(
    breaker: Breaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "f"
    local.write_bytes(b"bytes")
    store = PosixStore(str(tmp_path))
    store.create("d/first", b"the directory is there")
    breaker.set(at=0)
    monkeypatch.setattr(syscalls, "fsync", _broken)
    with pytest.raises(TransientStoreError):
        store.put("d/1", digested(str(local)))
    assert breaker.calls.count("create_file") == 3
    assert temps(tmp_path) == []


def _unsupported(*args: object) -> int:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _broken(*args: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
