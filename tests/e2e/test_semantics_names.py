"""Names: what each call does in an open checkpoint and in a plain directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fuse]

NOREPLACE = 1
EXCHANGE = 2


def rename2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd = -100
    if libc.renameat2(at_cwd, os.fsencode(old), at_cwd, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old))


def code_of(call, *words) -> int:
    """The errno with which a call fails."""
    with pytest.raises(OSError) as caught:
        call(*words)
    assert caught.value.errno is not None
    return caught.value.errno


def test_renaming_a_file_over_another_and_to_another_directory(place: Path):
    (place / "sub").mkdir()
    (place / "a").write_bytes(b"a")
    (place / "b").write_bytes(b"b")
    (place / "a").rename(place / "b")
    (place / "b").rename(place / "sub/c")
    assert os.listdir(place) == ["sub"]
    assert (place / "sub/c").read_bytes() == b"a"


def test_renaming_a_directory_with_all_that_is_in_it(place: Path):
    (place / "tmp/deep/er").mkdir(parents=True)
    (place / "tmp/deep/er/a").write_bytes(b"a")
    with (place / "tmp/deep/er/a").open("ab") as stream:
        (place / "tmp").rename(place / "items")
        stream.write(b"b")
    assert (place / "items/deep/er/a").read_bytes() == b"ab"
    assert not (place / "tmp").exists()
    (place / "empty").mkdir()
    (place / "items").rename(place / "empty")
    assert (place / "empty/deep/er/a").read_bytes() == b"ab"


def test_what_a_rename_refuses(place: Path):
    (place / "full").mkdir()
    (place / "full/a").touch()
    (place / "dir").mkdir()
    (place / "file").touch()
    assert code_of(os.rename, place / "dir", place / "full") in {errno.ENOTEMPTY, errno.EEXIST}
    assert code_of(os.rename, place / "file", place / "dir") == errno.EISDIR
    assert code_of(os.rename, place / "dir", place / "file") == errno.ENOTDIR
    assert code_of(os.rename, place / "none", place / "x") == errno.ENOENT
    assert code_of(os.rename, place / "full", place / "full/inner") == errno.EINVAL
    assert sorted(os.listdir(place)) == ["dir", "file", "full"]


def test_rename_flags(place: Path):
    (place / "a").write_bytes(b"a")
    (place / "b").write_bytes(b"b")
    assert code_of(rename2, place / "a", place / "b", NOREPLACE) == errno.EEXIST
    rename2(place / "a", place / "c", NOREPLACE)
    rename2(place / "b", place / "c", EXCHANGE)
    assert (place / "b").read_bytes() == b"a"
    assert (place / "c").read_bytes() == b"b"
    assert code_of(rename2, place / "b", place / "none", EXCHANGE) == errno.ENOENT


def test_directories_are_made_by_many_at_once(place: Path):
    """Exactly one mkdir of a name succeeds; the others get EEXIST and find the directory."""

    def make(_: int) -> int:
        try:
            os.mkdir(place / "shared")
        except FileExistsError:
            assert (place / "shared").is_dir()
            return 0
        return 1

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(make, range(64))) == 1
        list(pool.map(lambda n: os.makedirs(place / "x/y/z", exist_ok=True), range(32)))
    assert (place / "x/y/z").is_dir()


def test_many_processes_make_the_same_checkpoint(run: Path):
    code = """
import os, sys
for n in range(5):
    os.makedirs(f"{sys.argv[1]}/step-{n}/sub", exist_ok=True)
