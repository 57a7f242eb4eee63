"""Publishing by the directory store under failing calls and crashes: the new tree, or the old."""

from __future__ import annotations

import contextlib
import errno
import os
from itertools import count
from pathlib import Path

import pytest
from tests.fault.posix_breaker import (
    RUN,
    Breaker,
    check_kept,
    occupy,
    rich_checkpoint,
    snapshot,
)

from ckptgate.errors import (
    CkptError,
)
from ckptgate.model.documents import (
    PointerKind,
    PointerValue,
)
from ckptgate.testing.faults import CrashError
from ckptgate_adapters.posix_store import PosixStore, syscalls


@pytest.mark.parametrize("by", ["nothing", "older", "foreign"])
@pytest.mark.parametrize("when", ["crash", "crash-after"])
def test_a_crash_at_any_point_of_publishing_ends_in_the_same_tree(
    breaker: Breaker, tmp_path: Path, wanted: dict[str, tuple[object, ...]], by: str, when: str
) -> None:
    """I8, I10: a reader sees one attempt or none, and publishing again reaches the same result."""
    for at in count(1):
        base = tmp_path / f"{at}"
        (base / "store").mkdir(parents=True)
        root = base / "store"
        store = PosixStore(str(root))
        breaker.set(at=0)
        occupy(store, root, base / "old", by)
        manifest, data = rich_checkpoint(store, base / "spool")
        place = root / RUN / "step-1"
        before = snapshot(place) if place.exists() else {}
        breaker.set(at=at, when=when)
        with contextlib.suppress(CrashError):
            store.publish(RUN, manifest, data)
        breaker.end()
        seen = snapshot(place) if place.exists() else {}
        assert seen in ({}, before, wanted), f"call {at} left a part of it"
        again = PosixStore(str(root))
        again.publish(RUN, manifest, data)
        assert snapshot(place) == wanted, f"after a crash at call {at}"
        assert os.listdir(root / RUN / ".ckptgate/attempts/step-1.1") == ["data"]
        check_kept(root, by)
        if not breaker.is_spent:
            assert at > 20
            return


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_publishing_is_right_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, wanted: dict[str, tuple[object, ...]], when: str, code: int
) -> None:
    """I6, I10: success is only said of the whole tree."""
    for at in count(1):
        base = tmp_path / f"{at}"
        (base / "store").mkdir(parents=True)
        root = base / "store"
        store = PosixStore(str(root))
        breaker.set(at=0)
        occupy(store, root, base / "old", "older")
        manifest, data = rich_checkpoint(store, base / "spool")
        place = root / RUN / "step-1"
        before = snapshot(place)
        breaker.set(at=at, when=when, code=code)
        try:
            store.publish(RUN, manifest, data)
        except CkptError:
            seen = snapshot(place) if place.exists() else {}
            assert seen in ({}, before, wanted), f"call {at} left a part of it"
        else:
            assert snapshot(place) == wanted, f"call {at} failed unnoticed"
        breaker.end()
        store.publish(RUN, manifest, data)
        assert snapshot(place) == wanted
        check_kept(root, "older")
        if not breaker.is_spent:
            return


def test_without_locks_a_tree_that_another_has_just_finished_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, tuple[object, ...]]
) -> None:
    """I8, I10: looking and moving are two calls; the other's whole publication falls between."""
    (tmp_path / "store").mkdir()
    root = tmp_path / "store"
    store, other = PosixStore(str(root)), PosixStore(str(root))
    occupy(store, root, tmp_path / "old", "older")
    manifest, data = rich_checkpoint(store, tmp_path / "spool")
    monkeypatch.setattr("ckptgate_adapters.posix_store.publication._try_lock", lambda fd: True)
    rename = syscalls.rename

    def late(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if new.startswith("replaced-"):
            monkeypatch.setattr(syscalls, "rename", rename)
            other.publish(RUN, manifest, data)
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(syscalls, "rename", late)
    store.publish(RUN, manifest, data)
    assert snapshot(root / RUN / "step-1") == wanted
    attempts = root / RUN / ".ckptgate/attempts"
    assert [path.name for path in (attempts / "step-1.1").iterdir()] == ["data"]
    assert len(list((attempts / "step-1.0").glob("replaced-*"))) == 1


@pytest.mark.parametrize("kind", list(PointerKind))
@pytest.mark.parametrize("when", ["before", "after", "crash", "crash-after"])
def test_a_pointer_has_its_old_or_its_new_value_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, when: str, kind: PointerKind
) -> None:
    """I10."""
    old = PointerValue(pointer="latest", kind=kind, target="step-1", content="step-1")
    new = PointerValue(pointer="latest", kind=kind, target="step-2", content="step-2")
    for at in count(1):
        root = tmp_path / f"{at}"
        root.mkdir()
        store = PosixStore(str(root))
        breaker.set(at=0)
        store.set_pointer(RUN, old)
        breaker.set(at=at, when=when)
        try:
            store.set_pointer(RUN, new)
        except (CkptError, CrashError):
            is_told = False
        else:
            is_told = True
        breaker.end()
        content = store.pointer_content(RUN, "latest")
        assert content in ({"step-2"} if is_told else {"step-1", "step-2"})
        store.set_pointer(RUN, new)
        assert store.pointer_content(RUN, "latest") == "step-2"
        assert [entry.name for entry in store.plain_list(RUN)] == ["latest"]
        if not breaker.is_spent:
            assert at > 3
            return
