"""What a new user tried on real mounts, and what it has to come to."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway, cli, cluster, job, kill_daemon, start_job, tree, until

pytestmark = [pytest.mark.fuse]

SIZE = 300_000


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")


def save(path: Path, **files: bytes) -> None:
    """A committed checkpoint, seen in the store too."""
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / f"{name}.bin").write_bytes(data)
    done = cli("commit", path, "--all", "--wait", "--timeout", "30")
    assert done.returncode == 0, done.stderr


def edit(path: Path, at: int = 5) -> None:
    """`printf X | dd of=path bs=1 seek=5 conv=notrunc`."""
    words = ["dd", f"of={path}", "bs=1", f"seek={at}", "conv=notrunc", "status=none"]
    subprocess.run(words, input=b"X", check=True)


def code_of_read(path: Path) -> int:
    """The errno with which reading the file fails, 0 if it doesn't."""
    try:
        path.read_bytes()
    except OSError as exc:
        return exc.errno or -1
    return 0


def has_event(node: Gateway, kind: str, path: str) -> bool:
    return any(e["kind"] == kind and path in e["subject"] for e in node.status()["events"])


@pytest.mark.parametrize("passes", [True, False], ids=["passthrough", "fallback"])
def test_an_edit_in_the_store_is_eio_also_on_the_node_that_wrote_it(tmp_path: Path, passes: bool):
    """I13: its spool file is the store's inode, so the edit is in it too; nobody serves it."""
    config = f"passthrough = {'true' if passes else 'false'}\n"
    with cluster(tmp_path, nodes=2, config=config) as c:
        one, two = c.nodes
        save(one.mnt / "run/step-1", a=b"a" * SIZE, b=b"b" * SIZE)
        until("the publication", lambda: os.path.lexists(c.store / "run/latest"))
        path = one.mnt / "run/step-1/a.bin"
        assert path.read_bytes() == b"a" * SIZE
        edit(c.store / "run/step-1/a.bin")
        for node in (one, two):
            assert code_of_read(node.mnt / "run/step-1/a.bin") == errno.EIO, node.name
            assert has_event(node, "verify-failed", "run/step-1/a.bin"), node.name
            assert (node.mnt / "run/step-1/b.bin").read_bytes() == b"b" * SIZE
        # A revision copies no bad bytes either.
        with pytest.raises(OSError) as caught:
            path.open("r+b").close()
        assert caught.value.errno == errno.EIO
        assert one.stop().returncode in (0, 2)
        one.start()
        assert code_of_read(path) == errno.EIO
        assert cli("verify", c.store / "run/step-1").returncode == 5
        edited = (c.store / "run/step-1/a.bin").read_bytes()
        assert edited == b"aaaaaX" + b"a" * (SIZE - 6), "the store's bytes are not written"
        # Who restores the bytes has the checkpoint again.
        (c.store / "run/step-1/a.bin").write_bytes(b"a" * SIZE)
        assert path.read_bytes() == b"a" * SIZE
        assert cli("verify", c.store / "run/step-1").returncode == 0


def test_an_edit_while_nothing_is_mounted_is_caught_by_the_next_mount(tmp_path: Path):
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        save(node.mnt / "step-1", a=b"a" * SIZE)
        until("the publication", lambda: os.path.lexists(c.store / "latest"))
        assert node.stop().returncode == 0
        edit(c.store / "step-1/a.bin", at=SIZE - 1)
        node.start()
        assert code_of_read(node.mnt / "step-1/a.bin") == errno.EIO
        assert has_event(node, "verify-failed", "step-1/a.bin")


