"""A file is written as long as its opener has any descriptor of it; `> FILE` leaves a duplicate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Cluster, cli, cluster, job, until

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o644)
os.dup2(fd, 99)
os.close(fd)
for number in range(4):
    os.write(99, b"line %d\\n" % number)
    print(number, flush=True)
    sys.stdin.readline()
os.close(99)
"""


@pytest.fixture(params=["passthrough", "fallback"])
def made(tmp_path: Path, request: pytest.FixtureRequest, require) -> Iterator[Cluster]:
    require(Path("/dev/fuse").exists(), "no /dev/fuse")
    config = FAST if request.param == "passthrough" else f"passthrough = false\n{FAST}"
    with cluster(tmp_path, 1, config) as found:
        yield found


def test_a_commit_waits_for_a_duplicated_descriptor(made: Cluster) -> None:
    """I11: bytes that were written without an error are committed, not the first half of them."""
    (node,) = made.nodes
    step = node.mnt / "run" / "step-1"
    assert job("import os, sys; os.makedirs(sys.argv[1])", step).returncode == 0
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(step / "a")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env={**os.environ, "CKPTGATE_RUN_ID": "job1"},
    ) as writer:  # fmt: skip
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0\n"
        assert cli("commit", step, "--all").returncode in {0, 2, 3}
        for number in range(1, 4):
            writer.stdin.write("\n")
            assert writer.stdout.readline() == f"{number}\n"
        assert "step-1" not in made.committed("run")
        writer.stdin.write("\n")
    until("it is committed", lambda: "step-1" in made.committed("run"))
    assert (step / "a").read_bytes() == b"".join(b"line %d\n" % n for n in range(4))
    assert cli("verify", step).returncode == 0
