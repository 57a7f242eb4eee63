"""What a running mount shows of itself: report, exit codes, metrics, health, incidents."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.harness import FAST, Cluster, Gateway, cli, cluster, job, until

from ckptgate.app.cli import main
from ckptgate.errors import ExitCode

ROOT = Path(__file__).parents[2]
PORT = socket.create_server(("127.0.0.1", 0))
SAVE = """
import os, sys
for name in sys.argv[2:]:
    os.makedirs(sys.argv[1], exist_ok=True)
    with open(os.path.join(sys.argv[1], name), "w") as file:
        file.write("x" * 1000)
"""
DIES = """
import os, sys
os.makedirs(sys.argv[1])
file = open(sys.argv[1] + "/a.txt", "w")
file.write("half")
file.flush()
os.kill(os.getpid(), 9)
"""
HOOK = "#!/bin/sh\ncat >> {out}\n"


@pytest.fixture(scope="module")
def seen(require, tmp_path_factory) -> Iterator[Cluster]:
    """Two nodes with status pages, which tell a script of incidents; both want one port."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    base = tmp_path_factory.mktemp("seen")
    hook = base / "hook.sh"
    hook.write_text(HOOK.format(out=base / "told"))
    hook.chmod(0o700)
    port = PORT.getsockname()[1]
    PORT.close()
    config = (
        f"{FAST}[status]\nlisten = '127.0.0.1:{port}'\n[incidents]\ncommand = ['{hook}']\n"
        "[log]\nformat = 'json'\n"
    )
    with cluster(base, nodes=2, config=config) as made:
        yield made


class OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        fd = os.open(self.path.parent, os.O_PATH)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(60)
            self.sock.connect(f"/proc/self/fd/{fd}/{self.path.name}")
        finally:
            os.close(fd)


