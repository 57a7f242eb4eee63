"""Many processes that make, move and remove the same names; on one node and on two."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import job, start_job, until
from tests.races.kit import Run, save

pytestmark = [pytest.mark.fuse]

TOGETHER = """
import json, os, sys, time
path, number, start = sys.argv[1], int(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
sys.stdin.readline()
won = []
{body}
print(json.dumps(won))
"""


def together(body: str, path: Path, count: int, run_id: str = "one", other: Path | None = None):
    """*count* processes do *body* at the same time, every second one in *other*; what each won."""
    code = TOGETHER.replace("{body}", body)
    with contextlib.ExitStack() as stack:
        children: list[Any] = []
        for number in range(count):
            where = path if other is None or number % 2 == 0 else other
            child = start_job(code, where, str(number), "", run_id=run_id)
            children.append(stack.enter_context(child))
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        found = []
        for child in children:
            out, error = child.communicate(timeout=60)
            assert child.returncode == 0, error
            found.append(json.loads(out))
        return found


def says(code: str, path: Path, expected: str) -> bool:
    """Whether a process of another job prints that."""
    return job(code, path, run_id="another").stdout == expected


@pytest.fixture(params=["plain", "step-1"])
def place(run: Run, request) -> Path:
    """A plain directory, or an open checkpoint of the job `one`."""
    path = run.here / request.param
    made = job("import os, sys; os.mkdir(sys.argv[1])", path, run_id="one")
    assert made.returncode == 0, made.stderr
    return path


def test_exactly_one_of_many_creates_a_name(place: Path):
    """O_EXCL, mkdir and symlink of the same names by 8 processes."""
    body = """
for n in range(25):
    for kind in ("file", "dir", "link"):
        name = f"{path}/{kind}-{n}"
        try:
            if kind == "file":
                fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(fd, str(number).encode())
                os.close(fd)
            elif kind == "dir":
                os.mkdir(name)
            else:
                os.symlink(f"to-{number}", name)
            won.append(f"{kind}-{n}")
        except FileExistsError:
            os.lstat(name)
"""
    won = together(body, place, 8)
    names = [name for names in won for name in names]
    assert sorted(names) == sorted(f"{k}-{n}" for k in ("file", "dir", "link") for n in range(25))
    read = "import sys; print(open(sys.argv[1]).read())"
    owner = next(n for n, names in enumerate(won) if "file-3" in names)
    assert job(read, place / "file-3", run_id="one").stdout == f"{owner}\n"


def test_exactly_one_of_many_moves_or_removes_a_name(place: Path):
    """rename of one source by 6 processes; unlink of one name by 6."""
    fill = """
import os, sys
for n in range(25):
    open(f"{sys.argv[1]}/source-{n}", "w").write("1")
    open(f"{sys.argv[1]}/gone-{n}", "w").close()
"""
    assert job(fill, place, run_id="one").returncode == 0
    body = """
for n in range(25):
    for move in (
        lambda: os.rename(f"{path}/source-{n}", f"{path}/target-{n}-{number}"),
        lambda: os.unlink(f"{path}/gone-{n}"),
    ):
        try:
            move()
            won.append(n)
        except FileNotFoundError:
            pass
"""
    won = together(body, place, 6)
    assert sorted(n for numbers in won for n in numbers) == sorted([*range(25)] * 2)
    look = "import os, sys; print(*sorted(os.listdir(sys.argv[1])))"
    names = job(look, place, run_id="one").stdout.split()
    assert sorted(name.split("-")[1] for name in names) == sorted(map(str, range(25)))
    assert all(name.startswith("target-") for name in names)


def test_a_directory_is_made_by_many_on_two_nodes(run: Run):
    """mkdir -p of the same paths by all ranks, in one shared checkpoint; files of all in it."""
    body = """
for n in range(6):
    os.makedirs(f"{path}/step-1/a/{n}", exist_ok=True)
    open(f"{path}/step-1/a/{n}/{number}", "w").write(str(number))
    won.append(n)
"""
    assert together(body, run.here, 4, other=run.there) == [[*range(6)]] * 4
    end = "import ckptgate, sys; ckptgate.commit(sys.argv[1]); ckptgate.wait(sys.argv[1], 60)"
    done = job(end, run.here / "step-1", run_id="one")
    assert done.returncode == 0, done.stderr
    look = "import os, sys; print(sum(len(f) for _, _, f in os.walk(sys.argv[1])))"
    for where in (run.here, run.there):
        until("all files", partial(says, look, where / "step-1", "24\n"))


@pytest.mark.parametrize(
    ("kind", "count"), [("plain", 2), ("open", 2), ("committed", 2), ("committed", 3)]
)
def test_several_processes_remove_the_same_tree(run: Run, kind: str, count: int):
    """As on a local disk: nothing is left, and no `rm -rf` has anything to say."""
    name = "plain" if kind == "plain" else "step-1"
    path = run.here / name
    fill = """
import os, sys, ckptgate
path, kind = sys.argv[1:]
for n in range(8):
    os.makedirs(f"{path}/{n}/deep")
    for m in range(5):
        open(f"{path}/{n}/deep/{m}", "w").write("1")
if kind == "committed":
    ckptgate.commit(path, 0, 1)
    ckptgate.wait(path, 60)
"""
    done = job(fill, path, kind, run_id="one")
    assert done.returncode == 0, done.stderr
    if kind == "committed":
        save(run.here / "step-2", run_id="one")
    if kind == "plain":
        # What another node has seen, it must see go.
        count_files = "import os, sys; print(sum(len(f) for _, _, f in os.walk(sys.argv[1])))"
        until("all on the other node", partial(says, count_files, run.there / name, "40\n"))
    body = """
import subprocess
done = subprocess.run(["rm", "-rf", path], stderr=subprocess.PIPE, text=True)
won.append(done.stderr)
"""
    assert together(body, path, count) == [[""]] * count
    look = (
        "import os, sys; folder, name = os.path.split(sys.argv[1]); "
        "print(os.path.lexists(sys.argv[1]) or name in os.listdir(folder))"
    )
    assert job(look, path, run_id="one").stdout == "False\n"
    for where in (run.here, run.there):
        until("its end for all", partial(says, look, where / name, "False\n"))


def test_a_log_is_followed_on_both_nodes_while_it_is_written(run: Run):
    """`tail -f`: whole lines, in order, each once; on the other node within seconds."""
    path = run.here / "train.log"
    path.write_text("line 0\n")
    until("the log on the other node", (run.there / "train.log").exists)
    write = """
import sys, time
with open(sys.argv[1], "a", buffering=1) as log:
    for n in range(1, 61):
        log.write(f"line {n}\\n")
        time.sleep(0.05)
"""
    follow = """
import subprocess, sys
with subprocess.Popen(["tail", "-n", "+1", "-s", "0.1", *sys.argv[2:], sys.argv[1]],
                      stdout=subprocess.PIPE, text=True) as tail:
    for n in range(61):
        line = tail.stdout.readline()
        assert line == f"line {n}\\n", (n, line)
    tail.kill()
print("all")
"""
    with (
        # By name on the other node: a new version of the file may be a new inode there.
        start_job(follow, path, "-f", run_id="two") as here,
        start_job(follow, run.there / "train.log", "-F", "---disable-inotify") as there,
    ):
        done = job(write, path, run_id="one")
        assert done.returncode == 0, done.stderr
        for child in (here, there):
            out, error = child.communicate(timeout=40)
            assert out == "all\n", error


def test_no_size_is_below_what_was_read_of_a_log_that_another_node_writes(run: Run):
    """`tail` would take it for a truncation, and show all of it again."""
    path, there = run.here / "grows.log", run.there / "grows.log"
    path.write_text("line 0\n")
    until("the log on the other node", there.exists)
    store = run.pair.store / run.here.name / "grows.log"
    for number in range(1, 6):
        # The other node asks the store, which has more by the time that it is read there.
        until("all so far", lambda: there.stat().st_size == path.stat().st_size)
        with path.open("a") as log:
            log.write(f"line {number}\n")
        until("it in the store", lambda: store.stat().st_size == path.stat().st_size)
        fd = os.open(there, os.O_RDONLY)
        try:
            assert len(os.read(fd, 1000)) <= os.fstat(fd).st_size
        finally:
            os.close(fd)


def test_directories_are_renamed_on_one_node_while_the_other_writes_in_them(run: Run):
    """As Orbax does: rank 0 makes `tmp`, all write, rank 0 renames it; one whole checkpoint.

    Slowly enough that votes are out when it is renamed: they speak of it by its old name.
    """
    ready = "import os, sys; os.makedirs(sys.argv[1] + '/tmp.a/sub')"
    assert job(ready, run.here / "step-1", run_id="one", RANK="0", WORLD_SIZE="2").returncode == 0
    write = """
import os, sys, time
path, rank = sys.argv[1:]
for n in range(20):
    time.sleep(0.12)
    for place in ("tmp.a", "final.a"):
        try:
            with open(f"{path}/{place}/sub/{rank}-{n}", "w") as stream:
                stream.write(f"{rank} {n}")
            break
        except FileNotFoundError:
            time.sleep(0.15)
    else:
        raise AssertionError((place, n, os.listdir(path)))
print("written")
"""
    rename = (
        "import os, sys, time; time.sleep(1.1); "
        "os.rename(sys.argv[1] + '/tmp.a', sys.argv[1] + '/final.a')"
    )
    one = {"run_id": "one", "WORLD_SIZE": "2"}
    with (
        start_job(write, run.here / "step-1", "0", RANK="0", **one) as first,
        start_job(write, run.there / "step-1", "1", RANK="1", **one) as second,
    ):
        assert job(rename, run.here / "step-1", RANK="0", **one).returncode == 0
        for child in (first, second):
            out, error = child.communicate(timeout=60)
            assert out == "written\n", error
    commit = "import sys, ckptgate; ckptgate.commit(sys.argv[1], int(sys.argv[2]), 2)"
    for rank, where in enumerate((run.here, run.there)):
        done = job(commit, where / "step-1", str(rank), RANK=str(rank), **one)
        assert done.returncode == 0, done.stderr
    wait = "import sys, ckptgate; ckptgate.wait(sys.argv[1], 60)"
    done = job(wait, run.here / "step-1", **one)
    assert done.returncode == 0, done.stderr
    look = "import os, sys; print(*sorted(os.listdir(sys.argv[1])))"
    expected = sorted(f"{rank}-{n}" for rank in (0, 1) for n in range(20))
    for where in (run.here, run.there):
        found = job(look, where / "step-1/final.a/sub").stdout.split()
        assert found == expected, os.listdir(where / "step-1")
        assert job(look, where / "step-1").stdout.split() == ["final.a"]
