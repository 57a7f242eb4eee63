"""Ray Train with `ckpt://` as its storage, through pyarrow.

Needs `pip install --group ecosystem`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.ckpt.places import placed
from tests.e2e.harness import tree, until

pytestmark = [pytest.mark.full, pytest.mark.torch, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("ray_job.py")


@pytest.fixture
def short() -> Iterator[str]:
    """A directory whose name leaves room for that of a socket."""
    made = tempfile.mkdtemp(prefix="ray-")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_ray_train_saves_restarts_and_restores(tmp_path: Path, require, short: str):
    """I8, I12: what both workers reported is committed as a whole."""
    require(find_spec("ray") and find_spec("torch"), "Ray is not installed")
    with placed(tmp_path) as place:
        env = place.environment(run_id="ray") | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": short,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, str(JOB), "ray"],
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:] + place.log()[-3000:]
        told = json.loads(done.stdout.splitlines()[-1])
        assert told["metrics"]["step"] == 3
        # The second start went on behind the last checkpoint of the first one.
        assert told["metrics"]["first"] == 2
        want = {f"rank{rank}.pt": {"step": 3, "rank": rank} for rank in (0, 1)}
        assert told["found"] == want
        assert told["path"] == "ray/training/checkpoint_3"
        until("the commit", lambda: tree(Path(place.store, told["path"])).keys() >= want.keys(), 60)
        fs = place.fs(job="reader")
        until("the end of what isn't kept", lambda: not fs.exists("ray/training/checkpoint_1"), 60)
        assert Path(place.store, "ray/training/latest").readlink() == Path("checkpoint_3")
