"""Committed checkpoints, their revisions and removal, pointers: who sees what before and after."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Gateway, job, start_job, until

pytestmark = [pytest.mark.fuse]

READ = """
import os, sys
path = sys.argv[1]
try:
    print(sorted(os.listdir(path)), open(f"{path}/a.bin", "rb").read(100))
except OSError as exc:
    print(exc.errno)
"""


def seen(path: Path, run_id: str = "another") -> str:
    """What a process of another job finds in the checkpoint."""
    done = job(READ, path, run_id=run_id)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(path: Path) -> dict[str, object]:
    """The checkpoint's state as its attribute says."""
    return json.loads(os.getxattr(path, "user.ckptgate.state"))


def commit(path: Path) -> None:
    """Commit for all ranks, and wait."""
    os.setxattr(path, "user.ckptgate.commit", b"all")
    until(f"the commit of {path.name}", lambda: state(path)["state"] == "committed")


def save(path: Path, data: bytes = b"1") -> Path:
    """A committed checkpoint with one file."""
    path.mkdir()
    (path / "a.bin").write_bytes(data)
    commit(path)
    return path


def test_an_open_checkpoint_is_seen_by_its_job_only(run: Path):
    """I8: until the COMMIT others find nothing by name, nothing in the listing; then all of it."""
    path = run / "step-1"
    path.mkdir()
    (path / "a.bin").write_bytes(b"1")
    assert seen(path) == str(errno.ENOENT)
    listed = job("import os,sys; print(os.listdir(sys.argv[1]))", run, run_id="another")
    assert listed.stdout.strip() == "[]"
    assert os.listdir(run) == ["step-1"]
    commit(path)
    assert seen(path) == "['a.bin'] b'1'"
    assert sorted(os.listdir(run)) == ["latest", "step-1"]
    assert os.readlink(run / "latest") == "step-1"


WRITE = "import os,sys; os.mkdir(sys.argv[1]); open(sys.argv[1] + '/a.bin', 'w').write(sys.argv[2])"


def test_a_session_and_a_job_write_the_same_name_apart(run: Path):
    """Each sees its own; neither disturbs the other."""
    (run / "step-1").mkdir()
    (run / "step-1/a.bin").write_bytes(b"session")
    assert job(WRITE, run / "step-1", "job", run_id="one").returncode == 0
    assert seen(run / "step-1", "one") == "['a.bin'] b'job'"
    assert (run / "step-1/a.bin").read_bytes() == b"session"


def test_a_newer_job_ends_what_an_older_one_had_not_sealed(run: Path):
    """I4: the FENCE of the newer job; the older one's checkpoint is given up."""
    for run_id in ("old", "new"):
        assert job(WRITE, run / "step-1", run_id, run_id=run_id).returncode == 0
    until("the fence", lambda: seen(run / "step-1", "old") == str(errno.ENOENT))
    assert seen(run / "step-1", "new") == "['a.bin'] b'new'"


def test_a_listing_right_after_the_commit_is_complete(run: Path):
    """Whoever saw the state `committed` finds the name, in this process and in any other."""
    for step in range(1, 6):
        save(run / f"step-{step}")
        expected = ["latest", *(f"step-{n}" for n in range(1, step + 1))]
        assert sorted(os.listdir(run)) == expected
        code = "import os,sys; print(sorted(os.listdir(sys.argv[1])))"
        assert job(code, run, run_id=f"reader{step}").stdout.strip() == str(expected)


