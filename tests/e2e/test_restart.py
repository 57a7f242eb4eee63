"""Hot restart without a service manager: replaced in place, killed, and both, under a save.

Four processes make all kinds of calls and know what each must come to; nothing may fail, and
nothing may be done twice, whatever becomes of the gateway's processes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Cluster, Gateway, cli, cluster, job, start_job, until, users_of
from tests.e2e.restarting import (
    back,
    keeper_of,
    kill_all,
    mount_number,
    processes_of,
    replace,
    saving,
    while_saving,
)

pytestmark = [pytest.mark.fuse]


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "passthrough needs root")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, config=FAST) as started:
        yield started


def replaced(node: Gateway) -> None:
    before = node.info().pid
    done = replace(node)
    assert done.returncode == 0, done.stderr + node.log()
    assert f"replaced process {before} by {node.info().pid}" in done.stdout
    assert node.info().pid != before


def killed(node: Gateway, *names: str) -> None:
    known = processes_of(node)
    kill_all(*(known[name] for name in names))
    until("another process", lambda: processes_now(node) != known, 60)
    back(node)


def processes_now(node: Gateway) -> dict[str, int]:
    with contextlib.suppress(AssertionError, OSError):
        return processes_of(node)
    return {}


def test_ranks_notice_neither_a_replacement_nor_kills(made: Cluster) -> None:
    """I2, I10, I11: `--replace`, and kill -9 of the supervisor, of all of them, of the keeper."""
    (node,) = made.nodes

    def disturb() -> None:
        replaced(node)
        killed(node, "supervisor", "mount", "publisher")
        killed(node, "keeper")
        killed(node, "supervisor")

    reports = while_saving(node, made.store, disturb)
    assert sum(report["calls"] for report in reports) > 1000


EVENTS = ["replace", "mount", "supervisor", "publisher", "keeper", "both", "all", "busy"]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_passing", [True, False], ids=["passthrough", "fallback"])
def test_ranks_notice_nothing_for_minutes(tmp_path: Path, is_passing: bool) -> None:
    """I2, I10, I11: at random, several at once, many times."""
    chance = random.Random(os.environ.get("RESTART_SEED", "7"))
    config = f"passthrough = {'true' if is_passing else 'false'}\n{FAST}"
    with cluster(tmp_path, config=config) as made:
        (node,) = made.nodes
        until_ = time.monotonic() + 150

        def disturb() -> None:
            deaths: list[float] = []
            while time.monotonic() < until_:
                what = chance.choice(EVENTS)
                if what in {"supervisor", "both", "all"}:
                    # A keeper gives up a supervisor that dies more than five times in a minute.
                    now = time.monotonic()
                    deaths = [at for at in deaths if now - at < 61]
                    if len(deaths) >= 4:
                        continue
                    deaths.append(now)
                known = processes_of(node)
                if what == "replace":
                    assert replace(node).returncode == 0
                elif what == "busy":
                    with contextlib.ExitStack() as stack:
                        replacing = stack.enter_context(_replacing(node))
                        time.sleep(chance.random() * 1.5)
                        name = chance.choice(["mount", "publisher", "keeper"])
                        kill_all(known[name])
                        replacing.wait(60)
                else:
                    names = {"both": ["supervisor", "mount"]}.get(what, [what])
                    if what == "all":
                        names = ["supervisor", "mount", "publisher"]
                    kill_all(*(known[name] for name in names))
                back(node)
                time.sleep(chance.random())

        while_saving(node, made.store, disturb)


def _replacing(node: Gateway) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptgate.app.cli", "mount", "--replace", str(node.mnt)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_replacing_is_refused_where_it_is_not_the_same_mount(made: Cluster, tmp_path: Path) -> None:
    """I13: nothing there, another store or spool, a state of another release."""
    (node,) = made.nodes
    known = processes_of(node)
    (tmp_path / "other").mkdir()
    done = cli("mount", "--replace", tmp_path / "other")
    assert done.returncode == 4
    assert "nothing to replace" in done.stderr
    words = ("mount", "--replace", "--config", node.config)
    done = cli(*words, "--spool", node.spool, tmp_path / "other", node.mnt)
    assert (done.returncode, "has the store" in done.stderr) == (3, True), done.stderr
    done = cli(*words, "--spool", tmp_path / "other", made.store, node.mnt)
    assert (done.returncode, "has the spool" in done.stderr) == (3, True), done.stderr
    state = node.spool / "session.state"
    saved = state.read_bytes()
    state.write_bytes(json.dumps(json.loads(saved) | {"version": 999}).encode())
    done = replace(node)
    assert (done.returncode, "version 999" in done.stderr) == (6, True), done.stderr
    state.write_bytes(saved)
    assert processes_of(node) == known
    (node.mnt / "there").mkdir()


BROKEN = """
import os, sys
if "ckptgate.app.child" in sys.orig_argv and os.environ.get("BROKEN_IN") in sys.orig_argv:
    os._exit(3)
