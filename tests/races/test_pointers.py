"""`latest` and plain names that are replaced thousands of times while everybody polls them.

What is one step on a local disk is one step here: no poller ever gets ENOENT, an empty or a torn
value, or one that goes back. What a local disk shows in between (`ln -sfn` as unlink and symlink, a
text that is truncated and written again) only the job that does it may see, on its own node.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.e2e.harness import job, start_job, until
from tests.races.kit import Run, save, watcher, watching

pytestmark = [pytest.mark.fuse]

STEPS = 4
SOME, MANY = 250, 10_000
LONG_S = 900.0
"""Enough for all replacements on a busy machine."""
LONG = [pytest.mark.full, pytest.mark.timeout(LONG_S + 120)]

LOOK = watcher(
    """
time.sleep(0.0005)
try:
    value = look()
    os.stat(path)
    os.path.realpath(path, strict=True)
except FileNotFoundError:
    if not may_miss:
        raise
    continue
if value is None:
    if not may_miss:
        bad("empty or torn")
    continue
if value < last:
    bad(f"back from {last} to {value}")
last = value
""",
    """
path, kind, may_miss, last = words[0], words[1], words[2] == "True", -1

def text_pointer():
    text = open(path).read()
    if not text.endswith("\\n"):
        return None
    return (int(text.strip().rpartition("-")[2]), text.count(" "))

def text_plain():
    text = open(path).read()
    number, _, rest = text.partition(" ")
    return int(number) if rest == "x" * (int(number or 0) * 7 % 50) + "\\n" else None

def link_pointer():
    target = os.readlink(path)
    data = open(f"{path}/a.bin").read()
    return int(target.rpartition("-")[2]) if data == "1" else None

def link_plain():
    target = os.readlink(path)
    data = open(path).read()
    return int(target.rpartition("-")[2]) if data == "1" else None

look = globals()[kind]
last = (-1, -1) if kind == "text_pointer" else -1
""",
)

WRITE = """
import os, sys
path, kind, method, count, steps = *sys.argv[1:4], *map(int, sys.argv[4:])
new = f"{os.path.dirname(path)}/.new"

