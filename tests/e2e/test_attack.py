"""What an attacker tried: names given up by a rename, links led out, names and numbers of ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.e2e.harness import cluster, job, tree, until

pytestmark = [pytest.mark.fuse]

TWO_SAVES = """
import os, sys
run = sys.argv[1]
for k in range(1, 4):
    os.mkdir(f"{run}/tmp_ck")
    for name in ("big", "small"):
        with open(f"{run}/tmp_ck/{name}", "wb") as f:
            f.write(b"%d" % k * (20_000_000 if name == "big" else 1))
    os.rename(f"{run}/tmp_ck", f"{run}/step-{k}")
    assert not os.path.lexists(f"{run}/tmp_ck"), os.listdir(run)
"""


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")


def test_a_name_given_up_by_a_rename_is_free_for_the_next_save(tmp_path: Path):
    """I8: saves under the same temporary name are never mixed, however close they follow."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        (node.mnt / "run").mkdir()
        done = job(TWO_SAVES, node.mnt / "run")
        assert done.returncode == 0, done.stderr
        until("three commits", lambda: len(c.committed("run")) == 3, 60)
        until("the last one", lambda: (c.store / "run/step-3").is_dir())
        for k in range(1, 4):
            found = tree(c.store / f"run/step-{k}")
            assert found == {"big": b"%d" % k * 20_000_000, "small": b"%d" % k}


def test_links_numbers_and_names_that_are_refused_or_ignored(tmp_path: Path):
    """I13: each refusal comes at the call, and what follows it goes on."""
    with cluster(tmp_path) as c:
        (node,) = c.nodes
        step = node.mnt / "run/step-1"
        (step / "p/q").mkdir(parents=True)
        (step / "f").write_text("f")
        (step / "p/q/link").symlink_to("../../f")
        with pytest.raises(PermissionError):
            (step / "p/q").rename(step / "q")
        with pytest.raises(OSError) as caught:
            (node.mnt / "run/.tmp-ckptgate-0").write_text("x")
        assert caught.value.errno in {errno.EACCES, errno.EPERM}
        outside = tmp_path / "outside"
        outside.mkdir()
        until("the run in the store", lambda: (c.store / "run").is_dir())
        (c.store / "run/step-2").symlink_to(outside)
        save = "import os,sys; os.makedirs(sys.argv[1]); open(sys.argv[1] + '/f', 'w').close()"
        big = {"RANK": "0", "WORLD_SIZE": "9" * 30}
        done = job(save, node.mnt / "run/step-2", run_id="other", **big)
        assert done.returncode == 0, done.stderr
        assert os.listdir(outside) == []
        log = node.mnt / "run/train.log"
        log.write_text("on it goes")
        until("the log", lambda: (c.store / "run/train.log").exists())