def test_attributes_and_content_are_kept_by_the_commit(node: Gateway, shared: Cluster, run: Path):
    """Modes (0600 among them), times, symlinks and empty directories; in the store too."""
    path = run / "step-1"
    (path / "empty").mkdir(parents=True)
    (path / "a.bin").write_bytes(b"1")
    (path / "b.bin").write_bytes(b"2")
    (path / "link").symlink_to("a.bin")
    (path / "a.bin").chmod(0o600)
    os.utime(path / "a.bin", ns=(10**18, 10**18 + 123_456_789))
    before = (path / "b.bin").stat()
    commit(path)
    stored = shared.store / run.name / "step-1"
    until("the publication", stored.is_dir)
    for root in (path, stored):
        found = (root / "a.bin").stat()
        assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o600, 10**18 + 123_456_789)
        assert (root / "b.bin").stat().st_mtime_ns == before.st_mtime_ns
        assert os.readlink(root / "link") == "a.bin"
        assert os.listdir(root / "empty") == []


def test_descriptors_and_mappings_of_an_open_checkpoint_survive_its_commit(run: Path):
    path = run / "step-1"
    path.mkdir()
    (path / "a.bin").write_bytes(b"a" * 5000)
    with (path / "a.bin").open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        commit(path)
        assert stream.read() == b"a" * 5000
        assert mapped[:] == b"a" * 5000
        with (path / "a.bin").open("rb") as again:
            assert again.read() == b"a" * 5000
        mapped.close()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("open(p + '/a.bin', 'wb').write(b'new')", id="truncating-open"),
        pytest.param("f = open(p + '/a.bin', 'r+b'); f.write(b'new'); f.close()", id="overwrite"),
        pytest.param("open(p + '/a.bin', 'ab').write(b'new')", id="append"),
        pytest.param("os.truncate(p + '/a.bin', 1)", id="truncate"),
        pytest.param("open(p + '/b.bin', 'wb').write(b'new')", id="create"),
        pytest.param("os.unlink(p + '/a.bin')", id="unlink"),
        pytest.param("os.rename(p + '/a.bin', p + '/sub/c')", id="rename"),
        pytest.param("os.mkdir(p + '/new')", id="mkdir"),
        pytest.param("os.unlink(p + '/sub/x'); os.rmdir(p + '/sub')", id="rmdir"),
        pytest.param("os.symlink('a.bin', p + '/link')", id="symlink"),
        pytest.param("os.chmod(p + '/a.bin', 0o400)", id="chmod"),
        pytest.param("os.utime(p + '/a.bin', (5, 5))", id="utime"),
    ],
)
def test_every_change_of_a_committed_checkpoint_is_a_revision(run: Path, change: str):
    """I8: the writer sees its change at once; others see nothing of it, until it is committed."""
    path = run / "step-1"
    (path / "sub").mkdir(parents=True)
    (path / "a.bin").write_bytes(b"old bytes")
    (path / "sub/x").write_bytes(b"x")
    commit(path)
    show = """
def show(p):
    found = []
    for root, dirs, files in sorted(os.walk(p)):
        dirs.sort()
        for name in sorted(dirs + files):
            full = os.path.join(root, name)
            stat = os.lstat(full)
            is_file = os.path.isfile(full) and not os.path.islink(full)
            data = open(full, 'rb').read() if is_file else b''
            time = stat.st_mtime_ns if is_file else 0
            found.append((os.path.relpath(full, p), oct(stat.st_mode), time, data))
    return found
"""
    look = f"import os, sys\n{show}\nprint(show(sys.argv[1]))"
    before = job(look, path, run_id="another")
    code = f"""
import os, sys, ckptgate
{show}
p = sys.argv[1]
before = show(p)
{change}
after = show(p)
assert after != before, after
print(after, flush=True)
sys.stdin.readline()
ckptgate.commit(p, 0, 1)
ckptgate.wait(p, 60)
assert show(p) == after, (show(p), after)
"""
    with start_job(code, path, run_id="writer") as writer:
        assert writer.stdout is not None
        after = writer.stdout.readline()
        assert after, writer.communicate("\n")[1]
        assert job(look, path, run_id="another").stdout == before.stdout
        _, problem = writer.communicate("\n", timeout=60)
    assert writer.returncode == 0, problem
    until("the revision", lambda: job(look, path, run_id="another").stdout == after)