"""


@pytest.mark.full
def test_a_release_that_cannot_serve_leaves_the_old_one_serving(
    made: Cluster, tmp_path: Path
) -> None:
    """I10: its mount process doesn't start; and the next one that does replaces the old one."""
    (node,) = made.nodes
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sitecustomize.py").write_text(BROKEN)
    known = processes_of(node)

    def disturb() -> None:
        broken = {"PYTHONPATH": str(tmp_path / "broken"), "BROKEN_IN": "mount"}
        done = replace(node, broken)
        assert (done.returncode, "did not get ready" in done.stderr) == (6, True), done.stderr
        assert processes_of(node) == known
        replaced(node)

    while_saving(node, made.store, disturb)


@pytest.mark.full
def test_a_signal_in_the_middle_of_a_replacement_ends_the_mount(made: Cluster) -> None:
    """I2: whichever of both has it then."""
    (node,) = made.nodes
    before = node.info().pid
    with _replacing(node) as other:
        until("the question", lambda: "being-replaced" in node.log())
        os.kill(before, signal.SIGTERM)
        other.wait(60)
    until("the end of the mount", lambda: not os.path.ismount(node.mnt), 60)
    until("the end of all", lambda: not users_of(node.spool, "lock", "mount.lock"), 60)
    node.start()


@pytest.mark.full
def test_a_signal_while_the_next_one_is_stopped_ends_the_mount_all_the_same(made: Cluster) -> None:
    """I2, I10: SIGSTOP in the middle of a takeover: it is waited for, and then no more."""
    (node,) = made.nodes
    before = node.info().pid

    def asking() -> int:
        found = re.search(r"being-replaced by=(\d+)", node.log())
        return int(found[1]) if found else 0

    with _replacing(node) as other:
        deadline = time.monotonic() + 60
        while not (after := asking()):
            assert time.monotonic() < deadline
        os.kill(after, signal.SIGSTOP)
        assert "replaced mountpoint" not in node.log(), "it was faster than this test"
        os.kill(before, signal.SIGTERM)
        until("the end of the mount", lambda: not os.path.ismount(node.mnt), 60)
        other.wait(60)
    assert "replacement-stuck" in node.log()
    until("the end of all", lambda: not users_of(node.spool, "lock", "mount.lock"), 60)
    node.start()


@pytest.mark.full
def test_a_new_configuration_takes_effect_by_a_replacement(made: Cluster) -> None:
    (node,) = made.nodes
    before = mount_number(node.mnt)
    node.config.write_text(node.config.read_text() + "[names]\ncheckpoints = ['mine-*']\n")
    words = ("mount", "--replace", "--config", node.config, "--spool", node.spool)
    done = cli(*words, made.store, node.mnt)
    assert done.returncode == 0, done.stderr
    assert mount_number(node.mnt) == before
    assert "mine-*" in (node.spool / "config.json").read_text()


@pytest.mark.full
def test_replacements_at_once_leave_one_of_each_process(made: Cluster) -> None:
    """I2, I10: whoever is second is refused, or replaces the first; nobody serves twice."""
    (node,) = made.nodes

    def disturb() -> None:
        others = [_replacing(node) for _ in range(3)]
        node.kill("mount")
        codes = [other.wait(90) for other in others]
        assert 0 in codes
        assert set(codes) <= {0, 6, 7}
        back(node)
        until("one mount process", lambda: len(children_of_spool(node, "mount")) == 1)
        until("one publisher", lambda: len(children_of_spool(node, "publisher")) == 1)

    while_saving(node, made.store, disturb)


