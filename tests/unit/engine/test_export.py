"""A committed checkpoint as a plain directory: whole and verified, or not there."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from tests.unit.engine.kit import Reads

from ckptgate.engine.export import export_directory, unfinished_name
from ckptgate.engine.manifests import load_manifest
from ckptgate.errors import (
    BusyError,
    FullError,
    IntegrityError,
    RefusedError,
    TransientStoreError,
    UnusableError,
)

FILES = {"a": b"alpha" * 1000, "sub/b": b"beta", "sub/deep/empty": b""}


@pytest.fixture
def saved(make_node):
    """A committed checkpoint: (its store, its manifest)."""
    node = make_node("a")
    row = node.save("step-1", FILES)
    view = node.logs.get("run").state.attempts[row.attempt]
    return node.store, load_manifest(node.store, "run", row.attempt, view.manifest)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "exports").mkdir()
    return tmp_path / "exports/step-1"


def files_in(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def export(saved, out: Path, *, store=None, may_replace: bool = False):
    real, manifest = saved
    return export_directory(store or real, "run", manifest, str(out), may_replace=may_replace)


def test_all_files_are_there_with_their_modes_and_times(saved, out: Path):
    report = export(saved, out)
    assert files_in(out) == FILES
    assert (report.files, report.size_bytes, report.kept) == (3, 5004, 0)
    for entry in saved[1].entries:
        stat = os.stat(out / entry.path)
        assert stat.st_mtime_ns == entry.mtime_ns
        assert stat.st_mode & 0o7777 == entry.mode
    assert os.listdir(out.parent) == ["step-1"]


def test_an_empty_directory_is_taken_and_anything_else_is_refused(saved, out: Path):
    out.mkdir()
    export(saved, out)
    assert files_in(out) == FILES
    with pytest.raises(RefusedError, match="is there and not empty") as caught:
        export(saved, out)
    assert "--overwrite" in caught.value.hint
    (out / "mine").write_bytes(b"mine")
    export(saved, out, may_replace=True)
    assert files_in(out) == FILES
    plain = out.parent / "file"
    plain.write_bytes(b"mine")
    with pytest.raises(RefusedError):
        export(saved, plain)
    assert plain.read_bytes() == b"mine"
    assert sorted(os.listdir(out.parent)) == ["file", "step-1"]


def test_nothing_of_ckptgates_is_ever_replaced_by_an_export(saved, out: Path):
    """I9: who says `--overwrite` doesn't mean a store, a run, or a published checkpoint."""
    store = out.parent / "store"
    for own in ("run/.ckptgate/log/0000000000.json", "run/step-9/.ckptgate/manifest.json"):
        (store / own).parent.mkdir(parents=True)
        (store / own).write_bytes(b"{}")
    before = files_in(store)
    for place in (store, store / "run", store / "run/step-9", store / "run/step-9/sub"):
        with pytest.raises(RefusedError, match="is ckptgate's"):
            export(saved, place, may_replace=True)
    assert files_in(store) == before
    assert os.listdir(out.parent) == ["store"]


def test_what_an_interrupted_try_had_brought_is_not_read_again(saved, out: Path):
    def fail_late(_offset, data):
        if data == b"beta":
            until_there(Path(unfinished_name(str(out))) / "a")
            raise TransientStoreError("no answer")
        return data

    def until_there(path: Path) -> None:
        deadline = time.monotonic() + 20
        while not path.exists() or path.stat().st_mtime_ns not in mtimes:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    mtimes = {entry.mtime_ns for entry in saved[1].entries}
    with pytest.raises(TransientStoreError):
        export(saved, out, store=Reads(saved[0], fail_late))
    assert not out.exists()
    again = Reads(saved[0])
    report = export(saved, out, store=again)
    assert files_in(out) == FILES
    assert report.kept >= 1
    # Of the two that hold something the one is there.
    assert len(again.calls) == 1


def test_what_another_attempt_left_is_no_part_of_it(saved, out: Path):
    building = Path(unfinished_name(str(out)))
    (building / "sub").mkdir(parents=True)
    (building / "sub/other").write_bytes(b"x")
    (building / "a").mkdir()
    (building / "a/x").write_bytes(b"x")
    (building / "sub/b").write_bytes(b"gamm")
    (building / "gone").symlink_to("/etc/passwd")
    report = export(saved, out)
    assert files_in(out) == FILES
    assert report.kept == 0


def test_bytes_that_are_not_the_manifests_are_never_put_in_place(saved, out: Path):
    """I13."""

    def flip(_offset, data):
        return data.replace(b"beta", b"bete")

    with pytest.raises(IntegrityError, match=r"sub/b: .* has digest"):
        export(saved, out, store=Reads(saved[0], flip))
    assert not out.exists()
    with pytest.raises(IntegrityError, match="ends at byte 3 of 4"):
        export(saved, out, store=Reads(saved[0], lambda _, data: data[:3]))
    assert not out.exists()


def test_two_exports_to_one_place_do_not_mix(saved, out: Path):
    building = unfinished_name(str(out))
    os.mkdir(building)
    fd = os.open(building, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(BusyError, match="another export"):
            export(saved, out)
    finally:
        os.close(fd)
    export(saved, out)
    assert files_in(out) == FILES


def test_a_place_that_cannot_be_written_is_named(saved, out: Path, monkeypatch):
    (out.parent / "nowhere").write_bytes(b"")
    with pytest.raises(UnusableError, match=r"cannot write .*nowhere"):
        export(saved, out.parent / "nowhere/step-1")

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FullError, match="no space for"):
        export(saved, out)
    assert not out.exists()