def value(number):
    block = count // steps
    step = min(number // block, steps - 1)
    if kind == "link_pointer":
        return ("./" if number % 2 else "") + f"step-{step}"
    if kind == "link_plain":
        return ("./" if number % 2 else "") + f"file-{step}"
    if kind == "text_pointer":
        return f"step-{step}" + " " * (number - step * block) + "\\n"
    return f"{number} " + "x" * (number * 7 % 50) + "\\n"

def write(where, text):
    with open(where, "w") as stream:
        stream.write(text)

make = os.symlink if kind.startswith("link") else write
make = (lambda where, text: os.symlink(text, where)) if kind.startswith("link") else write
for number in range(count):
    if method == "rename":
        make(new, value(number))
        os.replace(new, path)
    elif method == "unlink":
        os.unlink(path)
        make(path, value(number))
    else:
        make(path, value(number))
"""


FIRST = """
import os, sys, time
*paths, kind = sys.argv[1:]
read = os.readlink if kind.startswith("link") else lambda path: open(path).read()
start = {"link_pointer": "step-0", "link_plain": "file-0", "text_pointer": "step-0"}.get(kind, "")
deadline = time.monotonic() + 30
for path in paths:
    while not (os.path.lexists(path) and read(path).startswith(start)):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
"""
"""Waits until others see the first value too."""


def replace(run: Run, name: str, kind: str, method: str, count: int) -> None:
    """Job `one` replaces a name on the first node; it and others poll it on both."""
    path = run.here / name
    first = job(WRITE, path, kind, "rename", "1", "1", run_id="one")
    assert first.returncode == 0, first.stderr
    start = job(FIRST, path, run.there / name, kind, run_id="two")
    assert start.returncode == 0, start.stderr
    places = [("one", run.here), ("one", run.there), ("two", run.here), ("two", run.there)]
    children: list[tuple[str, str, list[str | Path]]] = [
        (
            LOOK,
            run_id,
            [where / name, kind, str(method != "rename" and where is run.here and run_id == "one")],
        )
        for run_id, where in places
    ]
    with watching(*children) as counts:
        words = (kind, method, str(count), str(STEPS))
        with start_job(WRITE, path, *words, run_id="one") as writer:
            error = writer.communicate(timeout=LONG_S)[1]
        assert writer.returncode == 0, error
    assert min(counts) > count / 50, counts


def counts(*methods: str):
    """Each method some times, and often in the long matrix."""
    return [
        pytest.param(method, count, marks=marks, id=f"{method}-{count}")
        for method in methods
        for count, marks in ((SOME, ()), (MANY, LONG))
    ]


@pytest.mark.parametrize(("method", "count"), counts("rename", "unlink"))
def test_a_link_pointer_is_replaced_while_all_poll_it(run: Run, method: str, count: int):
    """I5, I8: never ENOENT, never back; who unlinks it sees it missing on its node."""
    for step in range(STEPS):
        save(run.here / f"step-{step}", run_id="one")
    replace(run, "latest", "link_pointer", method, count)


@pytest.mark.parametrize(("method", "count"), counts("rename", "unlink", "truncate"))
def test_a_text_pointer_is_replaced_while_all_poll_it(run: Run, method: str, count: int):
    """I5, I8: never ENOENT, never empty, torn or back; but for who truncates it, on its node."""
    for step in range(STEPS):
        save(run.here / f"step-{step}", run_id="one")
    replace(run, "latest.txt", "text_pointer", method, count)


@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=LONG)])
@pytest.mark.parametrize("kind", ["link_plain", "text_plain"])
def test_a_plain_name_is_renamed_over_while_all_poll_it(run: Run, kind: str, count: int):
    """I8: also where the texts have different lengths, and the kernel knows an older one's."""

    def is_there(path: Path) -> bool:
        # A live file is in the store as soon as it is made, its content a moment later.
        return path.exists() and path.read_text() == "1"

    for number in range(STEPS):
        (run.here / f"file-{number}").write_text("1")
        until("the file on the other node", partial(is_there, run.there / f"file-{number}"))
    replace(run, "value.log", kind, "rename", count)


LOOK_FOR_ONE = watcher(
    """
is_link = os.path.islink(path)
found = os.readlink(path) if is_link else open(path, "rb").read()[-len(value) :].decode()
if found != value:
    bad(found)
""",
    "path, value = words",
)


@pytest.mark.parametrize("name", ["latest", "latest.txt", "model.safetensors"])
def test_what_a_rename_holds_for_its_job_is_never_seen_by_others(run: Run, name: str):
    """I8: the kernel moves its own entry with a rename; others must not be served from it."""
    save(run.here / "step-1", run_id="one")
    path = run.here / name
    if name == "model.safetensors":
        begin = job(
            "import sys; open(sys.argv[1], 'wb').write((2).to_bytes(8, 'little') + b'{}')",
            path,
            run_id="one",
        )
        value = "{}"
    else:
        value = "step-1"
        make = (
            "os.symlink"
            if name == "latest"
            else "(lambda text, where: open(where, 'w').write(text))"
        )
        begin = job(
            f"import os, sys; {make}('step-1', sys.argv[1] + '.tmp'); "
            "os.replace(sys.argv[1] + '.tmp', sys.argv[1])",
            path,
            run_id="one",
        )
    assert begin.returncode == 0, begin.stderr
    code = """
import os, sys
path, kind = sys.argv[1:]
inner = os.path.dirname(path) + "/step-9"
os.makedirs(inner, exist_ok=True)
for number in range(60):
    # One that is a plain name, as its own or in the checkpoint, and one that may be a checkpoint's.
    new = (f"{path}.{number}", f"{path}.{number}.tmp", f"{inner}/{number}")[number % 3]
    if kind == "latest":
        os.symlink("step-9", new)
    else:
        open(new, "w").write("step-9" if kind == "latest.txt" else "no container")
    if number % 2:
        os.lstat(new)
    os.replace(new, path)
    seen = os.readlink(path) if kind == "latest" else open(path).read()
    assert seen in {"step-9", "no container"}, seen
"""

    def is_there() -> bool:
        look = "import os, sys; print(os.path.exists(sys.argv[1]))"
        return job(look, path, run_id="two").stdout == "True\n"

    until("the first value for others", is_there)
    with watching((LOOK_FOR_ONE, "two", [path, value]), (LOOK_FOR_ONE, "three", [path, value])):
        done = job(code, path, name, run_id="one")
        assert done.returncode == 0, done.stderr
