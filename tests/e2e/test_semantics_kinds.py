"""Attributes, statfs, whole files, live files, plain directories, and common tools."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Gateway, job, tree, until

pytestmark = [pytest.mark.fuse]


# Attributes


def test_modes_and_times_are_kept(place: Path):
    path = place / "a"
    path.write_bytes(b"1")
    os.chmod(path, 0o640)
    os.utime(path, ns=(10**18, 1_234_567_890_123_456_789))
    found = path.stat()
    assert found.st_mode & 0o7777 == 0o640
    assert found.st_mtime_ns == 1_234_567_890_123_456_789
    (place / "dir").mkdir(mode=0o750)
    assert (place / "dir").stat().st_mode & 0o7777 == 0o750
    with path.open("ab") as stream:
        stream.write(b"2")
    assert abs(path.stat().st_mtime - time.time()) < 60


def test_the_umask_counts(place: Path):
    before = os.umask(0o027)
    try:
        (place / "a").touch()
        (place / "d").mkdir()
    finally:
        os.umask(before)
    assert (place / "a").stat().st_mode & 0o777 == 0o640
    assert (place / "d").stat().st_mode & 0o777 == 0o750


def test_owners(place: Path, require):
    require(os.geteuid() == 0, "only root gives files away")
    (place / "a").touch()
    os.chown(place / "a", 1234, 2345)
    assert ((place / "a").stat().st_uid, (place / "a").stat().st_gid) == (1234, 2345)


def test_permissions_are_checked_by_the_kernel(place: Path, require):
    require(os.geteuid() == 0, "only root becomes another user")
    (place / "a").write_bytes(b"1")
    (place / "a").chmod(0o600)

    def as_nobody(*command: str) -> int:
        # The directories above the mount may be closed to others: names are relative.
        done = subprocess.run(
            command, cwd=place, user=65534, group=65534, capture_output=True, check=False
        )
        return done.returncode

    assert as_nobody("cat", "a") != 0
    assert as_nobody("touch", "b") != 0
    (place / "a").chmod(0o644)
    assert as_nobody("cat", "a") == 0


def test_a_later_write_has_a_later_mtime(place: Path):
    (place / "a").write_bytes(b"1")
    first = (place / "a").stat().st_mtime_ns
    time.sleep(0.02)
    (place / "b").write_bytes(b"1")
    assert (place / "b").stat().st_mtime_ns > first


def test_free_space_is_that_of_the_spool(node: Gateway, place: Path):
    found, spool = os.statvfs(place), os.statvfs(node.spool)
    assert (found.f_frsize, found.f_blocks) == (spool.f_frsize, spool.f_blocks)
    assert abs(found.f_bavail - spool.f_bavail) * found.f_frsize < 2 << 30
    assert found.f_namemax == 255
    assert os.access(place, os.W_OK)


# Whole files


def container(data: bytes) -> bytes:
    """A file of safetensors with one tensor."""
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"x": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + data


def test_a_whole_file_shows_others_its_old_version_until_it_is_closed(run: Path):
    """Outside of checkpoints, named as a container: published whole or not at all."""
    path = run / "model.safetensors"
    read = "import sys; print(open(sys.argv[1], 'rb').read())"
    one, two = (container(b"%d" % number * 100) for number in (1, 2))
    path.write_bytes(one)
    until("its publication", lambda: job(read, path, run_id="x").stdout == f"{one!r}\n")
    with path.open("wb") as stream:
        stream.write(two[:50])
        stream.flush()
        assert path.stat().st_size == 50
        assert job(read, path, run_id="x").stdout == f"{one!r}\n"
        stream.write(two[50:])
    assert path.read_bytes() == two
    until("the new version", lambda: job(read, path, run_id="x").stdout == f"{two!r}\n")


def test_a_whole_file_that_is_no_container_is_not_published(run: Path, shared: Cluster):
    path = run / "model.safetensors"
    path.write_bytes(container(b"1" * 100)[:-1])
    time.sleep(1.0)
    assert len(path.read_bytes()) == len(container(b"1" * 100)) - 1
    assert job("import os,sys; os.stat(sys.argv[1])", path, run_id="x").returncode != 0
    assert not (shared.store / run.name / "model.safetensors").exists()
    path.unlink()
    assert os.listdir(run) == []


# Live files and plain directories


def test_a_live_file_is_seen_at_once_by_all_of_the_mount(run: Path, shared: Cluster):
    read = "import sys; print(open(sys.argv[1]).read(), end='')"
    with (run / "train.log").open("a", buffering=1) as stream:
        for number in range(3):
            stream.write(f"{number}\n")
            expected = "".join(f"{n}\n" for n in range(number + 1))
            assert job(read, run / "train.log", run_id=f"x{number}").stdout == expected
    stored = shared.store / run.name / "train.log"
    until("the copy", lambda: stored.exists() and stored.read_text() == "0\n1\n2\n")


def test_a_plain_tree_reaches_the_store_as_it_is(run: Path, shared: Cluster):
    (run / "conf/deep").mkdir(parents=True)
    (run / "conf/deep/a.json").write_text("{}")
    (run / "conf/link").symlink_to("deep/a.json")
    stored = shared.store / run.name
    until("the file", lambda: (stored / "conf/deep/a.json").exists())
    until("the link", lambda: os.path.lexists(stored / "conf/link"))
    (run / "conf").rename(run / "config")
    until("the rename", lambda: (stored / "config/deep/a.json").exists())
    shutil.rmtree(run / "config")
    until("the removal", lambda: not (stored / "config").exists())
    assert os.listdir(run) == []


def test_what_only_the_store_has_is_seen_and_changed(run: Path, shared: Cluster):
    stored = shared.store / run.name
    until("the directory", stored.is_dir)
    (stored / "given.txt").write_text("given")
    (stored / "sub").mkdir()
    (stored / "sub/x").write_text("x")
    until("the name", lambda: sorted(os.listdir(run)) == ["given.txt", "sub"])
    assert (run / "given.txt").read_text() == "given"
    with (run / "given.txt").open("a") as stream:
        stream.write(" more")
    assert (run / "given.txt").read_text() == "given more"
    until("the copy", lambda: (stored / "given.txt").read_text() == "given more")
    (run / "sub/x").unlink()
    (run / "sub").rmdir()
    until("the removal", lambda: not (stored / "sub").exists())


# Tools


def test_mkdir_cd_and_ls(run: Path):
    done = subprocess.run(
        "mkdir step-1 && cd step-1 && ls -la && echo 1 >a && mkdir b && cd b && ls .. && cat ../a",
        cwd=run, shell=True, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-3:] == ["a", "b", "1"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with a bit of everything."""
    path = tmp_path / "source"
    (path / "sub/empty").mkdir(parents=True)
    for number in range(20):
        (path / f"sub/{number}.bin").write_bytes(os.urandom(1000 * number))
    (path / "link").symlink_to("sub/3.bin")
    (path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (path / "run.sh").chmod(0o750)
    os.utime(path / "sub/3.bin", (1_600_000_000, 1_600_000_000))
    return path


def check_copy(source: Path, copy: Path) -> None:
    assert tree(copy) == tree(source)
    assert os.readlink(copy / "link") == "sub/3.bin"
    assert (copy / "sub/empty").is_dir()
    assert (copy / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (copy / "sub/3.bin").stat().st_mtime == 1_600_000_000
    assert subprocess.run([copy / "run.sh"], capture_output=True, check=True).stdout == b"ran\n"


def test_cp(place: Path, source: Path, tmp_path: Path):
    subprocess.run(["cp", "-a", source, place / "copy"], check=True)
    check_copy(source, place / "copy")
    subprocess.run(["cp", "-a", place / "copy", tmp_path / "back"], check=True)
    check_copy(source, tmp_path / "back")
    shutil.copytree(source, place / "again", symlinks=True)
    check_copy(source, place / "again")


def test_tar(place: Path, source: Path, tmp_path: Path):
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", "-C", source, "."], check=True)
    (place / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", place / "out"], check=True)
    check_copy(source, place / "out")
    subprocess.run(["tar", "-cf", place / "b.tar", "-C", place / "out", "."], check=True)
    (tmp_path / "back").mkdir()
    subprocess.run(["tar", "-xf", place / "b.tar", "-C", tmp_path / "back"], check=True)
    check_copy(source, tmp_path / "back")


def test_rsync(place: Path, source: Path, require):
    require(shutil.which("rsync"), "rsync is not installed")
    for _ in range(2):
        subprocess.run(["rsync", "-a", "--delete", f"{source}/", place / "copy"], check=True)
        check_copy(source, place / "copy")
        (source / "sub/19.bin").unlink(missing_ok=True)


def test_git(place: Path):
    def git(*words: str) -> str:
        repo = str(place / "repo")
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", repo, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    (place / "repo").mkdir()
    git("init", "-q")
    for number in range(3):
        (place / "repo/file").write_text(str(number))
        git("add", ".")
        git("commit", "-qm", f"commit {number}")
    assert git("log", "--format=%s").split("\n")[:3] == ["commit 2", "commit 1", "commit 0"]
    assert git("status", "--porcelain") == ""
    git("gc", "-q")
    git("fsck", "--strict")
    git("checkout", "-q", "HEAD~2")
    assert (place / "repo/file").read_text() == "0"


def test_a_foreign_name_in_a_path_is_an_error_of_its_own(place: Path):
    (place / "file").touch()
    for path, code in (
        (place / "file/x", errno.ENOTDIR),
        (place / "none/x", errno.ENOENT),
        (place / "none", errno.ENOENT),
    ):
        with pytest.raises(OSError) as caught:
            path.open("w" if path.name == "x" else "r")
        assert caught.value.errno == code