def get(node: Gateway, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    with contextlib.closing(OverUnix(node.spool / "status.sock")) as connection:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def metrics(node: Gateway) -> dict[str, float]:
    status, text = get(node, "/metrics")
    assert status == 200, text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def committed(node: Gateway, name: str) -> None:
    assert job(SAVE, node.mnt / "run" / name, "a.txt", "b.txt").returncode == 0
    assert main(["commit", str(node.mnt / "run" / name), "--all", "--wait"]) == 0


def test_the_report_has_the_documented_keys(seen: Cluster, capsys):
    node = seen.nodes[0]
    committed(node, "step-1")
    capsys.readouterr()
    main(["status", "--json"])
    reports = json.loads(capsys.readouterr().out)
    (report,) = [it for it in reports if it["mountpoint"] == str(node.mnt)]
    text = (ROOT / "gateway/STATUS.md").read_text().split("\n## The report\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(report) == {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert report["schema"] == 1
    assert report["contact"]["is_reached"]
    (row,) = report["attempts"]
    assert list(row["phases"]) == ["staging", "digest", "upload", "vote", "commit"]
    assert get(node, "/status.json")[0] == 200
    shown = json.loads(get(node, "/status.json")[1])
    assert set(shown) == set(report)
    until("it is at rest", lambda: tag_of(node) == tag_of(node))
    tag = tag_of(node)
    assert get(node, "/status.json", {"If-None-Match": tag}) == (304, b"")


def tag_of(node: Gateway) -> str:
    with contextlib.closing(OverUnix(node.spool / "status.sock")) as connection:
        connection.request("GET", "/status.json")
        answer = connection.getresponse()
        answer.read()
        return answer.headers["ETag"]


def test_the_exit_code_says_clean_pending_and_refused(seen: Cluster, capsys):
    node = seen.nodes[0]
    committed(node, "step-2")
    run = node.mnt / "run"
    status = ["status", str(run)]
    assert main(status) == ExitCode.OK
    assert job(SAVE, run / "step-3", "a.txt").returncode == 0
    assert main(status) == ExitCode.PENDING
    assert "step-3  open" in capsys.readouterr().out
    assert main(["abort", str(run / "step-3")]) == 0
    assert main(status) == ExitCode.REFUSED
    committed(node, "step-4")
    assert main(status) == ExitCode.OK


def test_a_live_view_without_a_terminal_is_the_plain_report(seen: Cluster):
    node = seen.nodes[0]
    done = cli("status", node.mnt, "--watch")
    assert done.returncode in {ExitCode.OK, ExitCode.PENDING, ExitCode.REFUSED}
    assert str(node.mnt) in done.stdout
    assert "\x1b" not in done.stdout
    assert main(["status", str(node.mnt), "-w", "--json"]) == ExitCode.USAGE


def test_a_writer_that_died_leaves_a_doubt(seen: Cluster):
    node = seen.nodes[0]
    run = node.mnt / "other"
    assert job(DIES, run / "step-9").returncode < 0
    until("it is hidden", lambda: node.attempts("step-9")[-1]["is_hidden"])
    assert main(["status", str(run)]) == ExitCode.REFUSED
    hidden = partial(metrics, node)
    until("the metrics say so", lambda: hidden()["ckptgate_hidden_checkpoints{}"] == 1, 60)
    assert main(["abort", str(run / "step-9")]) == 0


def test_what_is_counted_goes_on_after_kill_9(seen: Cluster):
    """I11: of both processes."""
    node = seen.nodes[0]
    before = metrics(node)
    committed(node, "step-5")
    for kind in ("publisher", "mount"):
        node.kill(kind)
        until(f"a new {kind}", partial(node.child, kind))
    until("it answers", lambda: (node.spool / "status.sock").exists() and is_ready(node))
    after = metrics(node)
    saves = "ckptgate_saves_total{result=committed}"
    assert after[saves] == before[saves] + 1
    assert after["ckptgate_uploaded_files_total{}"] == before["ckptgate_uploaded_files_total{}"] + 2
    changes = "ckptgate_request_seconds_count{kind=change}"
    assert after[changes] > before[changes] > 0
    assert after["ckptgate_last_committed_step{run=run}"] == 5
    assert after["ckptgate_request_oldest_seconds{}"] == 0


def test_each_rank_s_progress_is_told_by_who_wrote_what(seen: Cluster):
    node = seen.nodes[0]
    save = node.mnt / "ranks" / "step-1"
    for rank in (0, 1):
        names = [f"r{rank}.txt", f"s{rank}.txt"][: rank + 1]
        assert job(SAVE, save, *names, RANK=str(rank), WORLD_SIZE="2").returncode == 0
    ranks = partial(told_ranks, node, "step-1", "ranks")
    until("all are stored", lambda: ranks() == {0: (1, 1000), 1: (2, 2000)})
    assert main(["abort", str(save)]) == 0


def told_ranks(node: Gateway, name: str, run: str) -> dict[int, tuple[int, int]]:
    rows = [row for row in node.attempts(name) if row["run"] == run]
    return {it["rank"]: (it["files"], it["stored_bytes"]) for it in rows[-1]["ranks"]}


def is_joined(node: Gateway, name: str) -> bool:
    return bool(node.attempts(name)[-1]["is_joined"])


def is_ready(node: Gateway) -> bool:
    try:
        return get(node, "/readyz")[0] == 200
    except OSError:
        return False


def test_readiness_names_a_mount_that_stands_still_and_asking_hangs_nobody(seen: Cluster):
    node = seen.nodes[0]
    until("it is ready", lambda: is_ready(node))
    mount = node.child("mount")
    os.kill(mount, signal.SIGSTOP)
    try:
        for _ in range(2):
            status, body = get(node, "/readyz")
            assert (status, json.loads(body)["problems"]) == (503, {"mount": "does not answer"})
        assert get(node, "/healthz") == (200, b"ok\n")
        assert metrics(node)["ckptgate_mount_usable{}"] == 0
        # Whoever asked can still be ended: nobody of the daemon waits in the mount.
        node.kill("publisher")
        until("a new publisher", lambda: node.child("publisher"))
    finally:
        os.kill(mount, signal.SIGCONT)
    until("it is ready again", lambda: is_ready(node))


def test_readiness_names_a_store_that_is_away(seen: Cluster):
    node = seen.nodes[0]
    away = seen.store.with_name("away")
    seen.store.rename(away)
    try:
        until("it is noticed", lambda: get(node, "/readyz")[0] == 503, 60)
        assert "store" in json.loads(get(node, "/readyz")[1])["problems"]
        assert metrics(node)["ckptgate_store_reachable{}"] == 0
    finally:
        away.rename(seen.store)
    until("it is ready again", lambda: is_ready(node), 60)


def test_two_mounts_don_t_fight_for_a_port(seen: Cluster):
    pages = [node.status()["page"] for node in seen.nodes]
    assert sorted(map(bool, pages)) == [False, True]
    second = seen.nodes[pages.index("")]
    assert get(second, "/healthz")[0] == 200
    assert any(it["event"] == "status-not-served" for it in lines(second))


def lines(node: Gateway) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.log().splitlines()]


def test_incidents_are_told_to_the_command_once_also_over_kill_9(seen: Cluster):
    node = seen.nodes[1]
    told = seen.store.with_name("told")

    def of(name: str) -> list[dict[str, Any]]:
        found = (
            [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        )
        return [it for it in found if name in it["subject"] and it["mountpoint"] == str(node.mnt)]

    hostile = 'step-7 $(id) <b>"\\'
    for name in ("step-6", hostile):
        assert job(SAVE, node.mnt / "run" / name, "a.txt").returncode == 0
        until("it is joined", partial(is_joined, node, name))
        given_up = job("import ckptgate, sys; ckptgate.abort(sys.argv[1])", node.mnt / "run" / name)
        assert given_up.returncode == 0, given_up.stderr
        until("it is told", partial(of, name))
        node.kill("publisher")
        until("a new publisher", lambda: is_ready(node))
    assert [it["kind"] for it in of("step-6")] == ["aborted"]
    # What a person wants is kept, and told to nobody.
    assert job(SAVE, node.mnt / "run" / "step-8", "a.txt").returncode == 0
    words = ["abort", str(node.mnt / "run" / "step-8"), "--reason", "bad data"]
    assert main(words) == 0
    (kept,) = [it for it in node.status()["events"] if "step-8" in it["subject"]]
    assert (kept["kind"], kept["severity"]) == ("cancelled", "notice")
    assert kept["detail"].endswith(f" on {socket.gethostname()}: bad data")
    assert metrics(node)["ckptgate_saves_total{result=cancelled}"] == 1
    (last,) = of(hostile)
    assert not of("step-8")
    assert (last["severity"], last["host"]) == ("critical", socket.gethostname())
    assert last["hint"]


def test_each_line_of_the_log_is_an_event_from_the_list(seen: Cluster):
    text = (ROOT / "gateway/EVENTS.md").read_text()
    for node in seen.nodes:
        for line in lines(node):
            assert f"| `{line['event']}` |" in text, line
            assert {"time", "level", "process", "logger"} <= set(line)
