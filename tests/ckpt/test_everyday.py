"""`ckpt://` as a program uses it: files, checkpoints, what an exception means."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from tests.e2e.harness import until

import ckptgate
from ckptgate.errors import UsageError


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


def test_the_block_that_saves_works_on_urls(place, fs, run, monkeypatch):
    """Begun, recorded, committed; and given up for all where it raises."""
    monkeypatch.setitem(fsspec.config.conf, "ckpt", place.options)
    with ckptgate.checkpoint(f"ckpt://{run}", step=1, saved_by={"data_version": "v7"}) as path:
        fs.pipe(f"{run}/step-1/a.bin", b"a")
    assert path == f"ckpt://{run}/step-1"
    ckptgate.wait(path, 30)
    with pytest.raises(KeyError), ckptgate.checkpoint(f"ckpt://{run}", step=2):
        fs.pipe(f"{run}/step-2/a.bin", b"half")
        raise KeyError
    assert ckptgate.latest(f"ckpt://{run}", wait_s=10) == path


def test_a_held_directory_tells_of_itself_whatever_becomes_of_its_name(fs, run):
    fs.pipe(f"{run}/step-1/a.bin", b"a")
    held = fs.hold(f"{run}/step-1")
    fs.setxattr(f"{run}/step-1", "user.ckptgate.abort", b"not wanted")
    # An attempt that no other member has heard of is merely abandoned.
    ends = (b'"aborted"', b'"abandoned"')
    until("the end", lambda: any(end in held.getxattr("user.ckptgate.state") for end in ends))
    assert b"not wanted" in held.getxattr("user.ckptgate.state")
    assert not fs.exists(f"{run}/step-1")
    held.release()
    with pytest.raises(OSError, match="held"):
        held.getxattr("user.ckptgate.state")
    with pytest.raises(UsageError):
        fs.commit(run)