def test_a_reader_of_a_committed_file_keeps_its_bytes_over_a_revision(run: Path):
    path = save(run / "step-1", b"old" * 1000)
    with (path / "a.bin").open("rb", buffering=0) as stream:
        mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        (path / "a.bin").write_bytes(b"new")
        assert (path / "a.bin").read_bytes() == b"new"
        commit(path)
        assert stream.read(6) == b"oldold"
        assert mapped[:6] == b"oldold"
        mapped.close()
    assert seen(path) == "['a.bin'] b'new'"


def test_a_committed_checkpoint_is_not_renamed_nor_renamed_over(run: Path):
    save(run / "step-1")
    with pytest.raises(OSError) as caught:
        (run / "step-1").rename(run / "step-2")
    assert caught.value.errno == errno.EPERM
    (run / "step-3").mkdir()
    with pytest.raises(OSError) as caught:
        (run / "step-3").rename(run / "step-1")
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(FileExistsError):
        (run / "step-1").mkdir()


def test_removing_a_committed_checkpoint_hides_it_from_the_job(run: Path):
    """I9: gone at once for the job that removed it; others keep it while it is the newest one."""
    path = save(run / "step-1")
    with (path / "a.bin").open("rb") as stream:
        shutil.rmtree(path)
        assert stream.read() == b"1"
    assert not path.exists()
    assert "step-1" not in os.listdir(run)
    assert seen(path) == "['a.bin'] b'1'"
    path.mkdir()
    (path / "a.bin").write_bytes(b"again")
    commit(path)
    assert seen(path) == "['a.bin'] b'again'"


def test_a_removal_by_one_job_leaves_others_all_that_is_in_it(run: Path):
    """I8: what a job removes is dead for it alone, also right after others looked."""
    for number in range(5):
        path = run / f"step-{number}"
        (path / "d").mkdir(parents=True)
        (path / "d/a.bin").write_bytes(b"1")
        commit(path)
        code = "import os, shutil, sys; os.listdir(sys.argv[1]); shutil.rmtree(sys.argv[1])"
        done = job(code, path, run_id="remover")
        assert done.returncode == 0, done.stderr
        assert (os.listdir(path), os.listdir(path / "d")) == (["d"], ["a.bin"])


def test_an_older_checkpoint_that_is_removed_goes_for_everybody(shared: Cluster, run: Path):
    save(run / "step-1")
    save(run / "step-2")
    subprocess.run(["rm", "-rf", run / "step-1"], check=True)
    until("its end", lambda: not (shared.store / run.name / "step-1").exists())
    until("the same in the mount", lambda: seen(run / "step-1") == str(errno.ENOENT))
    assert os.readlink(run / "latest") == "step-2"


