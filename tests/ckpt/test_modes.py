"""Modes of opening, transactions, and what a failure in the midst of them leaves."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import fsspec
import pytest
from tests.e2e.harness import until

from ckptgate_adapters.fsspec_ckpt import writers


@pytest.fixture(params=["step-1", "plain"])
def directory(fs, run, request):
    """In an open checkpoint, and outside of any."""
    path = f"{run}/{request.param}"
    fs.mkdir(path)
    return path


def test_files_are_made_appended_to_and_changed(fs, directory):
    path = f"{directory}/a.bin"
    with pytest.raises(FileNotFoundError):
        fs.open(path, "r+b")
    with fs.open(path, "xb") as file:
        file.write(b"0123456789")
    with pytest.raises(FileExistsError):
        fs.open(path, "xb")
    with fs.open(path, "ab") as file:
        file.write(b"ab")
        file.write(b"cd")
    with fs.open(path, "r+b") as file:
        file.seek(2)
        file.write(b"xx")
        file.seek(0)
        assert file.read() == b"01xx456789abcd"
    assert fs.cat(path) == b"01xx456789abcd"
    with fs.open(path, "w", encoding="utf-8") as file:
        file.write("täxt\n")
    with fs.open(path, "r", encoding="utf-8") as file:
        assert file.read() == "täxt\n"
    for mode in ("wb", "xz", "w+b"):
        if mode != "wb":
            with pytest.raises(ValueError, match="not possible"):
                fs.open(path, mode)


def test_appending_that_raises_leaves_what_was_there_outside_of_checkpoints(fs, run):
    path = f"{run}/notes.txt"
    fs.pipe(path, b"first\n")
    with pytest.raises(KeyError), fs.open(path, "ab") as file:
        file.write(b"second\n")
        raise KeyError
    assert fs.cat(path) == b"first\n"


def test_text_and_compression_discard_like_any_other(fs, directory):
    path = f"{directory}/a.txt.gz"
    with fs.open(path, "wt", compression="gzip") as file:
        file.write("text")
    with fs.open(path, "rt", compression="infer") as file:
        assert file.read() == "text"
    before = fs.cat(path)
    for mode in ("wt", "wb"):
        with pytest.raises(KeyError), fs.open(path, mode, compression="gzip") as file:
            file.write("half" if "t" in mode else b"half")
            raise KeyError
    assert fs.cat(path) == before


def test_the_open_of_fsspec_itself_discards_too(place, fs, directory, monkeypatch):
    """Its `OpenFile` closes its file without a word of the exception."""
    monkeypatch.setitem(fsspec.config.conf, "ckpt", place.options)
    for mode, data in (("wb", b"half"), ("wt", "half")):
        with (
            pytest.raises(KeyError),
            fsspec.open(f"ckpt://{directory}/new.bin", mode) as file,
        ):
            file.write(data)
            raise KeyError
    assert not fs.exists(f"{directory}/new.bin")


def test_a_transaction_is_one_seal(fs, run):
    with fs.transaction:
        fs.pipe(f"{run}/step-1/a.bin", b"a")
        with fs.open(f"{run}/step-1/sub/b.bin", "wb") as file:
            file.write(b"b")
    fs.wait(f"{run}/step-1", 60)
    assert fs.state(f"{run}/step-1")["event"] == "explicit"
    assert fs.cat(f"{run}/step-1/sub/b.bin") == b"b"


def test_an_exception_in_a_transaction_discards_all_of_it(fs, run):
    fs.pipe(f"{run}/notes.txt", b"before")
    with pytest.raises(KeyError), fs.transaction:
        fs.pipe(f"{run}/step-1/a.bin", b"a")
        fs.pipe(f"{run}/notes.txt", b"after")
        raise KeyError
    assert fs.find(f"{run}/step-1") == []
    assert fs.cat(f"{run}/notes.txt") == b"before"
    assert fs.state(f"{run}/step-1")["state"] == "open"


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_transaction_has_text_and_compressed_files_whole(fs, run, is_closed):
    """I2: what is still in their buffers belongs to them, and the end of a stream does."""
    with fs.transaction:
        files = [
            fs.open(f"{run}/step-1/a.txt", "w"),
            fs.open(f"{run}/step-1/b.gz", "wb", compression="gzip"),
            fs.open(f"{run}/step-1/c.gz", "w", compression="gzip"),
        ]
        for file, data in zip(files, ("text", b"bytes", "both"), strict=True):
            file.write(data)
            if is_closed:
                file.close()
    fs.wait(f"{run}/step-1", 60)
    assert fs.cat(f"{run}/step-1/a.txt") == b"text"
    assert gzip.decompress(fs.cat(f"{run}/step-1/b.gz")) == b"bytes"
    assert gzip.decompress(fs.cat(f"{run}/step-1/c.gz")) == b"both"


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_exception_in_a_transaction_discards_text_and_compressed_files(fs, run, is_closed):
    with pytest.raises(KeyError), fs.transaction:
        for mode, compression in (("w", None), ("wb", "gzip"), ("w", "gzip")):
            file = fs.open(f"{run}/{mode}-{compression}", mode, compression=compression)
            file.write(b"half" if mode == "wb" else "half")
            if is_closed:
                file.close()
        raise KeyError
    assert fs.find(run) == []


def test_a_write_that_fails_is_no_file(fs, directory, monkeypatch):
    path = f"{directory}/a.bin"

    def full(self, data):
        raise OSError(errno.ENOSPC, "no space left")

    file = fs.open(path, "wb")
    monkeypatch.setattr(writers._RawWriter, "write", full)
    with pytest.raises(OSError, match="no space left"):
        file.write(b"x" * 1_000_000)
    with pytest.raises(OSError, match="not kept"):
        file.close()
    assert not fs.exists(path)


def test_a_committed_checkpoint_is_changed_as_a_revision(fs, run):
    path = f"{run}/step-1"
    fs.pipe({f"{path}/a.bin": b"aaaa", f"{path}/b.bin": b"b"})
    fs.commit(path)
    fs.wait(path, 60)
    with pytest.raises(KeyError), fs.open(f"{path}/a.bin", "wb") as file:
        file.write(b"half")
        raise KeyError
    assert fs.state(path)["state"] == "committed"
    with fs.open(f"{path}/a.bin", "r+b") as file:
        file.write(b"AA")
    assert fs.state(path)["state"] == "open"
    fs.commit(path)
    fs.wait(path, 60)
    assert fs.cat(f"{path}/a.bin") == b"AAaa"
    assert fs.cat(f"{path}/b.bin") == b"b"
    with pytest.raises(PermissionError):
        fs.mv(path, f"{run}/step-2")


def test_a_pointer_moves_with_its_checkpoint(place, fs, run):
    fs.pipe(f"{run}/step-1/a.bin", b"a")
    fs.pipe(f"{run}/latest", b"step-1")
    assert fs.cat(f"{run}/latest") == b"step-1"
    other = place.python(
        "import sys, fsspec; print(fsspec.filesystem('ckpt').exists(sys.argv[1]))",
        f"{run}/latest",
        run_id="somebody-else",
    )
    assert other.stdout == "False\n", other.stderr
    fs.commit(f"{run}/step-1")
    fs.wait(f"{run}/step-1", 60)
    pointer = Path(place.store, run, "latest")
    until("the pointer", lambda: pointer.exists() and pointer.read_text() == "step-1")


def test_what_is_closed_outside_of_checkpoints_comes_to_the_store_whole(place, fs, run):
    path = f"{run}/data/table.csv"
    with fs.open(path, "wb") as file:
        file.write(b"x\n" * 100_000)
        file.flush()
        assert not os.path.exists(f"{place.store}/{path}")
    until("the store's copy", lambda: fs.is_stored(path))
    with open(f"{place.store}/{path}", "rb") as copy:
        assert copy.read() == b"x\n" * 100_000


def test_a_rank_of_the_options_speaks_for_itself(place, run):
    ranks = [place.fs(rank=rank, world_size=2, job=f"two-{run}") for rank in (0, 1)]
    for number, rank in enumerate(ranks):
        rank.pipe(f"{run}/step-1/rank{number}.bin", bytes([number]))
    ranks[0].commit(f"{run}/step-1")
    assert ranks[0].state(f"{run}/step-1")["state"] == "open"
    ranks[1].commit(f"{run}/step-1")
    ranks[1].wait(f"{run}/step-1", 60)
    manifest = Path(place.store, run, "step-1/.ckptgate/manifest.json")
    until("the publication", manifest.exists)
    assert len(json.loads(manifest.read_text())["entries"]) == 2
