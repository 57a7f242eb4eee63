"""Commands about a daemon without a mount, which are given its store or its spool."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import fsspec
import pytest
from tests.ckpt.places import Place
from tests.e2e import buckets

from ckptgate.errors import ExitCode, UsageError


def run_here(*words: str):
    """`ckptgate WORDS`."""
    return buckets.run_here(*words, env={})


def test_status_and_wait_take_the_paths_of_a_store_without_a_mount(place: Place, fs, run):
    """Whatever lies beside the store; and the spool, which `status` calls the daemon by."""
    os.makedirs(f"{os.path.dirname(place.store)}/other/.ckptgate", exist_ok=True)
    fs.pipe(f"{run}/step-1/a.bin", b"a")
    fs.commit(f"{run}/step-1")
    for path in (f"{place.store}/{run}", f"{place.store}/{run}/step-1"):
        assert run_here("wait", path, "--timeout", "30").returncode == 0
    waited = run_here("wait", f"{place.store}/{run}", "--json")
    assert [row["name"] for row in json.loads(waited.stdout)["last"]] == ["step-1"]
    for path in (place.store, f"file://{place.store}", str(place.spool)):
        done = run_here("status", path, "--json")
        assert f"{run}" in [row["run"] for row in json.loads(done.stdout)["attempts"]], path
    fs.mkdir(f"{run}/step-2")
    done = run_here("wait", f"{place.store}/{run}", "--timeout", "0.1")
    assert (done.returncode, "step-2" in done.stderr) == (ExitCode.PENDING, True)
    fs.rm(f"{run}/step-2", recursive=True)


def test_what_is_nowhere_is_called_by_its_own_name(tmp_path: Path):
    os.makedirs(tmp_path / "run" / ".ckptgate")
    os.makedirs(tmp_path / "plain")
    for path in (tmp_path / "plain", tmp_path / "nothing", tmp_path / "run"):
        done = run_here("status", str(path))
        assert (done.returncode, str(path) in done.stderr) == (ExitCode.NOT_FOUND, True)


def test_the_store_in_a_url_goes_before_the_configured_one(place: Place, fs, run, monkeypatch):
    fs.pipe(f"{run}/step-1/a.bin", b"a")
    configured = {"store": "/another", "spool": "/another-spool", "config": str(place.config)}
    monkeypatch.setitem(fsspec.config.conf, "ckpt", configured)
    url = f"ckpt://{run}/step-1/a.bin::file://{place.store}"
    with fsspec.open(url) as file:
        assert file.read() == b"a"
    # The same store, written in another way, is no second one.
    monkeypatch.setitem(fsspec.config.conf, "ckpt", place.options)
    with fsspec.open(url) as file:
        assert file.read() == b"a"
    with pytest.raises(UsageError, match="two stores") as caught:
        fsspec.open(url, ckpt={"store": "/another"})
    # In a traceback, too, stands what to do.
    assert "hint: name one, by store= or after ckpt::" in "".join(
        traceback.format_exception(caught.value)
    )
