"""Commands on a store that no daemon here serves: what the store alone allows."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import give_credentials
from tests.e2e.buckets import run_here
from tests.s3.servers import Bucket
from tests.unit.engine.kit import NEXT_JOB, Node

from ckptgate.errors import ExitCode
from ckptgate.model.entries import Abort, Published
from ckptgate.ports.store import Store
from ckptgate_adapters.posix_store import PosixStore
from ckptgate_adapters.s3_store import S3Options, S3Store


class Unserved:
    """A store's address, and the nodes that were there once."""

    def __init__(self, address: str, node: Node, env: dict[str, str]) -> None:
        self.address = address
        self.node = node
        self.env = env

    def cli(self, *words: str):
        return run_here(*words, env=self.env)

    def json(self, *words: str):
        done = self.cli(*words, "--json")
        return done.returncode, json.loads(done.stdout or done.stderr)


@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.full)])
def unserved(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store: Store
    if request.param == "directory":
        address, env = str(tmp_path / "store"), {}
        os.mkdir(address)
        store = PosixStore(address)
    else:
        bucket: Bucket = request.getfixturevalue("bucket")
        give_credentials(bucket.server, monkeypatch)
        address = f"{bucket.url}/ckpts"
        env = {**bucket.server.environment, "AWS_ENDPOINT_URL": bucket.server.endpoint}
        store = S3Store(address, S3Options(endpoint_url=bucket.server.endpoint))
    node = Node(store, tmp_path / "spools", "a")
    yield Unserved(address, node, env)
    node.spool.close()
    store.close()


def test_status_tells_what_the_store_says(unserved: Unserved):
    node, run = unserved.node, f"{unserved.address}/run"
    assert unserved.cli("status", run).returncode == ExitCode.NOT_FOUND
    node.save("step-1", {"a": b"1"})
    node.save("step-1", {"a": b"2"})
    node.save("step-2", {"a": b"3"})
    code, said = unserved.json("status", unserved.address)
    assert code == 0
    assert [(r["run"], r["committed"], r["last_committed"]) for r in said["runs"]] == [
        ("run", 2, "step-2")
    ]
    assert [(r["attempt"], r["state"]) for r in said["attempts"]] == [
        ("step-1.0", "replaced"), ("step-1.1", "committed"), ("step-2.0", "committed"),
    ]  # fmt: skip
    assert unserved.json("status", run)[1]["runs"][0]["run"] == ""
    code, said = unserved.json("status", f"{run}/step-2")
    assert (code, [row["attempt"] for row in said["attempts"]]) == (0, ["step-2.0"])

    row = node.membership.join(node.begin("step-3"))
    code, said = unserved.json("status", run)
    (open_one,) = [r for r in said["attempts"] if r["state"] == "open"]
    assert code == ExitCode.PENDING
    assert (open_one["attempt"], open_one["members"]) == (row.attempt, [node.member])
    assert open_one["missing"] == [f"{node.member}: has said nothing of its files yet"]
    shown = unserved.cli("status", run).stdout
    assert "no daemon here serves it" in shown
    assert "2 committed, newest step-2" in shown
    assert unserved.cli("status", run, "--watch").returncode == ExitCode.USAGE


def test_wait_ends_by_what_the_store_says(unserved: Unserved):
    """I6: what no log decides isn't decided, and what it decides is told as it is."""
    node, run = unserved.node, f"{unserved.address}/run"
    assert unserved.cli("wait", run).returncode == ExitCode.NOT_FOUND
    for number in range(25):
        node.save(f"step-{number}", {"a": b"1"})
    for path in (unserved.address, run, f"{run}/step-0", f"{run}/step-24"):
        code, said = unserved.json("wait", path, "--timeout", "0")
        assert (code, said["undecided"]) == (0, [])
    assert unserved.cli("wait", f"{run}/step-24").stdout == "step-24: committed\n"
    assert unserved.cli("wait", f"{run}/step-99").returncode == ExitCode.NOT_FOUND

    row = node.membership.join(node.begin("step-30"))
    for path in (unserved.address, run, f"{run}/step-30"):
        done = unserved.cli("wait", path, "--timeout", "0.1")
        assert done.returncode == ExitCode.PENDING
        assert "step-30 (open)" in done.stderr
        assert f"{node.member}: has said nothing of its files yet" in done.stderr
    assert unserved.cli("wait", f"{run}/step-3", "--timeout", "0").returncode == 0
    node.seal(row)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(unserved.cli, "wait", run, "--timeout", "60")
        with pytest.raises(TimeoutError):
            waiting.result(1)
        decide = Abort(attempt=row.attempt, missing=("w.bin",), reason="rank 1 is gone")
        node.logs.get("run").append(lambda _: decide)
        done = waiting.result(60)
    assert done.returncode == ExitCode.REFUSED
    assert "step-30 (aborted): w.bin" in done.stderr
    assert unserved.cli("wait", f"{run}/step-30").returncode == ExitCode.REFUSED

    # An attempt of a job that died is never decided; what its next start saved is.
    node.membership.join(node.begin("step-31"))
    node.save("step-31", {"a": b"1"}, job=NEXT_JOB)
    for path in (run, f"{run}/step-31"):
        assert unserved.cli("wait", path, "--timeout", "0").returncode == 0


def test_a_pin_is_a_record_of_the_log_and_needs_no_daemon(unserved: Unserved):
    """I7."""
    node, run = unserved.node, f"{unserved.address}/run"
    for name in ("step-1", "step-2"):
        node.save(name, {"a": name.encode()})
    done = unserved.cli("pin", f"{run}/step-1", "--reason", "paper")
    assert (done.returncode, done.stderr) == (0, "")
    assert unserved.cli("pin", f"{run}/step-1").returncode == 0
    state = node.logs.get("run").refresh()
    assert list(state.pins) == ["step-1"]
    (record,) = [r for r in unserved.json("log", run)[1]["records"] if r["entry"]["type"] == "PIN"]
    assert record["entry"]["reason"] == "paper"
    assert record["member"].startswith(os.uname().nodename[:8])
    assert unserved.cli("unpin", f"{run}/step-1").returncode == 0
    assert not node.logs.get("run").refresh().pins
    for path in (f"{run}/step-7", f"{unserved.address}/nothing/step-1"):
        assert unserved.cli("pin", path).returncode == ExitCode.NOT_FOUND


def test_gc_tells_what_is_dead_and_removes_nothing(unserved: Unserved):
    """I9: how long it was dead only a daemon knows."""
    node, run = unserved.node, f"{unserved.address}/run"
    node.save("step-1", {"a": b"1" * 1000})
    node.save("step-1", {"a": b"2"})
    node.save("step-2", {"a": b"3"})
    node.logs.get("run").append(lambda _: Published(attempt="step-1.1"))
    before = node.store.attempt_parts("run", "step-1.0")
    for path, where in ((run, ""), (unserved.address, "run")):
        code, said = unserved.json("gc", path, "--dry-run")
        assert code == 0
        assert [(r["run"], r["what"], r["why"]) for r in said["removed"]] == [
            (where, "step-1.0", "replaced")
        ]
        assert said["bytes"] >= 1000
    assert "each goes its grace after" in unserved.cli("gc", run, "--dry-run").stdout
    done = unserved.cli("gc", run, "--grace", "0s")
    assert done.returncode == ExitCode.NOT_FOUND
    assert "no mount on this machine serves" in done.stderr
    assert "mount it" in done.stderr
    assert node.store.attempt_parts("run", "step-1.0") == before


def test_a_pin_without_put_if_absent_is_left_to_the_only_writer(tmp_path: Path, bucket: Bucket):
    """I7: a service that overwrites would lose what a daemon has written meanwhile."""
    config = tmp_path / "c.toml"
    config.write_text("[s3]\nsingle_writer = true\n")
    env = {**bucket.server.environment, "AWS_ENDPOINT_URL": bucket.server.endpoint}
    done = run_here("pin", f"{bucket.url}/run/step-1", "--config", config, env=env)
    assert done.returncode == ExitCode.USAGE
    assert "has a single writer" in done.stderr