def children_of_spool(node: Gateway, name: str) -> list[int]:
    """Pids of all child processes of that kind, whoever started them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[3:6] == [b"ckptgate.app.child", name.encode(), os.fsencode(node.spool)]:
                found.append(int(pid))
    return found


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.1, 0.6, 1.0])
def test_an_unmount_in_the_middle_of_a_replacement_ends_everything(
    made: Cluster, delay_s: float
) -> None:
    """I2, I10: whichever comes first."""
    (node,) = made.nodes
    with _replacing(node) as other:
        time.sleep(delay_s)
        done = node.stop()
        assert done.returncode in {0, 2, 4}, done.stderr
        other.wait(60)
    until("the end of the mount", lambda: not os.path.ismount(node.mnt), 30)
    until("the end of all", lambda: not children_of_spool(node, "mount"), 30)
    until("the end of the publisher", lambda: not children_of_spool(node, "publisher"), 60)
    until("the end of the keeper", lambda: not keeper_of(node), 30)
    node.start()


LOOKING = """
import os, sys, time
began = time.monotonic()
number = 0
try:
    os.stat(sys.argv[1])
except OSError as exc:
    number = exc.errno
print(number, time.monotonic() - began)
"""


def test_with_its_keeper_dead_too_a_mount_ends_and_nobody_waits(made: Cluster) -> None:
    """I10: kill -9 of everything; the next mount goes on."""
    (node,) = made.nodes
    known = processes_of(node)
    with start_job("import sys\nprint(open(sys.argv[1], 'w'))\nsys.stdin.read()", node.mnt / "f"):
        kill_all(known["keeper"], *(known[name] for name in known if name != "keeper"))
        done = until("an end", lambda: job(LOOKING, node.mnt / "f").stdout.split(), 30)
        assert int(done[0]) in {errno.ENOTCONN, errno.ECONNABORTED}
    node.start()
    (node.mnt / "again").mkdir()


@pytest.mark.full
def test_without_supervisor_and_keeper_the_mount_process_serves_for_a_while(made: Cluster) -> None:
    """Nobody starts another one: callers are answered, and then told that it is over."""
    (node,) = made.nodes
    known = processes_of(node)
    kill_all(known["keeper"], known["supervisor"])
    (node.mnt / "served").mkdir()
    until("the end", lambda: int(job(LOOKING, node.mnt).stdout.split()[0]), 60)
    node.start()
    assert (node.mnt / "served").is_dir()


@pytest.mark.full
def test_a_supervisor_that_dies_again_and_again_is_given_up(
    made: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its state says can't be read: the keeper tries, and then ends the session."""
    (node,) = made.nodes
    known = processes_of(node)
    (node.spool / "config.json").write_text("{")
    kill_all(known["supervisor"], known["mount"])
    until("the end", lambda: int(job(LOOKING, node.mnt).stdout.split()[0]), 60)
    until("the keeper's end", lambda: not keeper_of(node), 30)
    assert "dies again and again" in node.log()


@pytest.mark.full
def test_a_foreground_mount_is_not_replaced(tmp_path: Path) -> None:
    """Who started it would take it for dead."""
    (tmp_path / "store").mkdir()
    node = Gateway(tmp_path, "node", tmp_path / "store")
    words = [sys.executable, "-m", "ckptgate.app.cli", "mount", "--foreground"]
    words += [str(node.store), str(node.mnt), "--spool", str(node.spool)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            until("the mount", lambda: os.path.ismount(node.mnt) and (node.mnt / ".").exists())
            until("its announcement", lambda: node.info().pid == process.pid)
            done = replace(node)
            assert (done.returncode, "foreground" in done.stderr) == (3, True), done.stderr
            assert keeper_of(node) == 0
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert not os.path.ismount(node.mnt)


@pytest.mark.full
def test_a_kernel_that_sends_nothing_again_loses_nothing_in_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: there all is answered before; after a kill callers are told, and wait for nobody."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "faulty"))
    monkeypatch.setenv("FAULTS_OF_TEST", str(tmp_path / "none"))
    monkeypatch.setenv("NO_RESEND_OF_TEST", "1")
    with cluster(tmp_path) as made:
        (node,) = made.nodes
        while_saving(node, made.store, lambda: replaced(node))
        with saving(node, "other"):
            node.kill("mount")
            until("the end", lambda: not os.path.ismount(node.mnt), 60)
        assert "session-lost" in node.log()