def test_verify_tells_what_was_changed_beside_the_stored_bytes(tmp_path: Path):
    """I13: who reads the store without ckptgate reads the published directory and `latest`."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        for name in ("step-1", "step-2"):
            save(node.mnt / "run" / name, a=b"a" * SIZE, b=b"b")
            until("latest", lambda: os.readlink(c.store / "run/latest") == name)  # noqa: B023
        shown = c.store / "run/step-2"
        assert cli("verify", shown).returncode == 0
        (shown / "a.bin").unlink()
        (shown / "a.bin").write_bytes(b"A" * SIZE)
        (shown / "b.bin").unlink()
        (shown / "more.bin").touch()
        (c.store / "run/latest").unlink()
        (c.store / "run/latest").symlink_to("step-1")
        found = cli("verify", shown)
        assert found.returncode == 5
        said = found.stdout + found.stderr
        for word in ("step-2/a.bin", "step-2/b.bin", "step-2/more.bin", "latest: "):
            assert word in said, said


def test_a_run_in_the_place_of_a_checkpoint_is_called_one(tmp_path: Path):
    with cluster(tmp_path) as c:
        run = c.nodes[0].mnt / "run"
        save(run / "step-1", a=b"1")
        until("it is shown", (c.store / "run/step-1").is_dir)
        for command in ("verify", "show"):
            for path in (run, c.store / "run"):
                done = cli(command, path)
                assert done.returncode == 64
                assert f"{path} is a run: name a checkpoint in it" in done.stderr
                assert f"ckptgate ls {path}" in done.stderr
            assert cli(command, run / "step-1").returncode == 0
            assert cli(command, run / "latest").returncode == 0
            assert cli(command, c.store / "run/step-1").returncode == 0


def test_a_path_that_no_daemon_serves_is_told_from_one_with_another_name(tmp_path: Path):
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        run = node.mnt / "run"
        save(run / "step-1", a=b"1")
        until("it is shown", (c.store / "run/step-1").is_dir)
        # A path in the store leads to the daemon that serves it here.
        for command in (("wait",), ("pin",), ("unpin",), ("status",)):
            done = cli(command[0], c.store / "run/step-1", *command[1:])
            assert done.returncode == 0, done.stderr
        done = cli("umount", c.store)
        assert done.returncode == 4
        assert f"is a store, mounted on {node.mnt}" in done.stderr
        assert f"name {node.mnt}\n" in done.stderr
        kill_daemon(node.spool)
        for word, path in (("status", run), ("ls", run), ("wait", run / "step-1")):
            done = cli(word, path)
            assert done.returncode == 4, word
            assert f"is in the mount {node.mnt}, whose daemon has died" in done.stderr
            assert f"ckptgate mount STORE {node.mnt}" in done.stderr


def test_a_path_in_a_store_that_several_daemons_serve_is_refused(tmp_path: Path):
    with cluster(tmp_path, nodes=2) as c:
        save(c.nodes[0].mnt / "run/step-1", a=b"1")
        until("it is shown", (c.store / "run/step-1").is_dir)
        done = cli("pin", c.store / "run/step-1")
        assert done.returncode == 64
        assert all(str(node.mnt) in done.stderr for node in c.nodes)
        assert f"name {c.nodes[0].mnt}/run/step-1\n" in done.stderr
        reports = json.loads(cli("status", c.store / "run", "--json").stdout)
        assert [report["mountpoint"] for report in reports] == [str(n.mnt) for n in c.nodes]


def test_ls_tells_which_are_pinned(tmp_path: Path):
    with cluster(tmp_path) as c:
        run = c.nodes[0].mnt / "run"
        for name in ("step-1", "step-2"):
            save(run / name, a=b"1")
        assert cli("pin", run / "step-1").returncode == 0
        head, first, second = cli("ls", run).stdout.splitlines()
        assert head.split()[-1] == "KEPT"
        assert first.startswith("step-1")
        assert first.endswith("pinned")
        assert second.startswith("step-2")
        assert "pinned" not in second


def test_an_empty_run_id_is_refused():
    done = cli("exec", "--run-id", "", "--", "true")
    assert done.returncode == 64
    assert "--run-id is empty" in done.stderr


def test_mv_of_a_committed_checkpoint_or_its_revision_leaves_everything_as_it_was(tmp_path: Path):
    """I8: `mv` says that it is not permitted; no copy, no second name, nothing lost."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        run = node.mnt / "run"
        save(run / "step-3", a=b"a" * SIZE, b=b"b")
        until("latest", lambda: os.path.lexists(c.store / "run/latest"))
        (run / "elsewhere").mkdir()

        def check_refused(expected: dict[str, bytes]) -> None:
            for target in (run / "step-33", run / "old", run / "elsewhere"):
                moved = subprocess.run(
                    ["mv", run / "step-3", target], capture_output=True, text=True, check=False
                )
                assert moved.returncode != 0
                assert "not permitted" in moved.stderr, moved.stderr
            assert sorted(os.listdir(run)) == ["elsewhere", "latest", "step-3"]
            assert os.listdir(run / "elsewhere") == []
            assert tree(run / "step-3") == expected

        before = {"a.bin": b"a" * SIZE, "b.bin": b"b"}
        check_refused(before)
        (run / "step-3/b.bin").write_bytes(b"edited")
        check_refused({**before, "b.bin": b"edited"})
        assert "rename-refused" in node.log()
        other = "import sys; print(open(sys.argv[1] + '/b.bin').read())"
        assert job(other, run / "step-3", run_id="other").stdout == "b\n"
        done = cli("commit", run / "step-3", "--all", "--wait", "--timeout", "30")
        assert done.returncode == 0, done.stderr
        assert tree(run / "step-3") == {**before, "b.bin": b"edited"}
        assert c.committed("run") == ["step-3"]


