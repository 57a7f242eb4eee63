"""What people type: cp, tar, rsync, dd, git, find, du, unzip, tail, editors, rm; numpy's memmap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from tests.e2e.harness import tree, until

pytestmark = [pytest.mark.fuse]


def sh(text: str, cwd: Path, *words: str | Path, code: int = 0) -> str:
    """Run a shell command; its output. *words* are its parameters."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text, "bash", *words],
        cwd=cwd,
        env=dict(os.environ, LC_ALL="C.UTF-8", HOME=str(cwd)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with most kinds of things in it, on a local disk."""
    root = tmp_path / "source"
    for name in ("a/b/c", "empty", "a b", "ü"):
        (root / name).mkdir(parents=True)
    for number in range(12):
        (root / f"a/b/f{number}").write_bytes(os.urandom(number * 1777))
    (root / "a/link").symlink_to("b/f3")
    (root / "a/up").symlink_to("../empty")
    (root / "run.sh").write_text("#!/bin/sh\nexit 0\n")
    (root / "run.sh").chmod(0o755)
    (root / "readonly").write_bytes(b"1")
    (root / "readonly").chmod(0o440)
    (root / "ü/日本").write_bytes(b"2")
    with (root / "sparse").open("wb") as stream:
        stream.seek(3_000_000)
        stream.write(b"end")
    os.setxattr(root / "run.sh", "user.note", b"kept")
    # rsync leaves times alone that are of the same second.
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, ns=(10**18, 10**18 + 123_456_789), follow_symlinks=False)
    return root


def same(source: Path, copy: Path) -> None:
    """Bytes, kinds, modes, times and links are the same."""
    assert tree(copy) == tree(source)
    script = (
        "find . -mindepth 1 \\( -type f -printf '%P %y %m %s %T@\\n' \\) -o "
        "\\( -type d -printf '%P %y %m %T@\\n' \\) -o \\( -type l -printf '%P %y %l\\n' \\) | sort"
    )
    assert sh(script, copy) == sh(script, source)


def test_cp_archives(place: Path, source: Path):
    sh('cp -a "$1" copy', place, source)
    same(source, place / "copy")
    assert os.getxattr(place / "copy/run.sh", "user.note") == b"kept"
    sh("cp -a copy again && diff -r copy again && rm -rf copy", place)
    same(source, place / "again")


def test_cp_keeps_holes(place: Path, source: Path):
    sh('cp --sparse=always "$1"/sparse a && cp a b && cp --sparse=never a c', place, source)
    for name in "abc":
        assert (place / name).read_bytes() == (source / "sparse").read_bytes()
    assert (place / "a").stat().st_blocks * 512 < 100_000
    assert (place / "b").stat().st_blocks * 512 < 100_000
    assert (place / "c").stat().st_blocks * 512 >= 3_000_000


def test_tar_in_and_out(place: Path, source: Path, tmp_path: Path):
    sh('tar -C "$1" --format=posix --xattrs -cf - . | tar --xattrs -xpf -', place, source)
    same(source, place)
    sh("tar -cf ../out.tar . && tar -df ../out.tar", place)
    (tmp_path / "out").mkdir()
    sh('tar -C "$1" --format=posix -cf - . | tar -xpf -', tmp_path / "out", place)
    same(place, tmp_path / "out")


def test_rsync_and_again_by_checksum(place: Path, source: Path):
    sh('rsync -aHX "$1"/ copy/', place, source)
    same(source, place / "copy")
    assert sh('rsync -aHXc --itemize-changes "$1"/ copy/', place, source) == ""
    assert sh('rsync -a --itemize-changes "$1"/ copy/', place, source) == ""
    (source / "a/b/f5").write_bytes(b"changed")
    assert "a/b/f5" in sh('rsync -a --delete --itemize-changes "$1"/ copy/', place, source)
    sh('rsync -a --inplace --no-whole-file "$1"/ copy/', place, source)
    assert (place / "copy/a/b/f5").read_bytes() == b"changed"
    sh('rsync -a --link-dest=../copy "$1"/ linked/', place, source)
    same(source, place / "linked")


def test_dd_in_all_its_ways(place: Path):
    sh(
        "dd if=/dev/zero of=a bs=64k count=16 conv=fsync status=none;"
        "dd if=/dev/zero of=a bs=1 seek=100 count=3 conv=notrunc status=none;"
        "dd if=/dev/urandom of=b bs=4k count=64 oflag=direct status=none;"
        "dd if=b of=c bs=4k iflag=direct oflag=direct,dsync status=none; cmp b c;"
        "dd if=b of=d bs=1000 oflag=append conv=notrunc status=none; cmp b d;"
        "dd if=/dev/null of=e bs=1 seek=5000000 status=none;"
        "dd if=b of=b2 bs=333 count=10 skip=3 status=none",
        place,
    )
    assert (place / "a").stat().st_size == 16 * 65536
    assert (place / "e").stat().st_size == 5_000_000
    assert (place / "b2").read_bytes() == (place / "b").read_bytes()[999:4329]


def test_find_du_df_and_wc(place: Path, source: Path):
    sh('cp -a "$1"/. .', place, source)
    find = "find . -type f -size +3k -newermt 2000-01-01 | sort; find . -type d | wc -l"
    assert sh(find, place) == sh(find, source)
    assert sh("find . -type l -xtype f; find . -empty | sort", place) == sh(
        "find . -type l -xtype f; find . -empty | sort", source
    )
    apparent = "wc -c a/b/f* | tail -n 1"
    assert sh(apparent, place) == sh(apparent, source)
    assert int(sh("df --output=size . | tail -n 1", place)) > 0
    assert sh("stat -f -c %l .", place).strip() == "255"


def test_git_clone_commit_gc_and_fsck(place: Path, source: Path, tmp_path: Path, require):
    require(shutil.which("git"), "git is not installed")
    os.removexattr(source / "run.sh", "user.note")
    me = "-c user.name=n -c user.email=n@example.org -c protocol.file.allow=always"
    sh(f"git init -q && git add -A && git {me} commit -qm first", source)
    sh(f'git {me} clone -q "$1" a && git {me} clone -q ./a ./b', place, source)
    sh(
        f"cd b && for n in 1 2 3 4 5; do echo $n > file$n && git add -A && git {me} commit -qm $n;"
        "done; git gc -q --prune=now && git fsck --strict && git repack -qad",
        place,
    )
    assert sh("git status --porcelain && git log --oneline | wc -l", place / "b").strip() == "6"
    sh(f"git {me} worktree add -q ../w HEAD~2 && cd ../w && git status --porcelain", place / "b")
    sh(f'git {me} clone -q "$1" back && cd back && git fsck', tmp_path, place / "b")


def test_zip_and_unzip(place: Path, source: Path, require):
    require(shutil.which("unzip"), "unzip is not installed")
    with zipfile.ZipFile(place / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((source / "a/b").iterdir()):
            archive.write(path, path.name)
    sh("unzip -q a.zip -d out && unzip -tq a.zip", place)
    assert tree(place / "out") == tree(source / "a/b")


@pytest.mark.parametrize("option", ["-f", "-F"])
def test_tail_follows_a_log(place: Path, option: str):
    log = place / "train.log"
    log.write_text("start\n")
    with subprocess.Popen(
        ["tail", "-n", "+1", "-s", "0.1", option, log], stdout=subprocess.PIPE, text=True
    ) as tail:
        stream_out = tail.stdout
        assert stream_out is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(iter(stream_out.readline, "")))
        reader.start()
        try:
            with log.open("a") as stream:
                for number in range(5):
                    stream.write(f"step {number}\n")
                    stream.flush()
                    time.sleep(0.02)
            until("all lines", lambda: len(lines) == 6)
            if option == "-F":
                log.rename(place / "train.log.1")
                log.write_text("rotated\n")
                until("the new file", lambda: "rotated\n" in lines)
        finally:
            tail.terminate()
            reader.join(10)
    assert lines[:6] == ["start\n", *(f"step {number}\n" for number in range(5))]


def test_editors_that_save_by_rename_or_backup(place: Path):
    (place / "config.yaml").write_text("lr: 1\n")
    (place / "config.yaml").chmod(0o640)
    for number in range(10):
        new = place / ".config.yaml.swp"
        with new.open("w") as stream:
            stream.write(f"lr: {number}\n")
            stream.flush()
            os.fsync(stream.fileno())
        new.chmod(0o640)
        new.replace(place / "config.yaml")
        assert (place / "config.yaml").read_text() == f"lr: {number}\n"
    sh("sed -i 's/9/10/' config.yaml && sed -i.bak 's/10/11/' config.yaml", place)
    assert (place / "config.yaml").read_text() == "lr: 11\n"
    assert (place / "config.yaml.bak").read_text() == "lr: 10\n"
    assert (place / "config.yaml").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(place)) == ["config.yaml", "config.yaml.bak"]


def test_vim_saves(place: Path, require):
    require(shutil.which("vim"), "vim is not installed")
    (place / "notes").write_text("one\n")
    sh("vim -Es -u NONE -N -c '%s/one/two/' -c 'set backup' -c wq notes", place)
    assert (place / "notes").read_text() == "two\n"


def test_removing_trees_with_rm_and_shutil(place: Path, source: Path):
    sh('cp -a "$1" one && cp -a "$1" two && rm -rf one', place, source)
    shutil.rmtree(place / "two")
    assert os.listdir(place) == []


def test_shutil_copies_and_moves(place: Path, source: Path, tmp_path: Path):
    shutil.copytree(source, place / "copy", symlinks=True)
    same(source, place / "copy")
    shutil.move(place / "copy", tmp_path / "moved")
    same(source, tmp_path / "moved")
    shutil.move(tmp_path / "moved", place / "back")
    same(source, place / "back")
    assert not (place / "copy").exists()


MEMMAP = """
import numpy, sys
path = sys.argv[1]
array = numpy.memmap(path, dtype="float32", mode="w+", shape=(300, 1000))
array[:] = numpy.arange(300_000).reshape(300, 1000)
array.flush()
del array
again = numpy.memmap(path, dtype="float32", mode="r+", shape=(300, 1000))
again[7, 7] = -1
del again
array = numpy.memmap(path, dtype="float32", mode="r", shape=(300, 1000))
assert array[7, 7] == -1
assert numpy.fromfile(path, dtype="float32").reshape(300, 1000)[299, 999] == 299_999
numpy.save(path + ".npy", array)
assert (numpy.load(path + ".npy", mmap_mode="r") == array).all()
"""


@pytest.mark.torch
def test_numpy_memory_maps(place: Path):
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, "-c", MEMMAP, place / "array"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
