"""The store on S3 keeps the store's contract: on SeaweedFS, and on ministack.

SeaweedFS keeps neither a directory's metadata nor a backslash in a key, and goes on listing
directories in which nothing is any more; ministack is right there. The first checks checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.s3.connected import Connected, connected
from tests.s3.servers import Server

from ckptgate.model.documents import encode
from ckptgate.ports.store import Store
from ckptgate.testing.samples import MTIME_NS, manifest_of, sample_checkpoint, write_file
from ckptgate.testing.store_contract import StoreContract

RUN = "exp/run-7"


@pytest.fixture(scope="module")
def on_seaweed(seaweed: Server) -> Iterator[Connected]:
    with connected(seaweed) as made:
        yield made


@pytest.fixture(scope="module")
def on_ministack(mini: Server) -> Iterator[Connected]:
    with connected(mini) as made:
        yield made


class S3Contract(StoreContract):
    """Published without plain copies."""

    shows_files = False
    keeps_trees = False
    plain_copy = False
    connection: Connected

    def make_place(self, tmp_path: Path) -> str:
        return self.connection.place()

    def make_store(self, place: str) -> Store:
        return self.connection.store(place, plain_copy=self.plain_copy)


class TestS3Store(S3Contract):
    """On SeaweedFS, where racing conditional requests take about a second each."""

    race_rounds = 3
    keeps_directory_modes = False
    forgets_directories = False

    @pytest.fixture(autouse=True)
    def _on(self, on_seaweed: Connected) -> None:
        self.connection = on_seaweed

    def test_what_differs_in_a_published_directory_is_named(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I13: without plain copies nothing but the manifest is published."""
        manifest, data = sample_checkpoint(store, tmp_path, RUN, a=b"1", b=b"2")
        (problem,) = store.published_problems(RUN, manifest, data)
        assert problem == "step-1: the published directory is not there"
        store.publish(RUN, manifest, data)
        assert store.published_problems(RUN, manifest, data) == []
        local = write_file(tmp_path / "spool" / "f", b"theirs")
        for name in ("a", "sub/x", "sub/y"):
            other.plain_put(f"{RUN}/step-1/{name}", local, mode=0o644, mtime_ns=MTIME_NS)
        other.create(f"{RUN}/step-1/.ckptgate/more", b"x")
        changed = encode(manifest_of(RUN, "step-1", "step-1.0", manifest.entries[1:]))
        assert store.published_problems(RUN, manifest, changed) == [
            "step-1/.ckptgate/manifest.json: not as published",
            "step-1/.ckptgate/more: published by others",
            "step-1/a: published, but not in the manifest",
            "step-1/sub: published, but not in the manifest",
        ]


class TestS3StoreWithPlainCopies(S3Contract):
    """On ministack: its keys are what they are, its directories have metadata."""

    shows_files = True
    plain_copy = True

    @pytest.fixture(autouse=True)
    def _on(self, on_ministack: Connected) -> None:
        self.connection = on_ministack