RANK = """
import os, sys, ckptgate
path, rank = sys.argv[1], int(sys.argv[2])
os.makedirs(path, exist_ok=True)
with open(f"{path}/shard-{rank}.pt", "wb") as f:
    f.write(os.urandom(100_000))
ckptgate.commit(path, rank, 4)
if rank == 3:
    ckptgate.wait(path, 60)
    ckptgate.commit(path, rank, 4)  # a retry: the reply may have been lost
"""


def test_ranks_commit_bytes_of_their_own_under_torchs_names(tmp_path: Path):
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        for rank in range(4):
            done = job(RANK, node.mnt / "run/step-1", str(rank))
            assert done.returncode == 0, done.stderr
        until("the publication", lambda: os.path.lexists(c.store / "run/latest"))
        assert sorted(tree(c.store / "run/step-1")) == [f"shard-{r}.pt" for r in range(4)]


def test_a_hidden_checkpoint_says_so_in_status(tmp_path: Path):
    code = """
import os, signal, sys
os.makedirs(sys.argv[1])
f = open(sys.argv[1] + "/log.txt", "w")
f.write("half"); f.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        assert job(code, node.mnt / "run/step-1").returncode < 0
        until("the reason", lambda: [r for r in node.attempts("step-1") if "hidden" in r["reason"]])
        (row,) = node.attempts("step-1")
        assert "the writer of 'log.txt' died with it open" in row["reason"]
        done = cli("wait", node.mnt / "run/step-1", "--timeout", "0.1")
        assert done.returncode == 2
        assert "the writer of 'log.txt' died with it open" in done.stderr
        done = node.stop()
        assert "left in the spool: run/step-1 (open): " in done.stderr


LEAK = """
import mmap, os, sys
path, kind = sys.argv[1:]
os.makedirs(path)
for name in ("a.bin", "b.bin"):
    fd = os.open(path + "/" + name, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"a" * 300000)
    if name == "a.bin":
        back, go = os.pipe(), os.pipe()
        if kind == "mapping":
            mapped = mmap.mmap(fd, 0)
        elif not (child := os.fork()):
            os.read(go[0], 1)
            os.pwrite(fd, b"X" * 300000, 0)
            os.write(back[1], b"d")
            os._exit(0)
    os.close(fd)
print("saved")
sys.stdin.readline()
if kind == "mapping":
    mapped[:] = b"X" * 300000
    mapped.flush()
else:
    os.write(go[1], b"g")
    os.read(back[0], 1)
print("written")
sys.stdin.readline()
"""

READ = """
import mmap, sys
good = b"a" * 300000
path = sys.argv[1] + "/a.bin"
early = open(path, "rb")
early_map = mmap.mmap(early.fileno(), 0, prot=mmap.PROT_READ)
print(early_map[:10] == good[:10])
sys.stdin.readline()
late = open(path, "rb")
late_map = mmap.mmap(late.fileno(), 0, prot=mmap.PROT_READ)
early.seek(0)
print([early.read() == good, early_map[:] == good, late.read() == good, late_map[:] == good])
"""


@pytest.mark.parametrize("kind", ["descriptor", "mapping"])
@pytest.mark.parametrize("passes", [True, False], ids=["passthrough", "fallback"])
def test_a_leaked_writer_changes_no_committed_byte_for_readers(
    tmp_path: Path, passes: bool, kind: str
):
    """I8: what a child's descriptor or a shared mapping writes after the COMMIT nobody reads."""
    config = f"passthrough = {'true' if passes else 'false'}\n"
    with cluster(tmp_path, config=config) as c:
        (node,) = c.nodes
        path = node.mnt / "run/step-1"
        with start_job(LEAK, path, kind) as writer:
            assert writer.stdout.readline() == "saved\n"
            done = cli("commit", path, "--all", "--wait", "--timeout", "30")
            assert done.returncode == 0, done.stderr
            with start_job(READ, path, run_id="reader") as reader:
                assert reader.stdout.readline() == "True\n"
                writer.stdin.write("\n")
                writer.stdin.flush()
                assert writer.stdout.readline() == "written\n"
                said, errors = reader.communicate("\n", timeout=30)
                assert said == "[True, True, True, True]\n", errors
            expected = dict.fromkeys(("a.bin", "b.bin"), b"a" * SIZE)
            assert tree(path) == expected
            writer.communicate("\n", timeout=30)
        until("the publication", lambda: os.path.lexists(c.store / "run/latest"))
        assert tree(path) == tree(c.store / "run/step-1") == expected