"""
    started = [subprocess.Popen([sys.executable, "-c", code, run]) for _ in range(6)]
    assert [process.wait(60) for process in started] == [0] * 6
    assert sorted(os.listdir(run)) == [f"step-{n}" for n in range(5)]
    assert os.listdir(run / "step-3") == ["sub"]


def test_removing_directories(place: Path):
    (place / "dir").mkdir()
    (place / "dir/a").touch()
    assert code_of(os.rmdir, place / "dir") == errno.ENOTEMPTY
    assert code_of(os.rmdir, place / "dir/a") == errno.ENOTDIR
    assert code_of(os.unlink, place / "dir") == errno.EISDIR
    assert code_of(os.rmdir, place / "none") == errno.ENOENT
    (place / "dir/a").unlink()
    (place / "dir").rmdir()
    assert code_of(os.rmdir, place / "dir") == errno.ENOENT


def test_removing_a_tree_by_directory_descriptors(place: Path):
    """shutil.rmtree works with openat and unlinkat."""
    for number in range(5):
        (place / f"t/{number}/x").mkdir(parents=True)
        for file in range(10):
            (place / f"t/{number}/x/{file}").write_bytes(b"1")
    assert shutil.rmtree.avoids_symlink_attacks
    shutil.rmtree(place / "t")
    assert os.listdir(place) == []


def test_two_processes_remove_the_same_tree(place: Path):
    """Each name is removed once; who comes second gets ENOENT and nothing else."""
    for number in range(20):
        (place / f"t/{number}").mkdir(parents=True)
        for file in range(5):
            (place / f"t/{number}/{file}").touch()
    command = ["rm", "-rf", str(place / "t")]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in started:
        assert process.communicate(timeout=60)[1] == b""
    subprocess.run(command, check=True)
    assert os.listdir(place) == []


def test_a_listing_is_whole_while_its_names_are_removed(place: Path):
    for number in range(300):
        (place / f"f{number}").touch()
    with os.scandir(place) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(place) == []


def test_a_name_is_removed_and_made_again(place: Path):
    for number in range(20):
        (place / "a").write_bytes(b"%d" % number)
        assert (place / "a").read_bytes() == b"%d" % number
        (place / "a").unlink()
        assert not (place / "a").exists()
        (place / "a").mkdir()
        (place / "a").rmdir()


def test_relative_symlinks(place: Path):
    (place / "target").write_bytes(b"1")
    (place / "sub").mkdir()
    (place / "sub/link").symlink_to("../target")
    assert os.readlink(place / "sub/link") == "../target"
    assert (place / "sub/link").read_bytes() == b"1"
    assert os.path.realpath(place / "sub/link") == os.path.realpath(place / "target")
    assert os.lstat(place / "sub/link").st_size == len("../target")
    assert code_of(os.symlink, "x", place / "target") == errno.EEXIST
    (place / "dangling").symlink_to("nowhere")
    assert code_of(open, place / "dangling") == errno.ENOENT


def test_a_symlink_is_replaced(place: Path):
    (place / "link").symlink_to("one")
    (place / "new").symlink_to("two")
    os.replace(place / "new", place / "link")
    assert os.readlink(place / "link") == "two"
    (place / "link").unlink()
    (place / "link").symlink_to("three")
    assert os.readlink(place / "link") == "three"


def test_symlinks_out_of_a_checkpoint_are_refused(run: Path):
    (run / "step-1").mkdir()
    for target in ("/etc/passwd", "../x", "a/../../x"):
        assert code_of(os.symlink, target, run / "step-1/link") == errno.EPERM
    assert os.listdir(run / "step-1") == []


def test_hard_links_are_refused(place: Path):
    (place / "a").write_bytes(b"1")
    assert code_of(os.link, place / "a", place / "b") == errno.EPERM
    assert os.listdir(place) == ["a"]


def test_renames_across_the_edge_of_a_checkpoint(run: Path):
    """Files go through; directories are copied by the tools, which EXDEV tells them."""
    (run / "step-1/dir").mkdir(parents=True)
    (run / "plain").mkdir()
    (run / "plain/a.txt").write_bytes(b"1")
    (run / "plain/a.txt").rename(run / "step-1/a.txt")
    assert (run / "step-1/a.txt").read_bytes() == b"1"
    (run / "step-1/a.txt").rename(run / "plain/b.txt")
    assert (run / "plain/b.txt").read_bytes() == b"1"
    assert code_of(os.rename, run / "step-1/dir", run / "plain/dir") == errno.EXDEV
    (run / "plain/dir").mkdir()
    (run / "plain/dir/x").write_bytes(b"x")
    assert code_of(os.rename, run / "plain/dir", run / "step-1/other") == errno.EXDEV
    shutil.move(run / "plain/dir", run / "step-1/other")
    assert (run / "step-1/other/x").read_bytes() == b"x"


def test_renaming_an_open_checkpoint(run: Path):
    """Within its run and to a checkpoint's name, or from a temporary name to any."""
    (run / "step-1").mkdir()
    (run / "step-1/a").touch()
    (run / "other").mkdir()
    assert code_of(os.rename, run / "step-1", run / "other/step-1") == errno.EXDEV
    assert code_of(os.rename, run / "step-1", run / "final") == errno.EXDEV
    (run / "step-1").rename(run / "step-2")
    assert os.listdir(run / "step-2") == ["a"]
    (run / "step-3").mkdir()
    (run / "step-3/a").touch()
    assert code_of(os.rename, run / "step-2", run / "step-3") == errno.ENOTEMPTY
    (run / "tmp_final").mkdir()
    (run / "tmp_final/a").touch()
    (run / "tmp_final").rename(run / "final")
    assert os.listdir(run / "final") == ["a"]


