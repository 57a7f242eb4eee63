"""The blocks and DCP's hook by `ckpt://` URLs, as on a mount: see the tests of those."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.places import Place
from tests.e2e.harness import cli
from tests.ports import free_port

DCP_RANKS = Path(__file__).with_name("dcp_ranks.py")

SAVE = """
import sys, fsspec, ckptgate
run, rank, word = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    more = {"rank": rank, "world_size": 2, "saved_by": {"data_version": "v7"}}
    with ckptgate.checkpoint(run, 1, **more) as url:
        with fsspec.open(f"{url}/rank{rank}", "wb") as f:
            f.write(word.encode())
        print("half", flush=True)
        sys.stdin.readline()
        if word == "fail":
            raise RuntimeError("the disk is on fire")
    print("done", flush=True)
except Exception as exc:
    print(type(exc).__name__, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(request) -> str:
    """The URL of this test's own run."""
    return f"ckpt://{request.node.name.partition('[')[0]}"


def both(place: Place, run: str, words: list[str]) -> list[str]:
    """Two ranks save; one after the other goes on once both are half done."""
    ranks: list[Any] = [
        place.start(SAVE, run, str(rank), word, run_id="one") for rank, word in enumerate(words)
    ]
    told = []
    try:
        for process in ranks:
            assert process.stdout.readline() == "half\n", process.stderr.read()
        for process in ranks:
            process.stdin.write("go\n")
            process.stdin.flush()
            told.append(process.stdout.readline().strip())
    finally:
        for process in ranks:
            process.communicate("\n", timeout=60)
    return told


def latest(place: Place, run: str) -> str:
    done = place.python("import sys, ckptgate; print(ckptgate.latest(sys.argv[1], wait_s=60))", run)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def shown(place: Place, run: str) -> dict:
    done = cli("show", f"{place.store}/{run.removeprefix('ckpt://')}/step-1", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_block_on_a_url_is_exact_and_recorded(place: Place, run: str):
    """I4, I8"""
    assert latest(place, run) == "None"
    told = both(place, run, ["fail", "bad"])
    assert told[0] == "RuntimeError"
    assert told[1] in {"RefusedError", "FileNotFoundError"}, told
    assert latest(place, run) == "None"
    assert both(place, run, ["good", "good"]) == ["done", "done"]
    assert latest(place, run) == f"{run}/step-1"
    found = shown(place, run)
    assert found["saved_by"]["record"]["data_version"] == "v7"
    assert [entry["path"] for entry in found["entries"]] == ["rank0", "rank1"]
    assert {entry["size"] for entry in found["entries"]} == {4}


@pytest.mark.torch
@pytest.mark.parametrize("way", ["sync", pytest.param("fails", marks=pytest.mark.full)])
def test_dcp_s_hook_saves_and_loads_by_a_url(place: Place, run: str, way: str, require):
    """I4, I8"""
    require(find_spec("torch"), "PyTorch is not installed")
    run = f"{run}-{way}"
    port = str(free_port())
    env = place.environment(run_id=way) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks: list[Any] = [
        subprocess.Popen(
            [sys.executable, str(DCP_RANKS), run, way, str(rank), port],
            env=env | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=180)[0] for process in ranks]
    assert not any(process.returncode for process in ranks), "\n".join(told)
    record = shown(place, run)["saved_by"]["record"]
    assert (record["framework"], record["layout"]) == ("torch-dcp", {"dp": 2})


def test_a_url_that_is_no_checkpoint_s_is_told(place: Place, run: str):
    code = (
        "import sys, ckptgate\n"
        "try:\n    ckptgate.commit(sys.argv[1])\n"
        "except ckptgate.CkptError as exc:\n    print(exc.kind)\n"
    )
    fs = place.fs()
    fs.mkdir(run.removeprefix("ckpt://"))
    done = place.python(code, run)
    assert done.stdout == "usage\n", done.stderr
    assert os.environ.get("CKPTGATE_RUN_ID") is None
