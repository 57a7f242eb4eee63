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

from ckptgate.app import locate
from ckptgate.app.commands import status
from ckptgate.app.registry import MountInfo
from ckptgate.app.sections import S3Section
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


def test_a_rotation_that_deletes_or_discards_is_no_failed_save(place: Place, fs, run):
    """For `wait RUN` and `status`, which job scripts go by."""
    for step in (1, 2):
        fs.pipe(f"{run}/step-{step}/a.bin", b"a" * step)
        fs.commit(f"{run}/step-{step}")
        fs.wait(f"{run}/step-{step}", 30)
    fs.rm(f"{run}/step-1", recursive=True)
    fs.pipe(f"{run}/step-3/a.bin", b"given up")
    fs.rm(f"{run}/step-3", recursive=True)
    waited = run_here("wait", f"{place.store}/{run}", "--timeout", "30", "--json")
    assert waited.returncode == 0, waited.stderr
    assert [row["name"] for row in json.loads(waited.stdout)["last"]] == ["step-2"]
    done = run_here("status", f"{place.store}/{run}", "--json")
    ended = [(row["name"], row["state"]) for row in json.loads(done.stdout)["attempts"]]
    assert ("step-1", "abandoned") in ended
    assert done.returncode == 0
    fs.pipe(f"{run}/step-4/a.bin", b"a")
    fs.setxattr(f"{run}/step-4", "user.ckptgate.abort", b"not wanted")
    assert run_here("wait", f"{place.store}/{run}").returncode == ExitCode.REFUSED


def test_a_daemon_without_a_mount_is_drained_by_its_store_or_spool(place: Place, fs, run):
    fs.pipe(f"{run}/step-1/a.bin", b"a")
    fs.commit(f"{run}/step-1")
    for path in (place.store, str(place.spool)):
        done = run_here("drain", path, "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"drained {os.path.realpath(place.spool)}: everything")
    assert os.path.exists(f"{place.store}/{run}/step-1/a.bin")
    fs.mkdir(f"{run}/step-2")
    fs.pipe(f"{run}/step-2/a.bin", b"a")
    done = run_here("drain", place.store, "--timeout", "0.5", "--json")
    assert done.returncode == ExitCode.PENDING
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["left"]] == ["step-2"]
    # Nothing is refused any more.
    fs.mkdir(f"{run}/step-3")
    for name in ("step-2", "step-3"):
        fs.rm(f"{run}/{name}", recursive=True)


def test_a_store_of_several_daemons_is_not_drained_by_its_name(monkeypatch):
    infos = [
        MountInfo(mountpoint=f"/m{n}", store="/s", spool=f"/p{n}", pid=1, start=1) for n in (1, 2)
    ]
    monkeypatch.setattr(locate, "list_mounts", lambda: infos)
    monkeypatch.setattr(locate, "find_mount", lambda path: None)
    with pytest.raises(UsageError, match="several daemons here serve: /m1, /m2"):
        locate.require_daemon("/s/run")


def test_the_mount_point_of_a_mount_beside_a_run_is_no_checkpoint(tmp_path: Path, monkeypatch):
    """A directory above that merely holds runs makes no checkpoint of it."""
    os.makedirs(tmp_path / "run" / ".ckptgate")
    mount = MountInfo(mountpoint=f"{tmp_path}/mnt", store="/s", spool="/p", pid=1, start=1)
    monkeypatch.setattr(locate, "list_mounts", lambda: [mount])
    monkeypatch.setattr(locate, "find_mount", lambda path: mount if "/mnt" in path else None)
    assert status._unserved(mount.mountpoint, S3Section()) is None


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