def test_a_directory_that_holds_checkpoints_keeps_its_path(run: Path):
    (run / "inner/step-1").mkdir(parents=True)
    assert code_of(os.rename, run / "inner", run / "outer") == errno.EBUSY
    assert code_of(os.rmdir, run / "inner") == errno.ENOTEMPTY
    (run / "dir").mkdir()
    assert code_of(os.rename, run / "dir", run / "step-9") == errno.EXDEV


def test_a_directory_in_which_a_checkpoint_began_stays(run: Path):
    (run / "inner/step-1").mkdir(parents=True)
    (run / "inner/step-1").rmdir()
    assert os.listdir(run / "inner") == []
    assert code_of(os.rmdir, run / "inner") == errno.ENOTEMPTY
    removal = subprocess.run(["rm", "-rf", run / "inner"], capture_output=True, check=False)
    assert removal.returncode == 1
    assert os.listdir(run) == ["inner"]


def test_an_open_checkpoint_is_removed_and_begun_again(run: Path):
    for number in range(3):
        (run / "step-1/sub").mkdir(parents=True)
        (run / f"step-1/sub/{number}").write_bytes(b"1")
        subprocess.run(["rm", "-rf", run / "step-1"], check=True)
        assert os.listdir(run) == []
    (run / "step-1").mkdir()
    assert os.listdir(run / "step-1") == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"n" * 256, errno.ENAMETOOLONG),
        (b"\xff\xfe", errno.EILSEQ),
        (b"two\nlines", errno.EINVAL),
        (b"bell\x07", errno.EINVAL),
    ],
)
def test_names_that_cannot_be_stored(place: Path, name: bytes, code: int):
    """I13: refused wherever a name is made; looked for, they are just not there."""
    bad = os.fsencode(place) + b"/" + name
    (place / "a").touch()
    assert code_of(os.mkdir, bad) == code
    assert code_of(os.open, bad, os.O_CREAT | os.O_WRONLY) == code
    assert code_of(os.symlink, b"a", bad) == code
    assert code_of(os.rename, os.fsencode(place / "a"), bad) == code
    assert code_of(os.stat, bad) in {errno.ENOENT, code}
    assert os.listdir(place) == ["a"]


def test_the_gateways_own_directory_is_out_of_reach(run: Path):
    assert code_of(os.mkdir, run / ".ckptgate") == errno.EACCES
    assert code_of(open, run / ".ckptgate", "w") == errno.EACCES
    assert code_of(os.stat, run / ".ckptgate") == errno.ENOENT
    (run / "step-1").mkdir()
    assert code_of(os.mkdir, run / "step-1/.ckptgate") == errno.EACCES
    assert os.listdir(run) == ["step-1"]


def test_names_of_255_bytes_and_of_other_scripts(place: Path):
    for name in ("n" * 255, "é" * 127, "检查点 🦀", "with space", "-rf", "$(x)", "a\\b", "*"):
        (place / name).write_bytes(b"1")
        assert name in os.listdir(place)
        assert (place / name).read_bytes() == b"1"
        (place / name).rename(place / "x")
        (place / "x").rename(place / name)
    assert len(os.listdir(place)) == 8


def test_a_checkpoints_name_is_at_most_240_bytes(run: Path):
    (run / ("step-" + "1" * 235)).mkdir()
    assert code_of(os.mkdir, run / ("step-" + "1" * 236)) == errno.ENAMETOOLONG


def test_deep_paths(place: Path):
    """To 4096 bytes below the checkpoint or the mount; deeper is ENAMETOOLONG."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(place)
        for _ in range(39):
            os.mkdir("d" * 99)
            os.chdir("d" * 99)
        with contextlib.suppress(OSError):
            os.mkdir("d" * 99)
            os.chdir("d" * 99)
        assert code_of(os.mkdir, "d" * 99) == errno.ENAMETOOLONG
        Path("f").write_bytes(b"1")
        assert Path("f").read_bytes() == b"1"
    finally:
        os.fchdir(before)
        os.close(before)


@pytest.mark.full
def test_a_directory_of_ten_thousand_names(run: Path):
    count = 10_000
    many = run / "step-1/many"
    many.mkdir(parents=True)
    for number in range(count):
        os.mknod(many / f"{number:05d}", 0o100644)
    assert sorted(os.listdir(many)) == [f"{number:05d}" for number in range(count)]
    assert sum(1 for _ in os.scandir(many)) == count
    (many / "05000").unlink()
    assert len(os.listdir(many)) == count - 1
