"""`ckpt://` on a bucket of SeaweedFS, with no mount anywhere."""

from __future__ import annotations

import json

import fsspec
import pytest
from tests.ckpt.places import Place, placed
from tests.ckpt.test_torch import finish, start
from tests.e2e.buckets import environment
from tests.e2e.harness import until


@pytest.fixture
def bucket_place(bucket, tmp_path, monkeypatch):
    """A prefix of a bucket, and a spool."""
    for name, value in environment(bucket).items():
        monkeypatch.setenv(name, value)
    with placed(tmp_path, store=bucket.below("ckpts").url, env=environment(bucket)) as made:
        yield made


def test_a_checkpoint_comes_to_the_bucket_whole_and_back_verified(
    bucket, bucket_place, tmp_path_factory
):
    fs = bucket_place.fs()
    with fs.open("run/step-1/a.bin", "wb") as file:
        file.write(b"a" * 3_000_000)
    with pytest.raises(KeyError), fs.open("run/step-1/b.bin", "wb") as file:
        file.write(b"half")
        raise KeyError
    fs.commit("run/step-1")
    fs.wait("run/step-1", 60)
    manifest = "run/step-1/.ckptgate/manifest.json"
    below = bucket.below("ckpts")
    until("the publication", lambda: manifest in below.keys(manifest), 30)
    entries = json.loads(below.read(manifest))["entries"]
    assert [entry["path"] for entry in entries] == ["a.bin"]
    assert below.read(f"run/{entries[0]['key']}") == b"a" * 3_000_000
    bucket_place.end()
    # Another machine's spool: nothing is there yet.
    other = Place.make(
        tmp_path_factory.mktemp("other"), store=bucket_place.store, env=bucket_place.env
    )
    try:
        with other.fs().open("run/step-1/a.bin") as file:
            assert not file.is_complete
            file.seek(1_000_000)
            assert file.read(10) == b"a" * 10
            file.seek(0)
            assert file.read() == b"a" * 3_000_000
        assert other.fs().cat_ranges(["run/step-1/a.bin"] * 2, [0, 5], [2, 9]) == [b"aa", b"aaaa"]
    finally:
        other.end()


def test_a_plain_file_that_only_the_bucket_has_is_read_in_ranges(bucket, bucket_place):
    data = bytes(range(256)) * 20_000
    bucket.below("ckpts").put("data/table.bin", data)
    fs = bucket_place.fs()
    assert fs.info("data/table.bin")["size"] == len(data)
    with fs.open("data/table.bin", "rb", cache_type="readahead", block_size=1 << 20) as file:
        file.seek(3_000_000)
        assert file.read(1000) == data[3_000_000:3_001_000]
    assert fs.cat_file("data/table.bin", -10) == data[-10:]
    assert fs.cat("data/table.bin") == data


@pytest.mark.full
def test_a_durable_file_is_in_the_bucket_when_its_close_returns(bucket, bucket_place):
    fs = bucket_place.fs(durable=True)
    fs.pipe("notes/a.txt", b"kept")
    assert bucket.below("ckpts").read("notes/a.txt") == b"kept"


@pytest.mark.full
def test_the_chained_form_names_the_bucket(bucket, bucket_place):
    options = {k: v for k, v in bucket_place.options.items() if k != "store"}
    fs, path = fsspec.core.url_to_fs(f"ckpt://run::{bucket_place.store}", ckpt=options)
    assert path == "run"
    fs.pipe("run/step-1/a.bin", b"a")
    fs.commit("run/step-1")
    fs.wait("run/step-1", 60)
    assert bucket_place.fs().cat("run/step-1/a.bin") == b"a"


@pytest.mark.full
@pytest.mark.torch
def test_four_ranks_save_by_dcp_and_go_on_after_one_was_killed(bucket_place):
    fs = bucket_place.fs()
    finish(start(bucket_place, "ckpt://run/step-1", 4, "save", "s3-1"))
    ranks = start(bucket_place, "ckpt://run/step-2", 4, "die", "s3-2")
    assert ranks[1].wait(150) != 0
    for process in ranks:
        process.kill()
        process.communicate()
    finish(start(bucket_place, "ckpt://run/step-1", 4, "load", "s3-3"))
    assert not fs.exists("run/step-2")
    finish(start(bucket_place, "ckpt://run/step-2", 4, "save", "s3-3"))
    until("the commit", lambda: fs.exists("run/step-2/.metadata"), 90)
    finish(start(bucket_place, "ckpt://run/step-2", 4, "load", "s3-4"))
