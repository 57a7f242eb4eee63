"""What a mount refuses, tells and leaves, through the command line; saves are in `test_saves`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway, cli, cluster, job, until
from tests.unit.formats.builders import hf_trainer

pytestmark = [pytest.mark.fuse]


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")


SAVE = """
import os, sys, ckptgate
path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.makedirs(path, exist_ok=True)
with open(f"{path}/rank{rank}.bin", "wb") as f:
    f.write(bytes([rank]) * 300_000)
ckptgate.commit(path, rank, world)
"""


def test_a_flipped_byte_in_the_store_is_never_served(tmp_path: Path):
    """I13: the other node reads EIO, an event names the file, verify and b3sum agree."""
    with cluster(tmp_path, nodes=2) as c:
        one, two = c.nodes
        assert job(SAVE, one.mnt / "step-1", "0", "1").returncode == 0
        until("the publication", lambda: (c.store / "step-1").is_dir())
        victim = c.store / "step-1/rank0.bin"
        with victim.open("r+b") as stream:
            stream.seek(12345)
            stream.write(b"\xff")
        until("the name", lambda: (two.mnt / "step-1").exists())
        with pytest.raises(OSError) as caught:
            (two.mnt / "step-1/rank0.bin").read_bytes()
        assert caught.value.errno == errno.EIO
        events = until("an event", lambda: two.status()["events"])
        assert any("rank0.bin" in e["subject"] + e["detail"] for e in events)
        done = cli("verify", c.store / "step-1")
        assert done.returncode == 5
        assert "rank0.bin" in done.stdout
        check = subprocess.run(
            ["b3sum", "--check", "--quiet", ".ckptgate/b3sums"],
            cwd=c.store / "step-1", check=False, capture_output=True,
        )  # fmt: skip
        assert check.returncode != 0


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"n" * 256, errno.ENAMETOOLONG),
        (b"\xff\xfe", errno.EILSEQ),
        (b"two\nlines", errno.EINVAL),
        (b"bell\x07", errno.EINVAL),
    ],
)
def test_names_that_cannot_be_stored_are_refused(tmp_path: Path, name: bytes, code: int):
    """I13."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        (node.mnt / "step-1").mkdir()
        for directory in (os.fsencode(node.mnt), os.fsencode(node.mnt / "step-1")):
            with pytest.raises(OSError) as caught:
                os.mkdir(directory + b"/" + name)
            assert caught.value.errno == code
            with pytest.raises(OSError) as caught:
                os.close(os.open(directory + b"/" + name, os.O_CREAT | os.O_WRONLY))
            assert caught.value.errno == code


def test_a_checkpoint_without_a_file_is_not_committed(tmp_path: Path):
    """I13: committing an empty directory is refused and changes nothing: files can be added."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        path = node.mnt / "step-1"
        path.mkdir()
        refused = cli("commit", path, "--all")
        assert refused.returncode == 3
        assert "has no file" in refused.stderr
        with pytest.raises(OSError) as caught:
            os.setxattr(path, "user.ckptgate.commit", b"0/1")
        assert caught.value.errno == errno.EINVAL
        assert not (c.store / "step-1").exists()
        (path / "a.txt").write_bytes(b"1")
        assert cli("commit", path, "--all", "--wait", "--timeout", "30").returncode == 0


def test_umount_tells_what_is_left(tmp_path: Path):
    """Exit codes: 7 while files are open, 2 with unfinished work, 0 clean; a new mount goes on."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        with (node.mnt / "notes.txt").open("w"):
            busy = node.stop(timeout=1)
            assert busy.returncode == 7, busy.stderr
        job(SAVE, node.mnt / "step-1", "0", "2")
        left = node.stop(timeout=1)
        assert left.returncode == 2, left.stderr
        assert "step-1" in left.stderr
        assert not os.path.ismount(node.mnt)
        node.start()
        assert job(SAVE, node.mnt / "step-1", "1", "2").returncode == 0
        until("the commit", lambda: c.committed("") == ["step-1"])
        until("the publication", lambda: (c.store / "step-1").is_dir())
        clean = node.stop()
        assert clean.returncode == 0, clean.stderr
        assert (c.store / "notes.txt").exists()