def test_two_processes_remove_the_same_committed_checkpoint(run: Path):
    path = save(run / "step-1")
    for number in range(3):
        (path / f"b{number}").write_bytes(b"x")
    commit(path)
    save(run / "step-2")
    command = ["rm", "-rf", str(path)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert said == [b"", b""]
    assert not path.exists()


def test_latest_never_vanishes_while_it_moves(run: Path):
    """A reader that polls it while 200 symlinks and 12 commits replace it never gets ENOENT."""
    save(run / "step-0")
    code = """
import os, sys
path, count, seen = sys.argv[1], 0, set()
print("ready", flush=True)
os.set_blocking(0, False)
while not sys.stdin.buffer.read(1):
    target = os.readlink(path)
    data = open(f"{path}/a.bin", "rb").read()
    assert data == b"1", data
    os.stat(path)
    seen.add(target)
    count += 1
print(count, *sorted(seen))
"""
    with start_job(code, run / "latest", run_id="reader") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n", reader.communicate()[1]
        for step in range(1, 13):
            save(run / f"step-{step}")
        for number in range(200):
            (run / ".new").symlink_to(f"step-{number % 13}")
            os.replace(run / ".new", run / "latest")
        out, problem = reader.communicate("x", timeout=30)
    assert reader.returncode == 0, problem
    count, *targets = out.split()
    assert int(count) > 50
    assert len(targets) > 5


def test_a_text_pointer_is_held_until_its_target_is_committed(run: Path):
    """The job that wrote it reads it at once, others the previous value."""
    read = "import sys; print(open(sys.argv[1]).read())"
    save(run / "step-1")
    (run / "latest.txt").write_text("step-1")
    until("the pointer", lambda: job(read, run / "latest.txt", run_id="x").stdout == "step-1\n")
    (run / "step-2").mkdir()
    (run / "step-2/a.bin").write_bytes(b"2")
    (run / "latest.txt").write_text("step-2")
    assert (run / "latest.txt").read_text() == "step-2"
    assert job(read, run / "latest.txt", run_id="x").stdout == "step-1\n"
    commit(run / "step-2")
    until("the new value", lambda: job(read, run / "latest.txt", run_id="x").stdout == "step-2\n")
    assert (run / "latest.txt").read_text() == "step-2"


def test_a_pointer_that_is_removed_is_made_again_by_its_job(run: Path):
    """As Lightning does: unlink, then symlink."""
    save(run / "step-1")
    save(run / "step-2")
    (run / "latest").unlink()
    assert not os.path.lexists(run / "latest")
    look = "import os,sys; print(os.readlink(sys.argv[1]))"
    assert job(look, run / "latest", run_id="x").stdout == "step-2\n"
    (run / "latest").symlink_to("step-1")
    assert os.readlink(run / "latest") == "step-1"


def test_extended_attributes_are_the_commit_and_the_state(run: Path):
    path = run / "step-1"
    path.mkdir()
    (path / "a").touch()
    for target in (path / "a", run):
        assert os.listxattr(target) == []
        for name in ("user.ckptgate.other", "trusted.other", "security.other"):
            with pytest.raises(OSError) as caught:
                os.setxattr(target, name, b"1")
            assert caught.value.errno == errno.ENOTSUP
    for value in (b"", b"x", b"3/2", b"-1/2", b"1/0"):
        with pytest.raises(OSError) as caught:
            os.setxattr(path, "user.ckptgate.commit", value)
        assert caught.value.errno == errno.EINVAL
    assert state(path)["state"] == "open"
    with pytest.raises(OSError) as caught:
        os.getxattr(run, "user.ckptgate.state")
    assert caught.value.errno == errno.ENODATA


def test_attributes_of_users_stay_on_this_node(run: Path):
    path = save(run / "step-1", b"1")
    (run / "step-2").mkdir()
    (run / "step-2" / "a").touch()
    os.setxattr(run / "step-2" / "a", "user.note", b"mine")
    assert os.listxattr(run / "step-2" / "a") == ["user.note"]
    assert os.getxattr(run / "step-2" / "a", "user.note") == b"mine"
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "user.note", b"1")
    assert caught.value.errno == errno.EPERM


def test_many_threads_read_a_committed_file(run: Path):
    data = os.urandom(1_000_000)
    path = save(run / "step-1", data)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                assert (path / "a.bin").read_bytes() == data
        except BaseException as exc:  # noqa: BLE001
            failures.append(exc)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_checkpoint_whose_writer_was_killed_is_seen_by_nobody(run: Path):
    """The file is torn; the next process of the job begins again."""
    code = """
import os, signal, sys
os.mkdir(sys.argv[1])
f = open(sys.argv[1] + "/a.bin", "wb")
f.write(b"half")
f.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert job(code, run / "step-1").returncode != 0
    until("its end", lambda: seen(run / "step-1", "job1") == str(errno.ENOENT))
    assert job(WRITE, run / "step-1", "whole").returncode == 0
    assert seen(run / "step-1", "job1") == "['a.bin'] b'whole'"
