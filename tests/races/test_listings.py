"""Listings of directories that others change: what was there all along is in each of them, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.harness import job, start_job, until
from tests.races.kit import Run, save, watcher, watching

pytestmark = [pytest.mark.fuse]

LIST = watcher(
    """
fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
names, size = [], sizes[count % len(sizes)]
while (got := libc.getdents64(fd, buffer, size)) > 0:
    names += parse(buffer.raw[:got])
if got < 0:
    raise OSError(ctypes.get_errno(), "getdents64")
check(names)
# From a position in the middle: the same rest.
marks = [mark for _, mark in names]
middle = marks[len(marks) // 2]
os.lseek(fd, middle, os.SEEK_SET)
rest = []
while (got := libc.getdents64(fd, buffer, 4096)) > 0:
    rest += parse(buffer.raw[:got])
after = {name for name, _ in names[len(marks) // 2 + 1 :]} & stays
found = [name for name, _ in rest if name in stays]
if sorted(found) != sorted(after):
    bad(f"from the middle: {sorted(after ^ set(found))[:5]}")
os.lseek(fd, 0, os.SEEK_SET)
again = []
while (got := libc.getdents64(fd, buffer, 32768)) > 0:
    again += parse(buffer.raw[:got])
check(again)
os.close(fd)
with os.scandir(path) as entries:
    check([(entry.name, entry.stat(follow_symlinks=False).st_ino) for entry in entries
           if entry.name in stays])
""",
    """
import ctypes, struct
path, stays, sizes = words[0], set(words[1].split(",")), [512, 1024, 4096, 65536]
buffer = ctypes.create_string_buffer(1 << 16)
libc = ctypes.CDLL(None, use_errno=True)

def parse(data):
    found, at = [], 0
    while at < len(data):
        _, mark, size = struct.unpack_from("<QqH", data, at)
        found.append((data[at + 19 : at + size].split(b"\\0")[0].decode(), mark))
        at += size
    return found

def check(names):
    seen = [name for name, _ in names]
    if len(seen) != len(set(seen)):
        bad(f"twice: {[name for name in seen if seen.count(name) > 1][:5]}")
    missing = stays - set(seen)
    if missing:
        bad(f"missing: {sorted(missing)[:5]}")
""",
)

STIR = """
import os, sys, random
path, kind, seed = sys.argv[1:]
rng, mine = random.Random(seed), []
os.set_blocking(0, False)
print("ready", flush=True)
while True:
    try:
        if os.read(0, 1) is not None:
            break
    except BlockingIOError:
        pass
    name = f"{path}/{kind}-{seed}-{rng.randrange(40)}"
    if kind == "create":
        open(name, "w").close()
        mine.append(name)
        if len(mine) > 20:
            try:
                os.unlink(mine.pop(rng.randrange(len(mine))))
            except FileNotFoundError:
                pass
    elif kind == "rename":
        open(name, "a").close()
        os.rename(name, f"{path}/{kind}-{seed}-{rng.randrange(40)}")
    else:
        try:
            os.mkdir(name)
        except FileExistsError:
            os.rmdir(name)
"""


@pytest.mark.parametrize(
    "count",
    [
        1,
        100,
        pytest.param(800, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("place", ["plain", "step-1"])
def test_names_that_stay_are_listed_once_each(run: Run, place: str, count: int):
    """Small buffers, positions, rewinds, and entries with attributes, on the node that changes."""
    path = run.here / place
    fill = (
        "import os, sys; os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); "
        "[os.mknod(f'stays-{n}', 0o100644) for n in range(int(sys.argv[2]))]"
    )
    done = job(fill, path, str(count), run_id="one")
    assert done.returncode == 0, done.stderr
    stays = ",".join(f"stays-{number}" for number in range(min(count, 2000)))
    words: list[str | Path] = [path, stays]
    readers = [(LIST, "one", words)] * 2
    if place == "plain":
        readers.append((LIST, "two", words))
    kinds = ("create", "rename", "mkdir")
    with (
        start_job(STIR, path, kinds[0], "1", run_id="one") as first,
        start_job(STIR, path, kinds[1], "2", run_id="one") as second,
        start_job(STIR, path, kinds[2], "3", run_id="one") as third,
    ):
        stirrers = [first, second, third]
        for child in stirrers:
            assert child.stdout.readline() == "ready\n"
        with watching(*readers) as looks:
            until("some changes", lambda: all(child.poll() is None for child in stirrers))
            time_to_look = job("import time; time.sleep(1.5)")
            assert time_to_look.returncode == 0
        for child in stirrers:
            _, error = child.communicate("x", timeout=60)
            assert child.returncode == 0, error
    assert min(looks) >= 1


def test_a_run_is_listed_whole_while_commits_come_and_go(run: Run):
    """On both nodes, for the job that saves and for others."""
    for step in (0, 1):
        save(run.here / f"step-{step}", run_id="one")
    (run.here / "train.log").write_text("1")
    (run.here / "sub").mkdir()
    until("the names on the other node", lambda: {"sub", "latest"} <= set(listed(run.there)))
    stays = "step-0,step-1,latest,train.log,sub"
    children: list[tuple[str, str, list[str | Path]]] = [
        (LIST, run_id, [where, stays])
        for run_id, where in [("one", run.here), ("two", run.here), ("two", run.there)]
    ]
    code = """
import os, shutil, sys, ckptgate
run = sys.argv[1]
for step in range(2, 8):
    path = f"{run}/step-{step}"
    os.mkdir(path)
    open(path + "/a.bin", "w").write("1")
    if step % 3 == 0:
        shutil.rmtree(path)
        continue
    ckptgate.commit(path, 0, 1)
    ckptgate.wait(path, 60)
    if step == 5:
        shutil.rmtree(f"{run}/step-4")
"""
    with watching(*children) as looks:
        done = job(code, run.here, run_id="one")
        assert done.returncode == 0, done.stderr
    assert min(looks) >= 3


def listed(path: Path) -> list[str]:
    """Names that a process of another job finds."""
    done = job("import os, sys; print(*os.listdir(sys.argv[1]))", path, run_id="two")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_open_checkpoint_is_listed_whole_by_both_its_nodes(run: Run):
    """Rank 0 makes directories, every rank writes; names that are known stay listed everywhere."""
    made = job("import os, sys; os.makedirs(sys.argv[1] + '/d')", run.here / "step-1", run_id="one")
    assert made.returncode == 0, made.stderr
    wait = "import os, sys, time\nwhile 'd' not in os.listdir(sys.argv[1]): time.sleep(0.05)"
    assert job(wait, run.there / "step-1", run_id="one").returncode == 0
    stir = "import os, sys\nfor n in range(60): open(f'{sys.argv[1]}/d/{sys.argv[2]}-{n}', 'w')"
    with watching(
        (LIST, "one", [run.here / "step-1", "d"]), (LIST, "one", [run.there / "step-1", "d"])
    ) as looks:
        for number, where in enumerate((run.here, run.there)):
            done = job(stir, where / "step-1", str(number), run_id="one")
            assert done.returncode == 0, done.stderr
    assert min(looks) >= 3
