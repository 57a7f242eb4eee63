"""`ckpt://` as a program uses it: files, checkpoints, what an exception means."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from tests.e2e.harness import until

import ckptgate


def test_a_checkpoint_is_written_committed_and_read(fs, place, run):
    with fs.open(f"{run}/step-1/model.bin", "wb") as file:
        file.write(b"weights")
    assert fs.state(f"{run}/step-1")["state"] == "open"
    fs.commit(f"{run}/step-1")
    fs.wait(f"{run}/step-1", 30)
    assert fs.cat(f"{run}/step-1/model.bin") == b"weights"
    published = Path(place.store, run, "step-1")
    until("the publication", published.exists)
    assert sorted(os.listdir(published)) == [".ckptgate", "model.bin"]


def test_urls_with_configured_options_mean_the_same(place, run, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "ckpt", place.options)
    with fsspec.open(f"ckpt://{run}/step-1/a.bin", "wb") as file:
        file.write(b"a")
    ckptgate.commit(f"ckpt://{run}/step-1")
    ckptgate.wait(f"ckpt://{run}/step-1", 30)
    with fsspec.open(f"ckpt://{run}/step-1/a.bin") as file:
        assert file.read() == b"a"


@pytest.mark.parametrize("directory", ["step-1", "plain"])
def test_an_exception_in_the_with_block_discards_what_was_written(fs, run, directory):
    path = f"{run}/{directory}/a.bin"
    fs.makedirs(f"{run}/{directory}")
    with pytest.raises(KeyError), fs.open(path, "wb") as file:
        file.write(b"half")
        raise KeyError
    assert not fs.exists(path)
    fs.pipe(path, b"whole")
    with pytest.raises(KeyError), fs.open(path, "wb") as file:
        file.write(b"half")
        raise KeyError
    assert fs.cat(path) == b"whole"
    assert fs.ls(f"{run}/{directory}", detail=False) == [path]
