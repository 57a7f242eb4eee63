"""Exports to a bucket: copied by the service where it has both, else sent; verified."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.s3.servers import Bucket
from tests.unit.engine.kit import Node

from ckptgate.engine.export_objects import export_objects
from ckptgate.engine.manifests import load_manifest
from ckptgate.errors import IntegrityError, RefusedError, TransientStoreError
from ckptgate.ports.store import Store
from ckptgate_adapters.posix_store import PosixStore
from ckptgate_adapters.s3_store import S3Options, S3Store
from ckptgate_adapters.s3_store.exporting import S3ExportTarget

FILES = {"a": os.urandom(6_000_000), "sub/b": b"beta", "sub/empty": b"", "odd ü&+%.bin": b"x"}


@pytest.fixture(params=["same service", "directory"])
def saved(request, bucket: Bucket, tmp_path: Path) -> Iterator:
    """A committed checkpoint somewhere else than in `out`: (its store, its manifest)."""
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        store: Store = PosixStore(str(tmp_path / "store"))
    else:
        store = S3Store(f"{bucket.url}/ckpts", options(bucket))
    node = Node(store, tmp_path / "spools", "a")
    row = node.save("step-1", FILES)
    view = node.logs.get("run").state.attempts[row.attempt]
    yield store, load_manifest(store, "run", row.attempt, view.manifest)
    node.spool.close()
    store.close()


@pytest.fixture
def target(bucket: Bucket) -> Iterator[S3ExportTarget]:
    made = S3ExportTarget(f"{bucket.url}/out", options(bucket))
    yield made
    made.close()


def options(bucket: Bucket) -> S3Options:
    return S3Options(endpoint_url=bucket.server.endpoint)


def files_in(out: Bucket) -> dict[str, bytes]:
    return {key: out.read(key) for key in out.keys("") if not key.endswith("/")}


def export(saved, target, *, may_replace: bool = False):
    store, manifest = saved
    return export_objects(store, "run", manifest, target, may_replace=may_replace)


def test_all_files_are_there_under_their_own_names(saved, target, bucket: Bucket):
    report = export(saved, target)
    assert files_in(bucket.below("out")) == FILES
    assert (report.files, report.size_bytes, report.kept) == (4, 6_000_005, 0)
    assert bucket.uploads() == []
    assert export(saved, target).kept == 4


def test_a_place_that_holds_something_is_refused_unless_that_was_asked_for(
    saved, target, bucket: Bucket
):
    out = bucket.below("out")
    out.put("a", b"mine")
    out.put("other", b"mine")
    with pytest.raises(RefusedError, match="not empty"):
        export(saved, target)
    assert files_in(out) == {"a": b"mine", "other": b"mine"}
    export(saved, target, may_replace=True)
    assert files_in(out) == FILES


@pytest.mark.parametrize("place", ["theirs", "theirs/run", "theirs/run/step-9/sub"])
def test_nothing_of_ckptgates_is_ever_replaced(saved, bucket: Bucket, place: str):
    """I9: who says `--overwrite` doesn't mean a store, a run, or a published checkpoint."""
    theirs = bucket.below("theirs")
    theirs.put("run/.ckptgate/log/0000000000.json", b"{}")
    theirs.put("run/step-9/.ckptgate/manifest.json", b"{}")
    target = S3ExportTarget(f"{bucket.url}/{place}", options(bucket))
    with contextlib.closing(target), pytest.raises(RefusedError, match="is ckptgate's"):
        export(saved, target, may_replace=True)
    assert sorted(theirs.keys("")) == [
        "run/.ckptgate/log/0000000000.json",
        "run/step-9/.ckptgate/manifest.json",
    ]


def test_an_interrupted_one_goes_on_where_it_ended(saved, target, bucket: Bucket, monkeypatch):
    copy, put = target.copy, target.put

    def broken_copy(store, key, manifest, entry):
        if entry.path == "sub/b":
            raise TransientStoreError("no answer")
        return copy(store, key, manifest, entry)

    def broken_put(source, manifest, entry):
        if entry.path == "sub/b":
            raise TransientStoreError("no answer")
        put(source, manifest, entry)

    monkeypatch.setattr(target, "copy", broken_copy)
    monkeypatch.setattr(target, "put", broken_put)
    with pytest.raises(TransientStoreError):
        export(saved, target)
    monkeypatch.undo()
    out = bucket.below("out")
    brought = set(files_in(out))
    assert "a" in brought
    assert "sub/b" not in brought
    assert export(saved, target).kept == len(brought)
    assert files_in(out) == FILES


def test_stored_bytes_that_are_not_the_manifests_are_refused(saved, target, bucket: Bucket):
    """I13."""
    store, manifest = saved
    (entry,) = [entry for entry in manifest.entries if entry.path == "sub/b"]
    if isinstance(store, S3Store):
        bucket.put(f"ckpts/run/{entry.key}", b"bete")
    else:
        path = Path(store.url.removeprefix("file://")) / "run" / entry.key
        path.chmod(0o600)
        path.write_bytes(b"bete")
    with pytest.raises(IntegrityError, match="digest"):
        export(saved, target)
    assert "sub/b" not in bucket.below("out").keys("")
