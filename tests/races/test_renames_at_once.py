"""Two nodes rename one directory to two names at the same moment: nothing is lost or doubled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.e2e.harness import job, start_job, tree, until
from tests.races.kit import Run

pytestmark = [pytest.mark.fuse, pytest.mark.full]

ONE = {"run_id": "one", "WORLD_SIZE": "2"}
MAKE = """
import os, sys
path, rank = sys.argv[1:]
os.makedirs(path + "/tmp.a", exist_ok=True)
for n in range(3):
    with open(f"{path}/tmp.a/{rank}-{n}", "w") as stream:
        stream.write(f"{rank} {n}")
"""
RENAME = """
import os, sys
print("ready")
sys.stdin.readline()
os.rename(sys.argv[1], sys.argv[2])
"""


def rename_at_once(run: Run, old: str, names: tuple[str, str]) -> list[str]:
    """What the two said on their standard error, "" for a success."""
    here, there = (
        (where / old, where / new) for where, new in zip((run.here, run.there), names, strict=True)
    )
    with (
        start_job(RENAME, *here, RANK="0", **ONE) as first,
        start_job(RENAME, *there, RANK="1", **ONE) as second,
    ):
        children = (first, second)
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        return [child.communicate(timeout=60)[1] for child in children]


def test_what_both_put_into_a_checkpoints_directory_is_committed_once_each(run: Run):
    """Each node's part is under its own name then: no file is lost, none is there twice."""
    for rank, where in enumerate((run.here, run.there)):
        done = job(MAKE, where / "step-1", str(rank), RANK=str(rank), **ONE)
        assert done.returncode == 0, done.stderr
    said = rename_at_once(run, "step-1/tmp.a", ("step-1/x", "step-1/y"))
    assert said.count("") >= 1, said
    commit = "import sys, ckptgate; ckptgate.commit(sys.argv[1], int(sys.argv[2]), 2)"
    for rank, where in enumerate((run.here, run.there)):
        done = job(commit, where / "step-1", str(rank), RANK=str(rank), **ONE)
        assert done.returncode == 0, done.stderr
    wait = "import sys, ckptgate; ckptgate.wait(sys.argv[1], 60)"
    done = job(wait, run.here / "step-1", **ONE)
    assert done.returncode == 0, done.stderr
    for where in (run.here, run.there):
        found = tree(where / "step-1")
        assert {Path(path).parent.name for path in found} <= {"x", "y"}
        assert sorted(Path(path).name for path in found) == [
            f"{rank}-{n}" for rank in (0, 1) for n in range(3)
        ]


def test_a_plain_directory_has_one_of_the_names_in_the_end_on_both_nodes(run: Run):
    """The store renames it once; who came second sees that, and all that was in it."""
    (run.here / "plain").mkdir()
    for n in range(3):
        (run.here / f"plain/{n}").write_text(str(n))
    store = run.pair.store / run.here.name
    until("it is in the store", lambda: len(list(store.glob("plain/*"))) == 3)
    until("it is on the other node", lambda: (run.there / "plain/2").exists())
    rename_at_once(run, "plain", ("x", "y"))

    def shown(where: Path) -> dict[str, list[str]]:
        return {name: sorted(os.listdir(where / name)) for name in os.listdir(where)}

    def has_settled() -> bool:
        try:
            views = [shown(where) for where in (run.here, run.there)]
        except FileNotFoundError:
            return False
        return views in ([{"x": ["0", "1", "2"]}] * 2, [{"y": ["0", "1", "2"]}] * 2)

    until("both show one of the two", has_settled)
    name = os.listdir(run.here)[0]
    for where in (run.here, run.there):
        assert [(where / name / str(n)).read_text() for n in range(3)] == ["0", "1", "2"]