def test_a_spool_has_one_mount(tmp_path: Path):
    """Refused by lock; the message says who holds it."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        other = tmp_path / "other"
        done = cli("mount", c.store, other, "--spool", node.spool)
        assert done.returncode == 7
        assert str(node.info().pid) in done.stderr
        assert not os.path.ismount(other)


def test_a_store_that_cannot_be_used_is_refused(tmp_path: Path):
    """Missing, a file, a foreign version: each exits with 6 and names it; nothing is mounted."""
    mnt, spool = tmp_path / "mnt", tmp_path / "spool"
    missing = cli("mount", tmp_path / "nowhere", mnt, "--spool", spool)
    assert missing.returncode == 6
    assert "nowhere" in missing.stderr
    assert "hint" in missing.stderr
    (tmp_path / "file").write_text("x")
    assert cli("mount", tmp_path / "file", mnt, "--spool", spool).returncode == 6
    assert not os.path.ismount(mnt)
    unknown = cli("mount", "ftp://host/x", mnt, "--spool", spool)
    assert unknown.returncode == 64


def test_a_spool_of_another_store_is_refused(tmp_path: Path):
    store, other = tmp_path / "store", tmp_path / "other"
    store.mkdir()
    other.mkdir()
    node = Gateway(tmp_path, "node", store)
    node.start()
    try:
        assert node.stop().returncode == 0
        done = cli("mount", other, node.mnt, "--spool", node.spool)
        assert done.returncode == 6
        assert str(store) in done.stderr
    finally:
        node.destroy()


def test_a_spool_of_another_format_version_is_refused(tmp_path: Path):
    import sqlite3

    store = tmp_path / "store"
    store.mkdir()
    node = Gateway(tmp_path, "node", store)
    node.start()
    try:
        assert node.stop().returncode == 0
        (database,) = node.spool.glob("*.db")
        with sqlite3.connect(database) as db:
            db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
        db.close()
        done = cli("mount", store, node.mnt, "--spool", node.spool)
        assert done.returncode == 6
        assert "99" in done.stderr
    finally:
        node.destroy()


def test_exec_gives_the_job_its_key(tmp_path: Path):
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        code = (
            f"import os; os.makedirs('{node.mnt}/step-1'); open('{node.mnt}/step-1/a','w').close()"
        )
        done = cli("exec", "--run-id", "abc", "--", "python3", "-c", code)
        assert done.returncode == 0, done.stderr
        assert not (node.mnt / "step-1").exists()
        seen = cli("exec", "--run-id", "abc", "--", "ls", node.mnt)
        assert seen.stdout.split() == ["step-1"]
        rows = until("the attempt", lambda: node.attempts("step-1"))
        assert rows[0]["state"] == "open"


def test_every_reading_command_has_json(tmp_path: Path):
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        job(SAVE, node.mnt / "run/step-1", "0", "1")
        until("the commit", lambda: (c.store / "run/step-1").is_dir())
        for words in (
            ("status", node.mnt),
            ("status",),
            ("ls", node.mnt / "run"),
            ("show", node.mnt / "run/step-1"),
            ("log", node.mnt / "run"),
            ("verify", node.mnt / "run/latest"),
            ("wait", node.mnt / "run/step-1"),
        ):
            done = cli(*words, "--json")
            # Without a path it tells of all mounts of this machine.
            allowed = {0} if len(words) > 1 else {0, 2, 3}
            assert done.returncode in allowed, (words, done.stderr)
            json.loads(done.stdout)


def test_show_says_which_training_state_a_checkpoint_holds(tmp_path: Path):
    """The Trainer's own last file commits it; nobody says anything to the gateway."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        path = node.mnt / "run/checkpoint-4"
        path.mkdir(parents=True)
        files = hf_trainer(ranks=2)
        for name in sorted(files, key="trainer_state.json".__eq__):
            (path / name).write_bytes(files[name])
        until("the commit", lambda: (c.store / "run/checkpoint-4").is_dir())
        shown = cli("show", path)
        assert shown.returncode == 0, shown.stderr
        words = (
            "holds model (files: 1), optimizer (files: 1), rng (ranks: 2 of 2),"
            " scheduler (files: 1), trainer (files: 1), step 4"
        )
        assert words in shown.stdout
        held = json.loads(cli("show", c.store / "run/checkpoint-4", "--json").stdout)["holds"]
        assert held["parts"]["rng"] == {
            "files": ["rng_state_0.pth", "rng_state_1.pth"],
            "ranks": [0, 1],
        }
        assert (held["step"], held["world_size"], held["problem"]) == (4, 2, "")
