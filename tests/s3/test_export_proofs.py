"""A committed checkpoint is exported to a bucket under plain names, each file proved there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.s3.connected import Connected, connected
from tests.s3.servers import Server

from ckptgate.engine.export_objects import export_objects
from ckptgate.errors import IntegrityError, InvalidNameError, MissingError, UsageError
from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.layout import full_key
from ckptgate.ports.export import Exported
from ckptgate.ports.store import Store
from ckptgate.testing.samples import MTIME_NS, manifest_of, store_checkpoint
from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.s3_store import S3Options
from ckptgate_adapters.s3_store.exporting import S3ExportTarget

RUN = "exp/run-7"
FILES = {"model.pt": b"weights" * 1000, "sub/optim state.pt": b"state", "empty": b""}


@pytest.fixture(scope="module", params=["seaweed", "mini"])
def on(request: pytest.FixtureRequest) -> Iterator[Connected]:
    server: Server = request.getfixturevalue(request.param)
    with connected(server) as made:
        yield made


def checkpoint(store: Store, tmp_path: Path) -> Manifest:
    manifest, _ = store_checkpoint(store, RUN, "step-1.0", "step-1", str(tmp_path), FILES)
    more = [
        FileEntry(path="dir", type=EntryType.DIR, mode=0o750, mtime_ns=MTIME_NS),
        FileEntry(path="l", type=EntryType.SYMLINK, mode=0o777, mtime_ns=0, target="model.pt"),
    ]
    return manifest_of(RUN, "step-1", "step-1.0", (*manifest.entries, *more))


def target_at(on: Connected, url: str) -> S3ExportTarget:
    options = S3Options(endpoint_url=on.bucket.server.endpoint, path_style=True)
    target = S3ExportTarget(url, options)
    on.join(target._session)
    return target


def tree(on: Connected, url: str) -> dict[str, bytes]:
    start = url.removeprefix(f"{on.bucket.url}/") + "/"
    return {key[len(start) :]: on.bucket.read(key) for key in on.bucket.keys(start)}


WANTED = {**FILES, "dir/": b"", "l": b"model.pt"}


def test_the_service_copies_what_is_in_a_bucket_of_its_own(
    on: Connected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on.store(on.place())
    manifest = checkpoint(store, tmp_path)
    monkeypatch.setattr(store, "read_into", lambda *_: pytest.fail("the bytes came here"))
    url = on.place()
    target = target_at(on, url)
    size = sum(map(len, FILES.values()))
    done = export_objects(store, RUN, manifest, target, may_replace=False)
    assert done == Exported(files=3, size_bytes=size, kept=0)
    assert tree(on, url) == WANTED
    again = export_objects(store, RUN, manifest, target, may_replace=False)
    assert again == Exported(files=3, size_bytes=size, kept=3)
    start = url.removeprefix(f"{on.bucket.url}/")
    told = on.bucket.client.head_object(Bucket=on.bucket.name, Key=f"{start}/model.pt")
    assert told["Metadata"]["ckptgate-mode"] == "0644"


def test_damaged_bytes_are_never_exported(on: Connected, tmp_path: Path) -> None:
    """I13: with the key that is damaged, and nothing under its name."""
    for store in (MemoryStore(), on.store(on.place())):
        manifest = checkpoint(store, tmp_path)
        key = full_key(RUN, next(e.key for e in manifest.entries if e.path == "model.pt"))
        if isinstance(store, MemoryStore):
            store.tamper(key, b"Weights" * 1000)
        else:
            damaged: dict[str, Any] = {"Metadata": {"ckptgate-blake3": "0" * 64}}
            on.bucket.put(store.session.key(key), b"Weights" * 1000, **damaged)
        url = on.place()
        with pytest.raises(IntegrityError, match="digest"):
            export_objects(store, RUN, manifest, target_at(on, url), may_replace=False)
        assert "model.pt" not in tree(on, url)


def test_bytes_that_are_gone_are_named(on: Connected, tmp_path: Path) -> None:
    store = on.store(on.place())
    manifest = checkpoint(store, tmp_path)
    key = full_key(RUN, manifest.entries[1].key or manifest.entries[2].key)
    on.bucket.client.delete_object(Bucket=on.bucket.name, Key=store.session.key(key))
    with pytest.raises(MissingError, match="data/"):
        export_objects(store, RUN, manifest, target_at(on, on.place()), may_replace=False)


def test_a_name_that_is_no_key_there_is_told_before_anything_is_sent(
    on: Connected, tmp_path: Path
) -> None:
    """I13: whatever was there stays, even if it may be replaced."""
    store = MemoryStore()
    manifest = checkpoint(store, tmp_path)
    long = FileEntry(
        path="/".join(["n" * 204] * 5), type=EntryType.DIR, mode=0o755, mtime_ns=MTIME_NS
    )
    manifest = manifest_of(RUN, "step-1", "step-1.0", (*manifest.entries, long))
    url = on.place()
    start = url.removeprefix(f"{on.bucket.url}/")
    on.bucket.put(f"{start}/mine", b"mine")
    target = target_at(on, url)
    with pytest.raises(InvalidNameError, match=r"n' has [0-9]+ bytes, S3 takes 1024") as raised:
        export_objects(store, RUN, manifest, target, may_replace=True)
    assert raised.value.subject == long.path
    assert tree(on, url) == {"mine": b"mine"}


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/run/.ckptgate/x"])
def test_a_whole_bucket_and_the_gateways_own_place_are_no_destinations(url: str) -> None:
    with pytest.raises(UsageError):
        S3ExportTarget(url)
