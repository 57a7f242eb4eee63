"""What an operator's commands say of wrong paths, torn writers, and a daemon that stands still."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway, cli, until

from ckptgate.app import reach
from ckptgate.app.cli import main
from ckptgate.errors import ExitCode

pytestmark = [pytest.mark.fuse]

TORN = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as stream:
    stream.write(b"x" * 1000)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def save(run: Path) -> Path:
    """A committed checkpoint with a directory in it."""
    path = run / "step-1"
    (path / "sub").mkdir(parents=True)
    (path / "sub/a.bin").write_bytes(b"a")
    assert main(["commit", str(path), "--all", "--wait", "--timeout", "30"]) == 0
    return path


def test_a_path_at_which_nothing_is_is_told_and_not_found(node: Gateway, save: Path, capsys):
    nothing = [node.mnt / "typo", node.mnt / "typo/step-1", save.parent / "step-7", save / "b.bin"]
    nothing.append(node.store / save.parent.name / "step-7")
    for command in ("status", "abort", "commit --all", "wait", "pin", "unpin", "verify", "show"):
        for path in nothing:
            word, *more = command.split()
            capsys.readouterr()
            assert main([word, str(path), *more]) == ExitCode.NOT_FOUND, (command, path)
            said = capsys.readouterr().err
            assert f"{path.name}'" in said, said
    for command in ("gc", "log", "ls"):
        assert main([command, str(node.mnt / "typo")]) == ExitCode.NOT_FOUND, command
        assert "'typo'" in capsys.readouterr().err
    for path in (node.mnt, save.parent, save, save / "sub", save / "sub/a.bin"):
        assert main(["status", str(path)]) != ExitCode.NOT_FOUND, path
    assert f"{save.parent.name}/step-1  committed" in capsys.readouterr().out


def test_only_the_mount_point_itself_is_unmounted(node: Gateway, save: Path, capsys):
    for path in (save, node.mnt / "typo"):
        assert main(["umount", str(path)]) == ExitCode.USAGE
        assert f"ckptgate umount {node.mnt}" in capsys.readouterr().err
    assert (save / "sub/a.bin").read_bytes() == b"a"


def test_a_commit_names_the_files_whose_writers_died(node: Gateway, run: Path):
    path = run / "step-1"
    path.mkdir()
    (path / "whole.bin").write_bytes(b"w")
    words = [sys.executable, "-c", TORN, str(path / "torn.bin")]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    done = cli("commit", path, "--all", "--wait", "--timeout", "30")
    assert done.returncode == 0, done.stderr
    assert "warning: the writer of 'torn.bin' died with it open" in done.stderr
    assert f"ckptgate abort {path}" in done.stderr
    assert "whole.bin" not in done.stderr
    assert (path / "torn.bin").read_bytes() == b"x" * 1000
    told = [e for e in node.status()["events"] if e["kind"] == "torn-committed"]
    assert [e["subject"] for e in told] == [f"{run.name}/step-1/torn.bin"]
    # Said of what it commits now, not of what was committed.
    assert cli("commit", path, "--all").stderr == ""


def _check_refused(node: Gateway, path: Path, capsys, kinds: tuple[str, ...]) -> None:
    for command in ("status", "commit --all --wait", "wait", "gc", "umount"):
        word, *more = command.split()
        where = node.mnt if word in {"umount", "gc"} else path
        capsys.readouterr()
        assert main([word, str(where), *more]) == ExitCode.UNUSABLE, command
        done = capsys.readouterr()
        said = done.out + done.err
        assert any(f"the {kind} process of {node.mnt} (pid " in said for kind in kinds), said
        assert "is stopped and answers nobody" in said


def test_no_command_waits_for_a_daemon_that_is_stopped(
    node: Gateway, run: Path, capsys, monkeypatch
):
    monkeypatch.setattr(reach, "_CHECK_S", 0.1)
    path = run / "step-1"
    path.mkdir()
    (path / "a").write_bytes(b"a")
    pids = {kind: node.child(kind) for kind in ("mount", "publisher")}
    try:
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        until("both are stopped", lambda: all(reach.stopped_child(node.info(), k) for k in pids))
        _check_refused(node, path, capsys, ("mount", "publisher"))
        os.kill(pids["mount"], signal.SIGCONT)
        _check_refused(node, path, capsys, ("publisher",))
        # What its caller was told to have failed is not done later.
        assert cli("abort", path).returncode == ExitCode.UNUSABLE
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
    assert main(["commit", str(path), "--all", "--wait", "--timeout", "30"]) == 0


def test_a_mount_that_may_goes_before_what_keeps_the_cpus_busy(node: Gateway, require):
    require(os.geteuid() == 0, "a higher priority needs root")
    priorities = {
        kind: {
            os.getpriority(os.PRIO_PROCESS, int(thread))
            for thread in os.listdir(f"/proc/{node.child(kind)}/task")
        }
        for kind in ("mount", "publisher")
    }
    assert priorities["mount"] == {-10}
    assert min(priorities["publisher"]) == 0


def test_a_daemon_that_does_not_answer_is_waited_for_no_longer_than_that():
    """Whatever it is that keeps a look into a mount."""
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match=r"does not answer within 0\.05 s"):
            reach.within_reach(lambda: os.read(reader, 1), mounts=list, child="mount", limit_s=0.05)
    finally:
        os.close(writer)


def test_who_only_looks_does_not_wait_for_a_process_that_changes_the_spool(
    node: Gateway, save: Path
):
    """An operator's transaction in spool.db; changes wait for its end."""
    plain, made = node.mnt / "plain", save.parent / "step-2"
    for directory in (plain, made):
        directory.mkdir()
        (directory / "log").write_bytes(b"log")
    # Each holds up a thread of the mount; in one directory the kernel would let one do so.
    changed = [made / f"f{number}" for number in range(40)]
    for path in changed:
        path.touch()
    writers = [threading.Thread(target=os.chmod, args=(path, 0o600)) for path in changed]
    # What nobody has looked at before is new to the spool: that waits, too.
    assert os.readlink(save.parent / "latest") == "step-1"
    os.listdir(save.parent)
    operator = sqlite3.connect(node.spool / "spool.db", isolation_level=None)
    operator.execute("BEGIN IMMEDIATE")
    try:
        for writer in writers:
            writer.start()
        # Past the time for which the kernel, and the mount, believe what they were told last.
        time.sleep(1.2)
        for path in (save / "sub/a.bin", plain / "log", made / "log"):
            assert path.stat().st_size == len(path.read_bytes())
            assert path.name in os.listdir(path.parent)
        assert os.readlink(save.parent / "latest") == "step-1"
        assert set(os.listdir(save.parent)) == {"step-1", "step-2", "latest"}
        assert main(["status", str(save)]) == 0
        # What waits for the lock does so until the end of this, or for 30 s: nothing above did.
        assert all(writer.is_alive() for writer in writers)
    finally:
        operator.execute("ROLLBACK")
        operator.close()
    for writer in writers:
        writer.join(30)
    assert {path.stat().st_mode & 0o777 for path in changed} == {0o600}


def test_what_was_planted_in_the_store_is_named_and_not_followed(
    node: Gateway, save: Path, tmp_path: Path, capsys
):
    """I13."""
    shown = node.store / save.parent.name / "step-1"
    until("it is shown", shown.is_dir)
    attempt = node.store / save.parent.name / ".ckptgate/attempts/step-1.0"
    (data,) = (path for path in (attempt / "data").rglob("*") if path.is_file())
    (manifest,) = attempt.glob("manifest-*")
    for planted, code, said in (
        (data, ExitCode.INTEGRITY, "a symlink is in its place"),
        (data.parent, ExitCode.INTEGRITY, "a symlink or file is in the place of a directory"),
        (shown, ExitCode.INTEGRITY, "published directory is not there"),
        (manifest, ExitCode.UNUSABLE, "ls -l names it"),
    ):
        away = tmp_path / "away"
        planted.rename(away)
        planted.symlink_to(away)
        for path in (save, shown):
            capsys.readouterr()
            assert main(["verify", str(path)]) == code, planted
            done = capsys.readouterr()
            assert said in done.out + done.err
        planted.unlink()
        away.rename(planted)
    assert main(["verify", str(save)]) == 0


def test_a_committed_file_is_not_opened_for_writing_by_a_descriptor(node: Gateway, save: Path):
    """The kernel has nothing to look up again there; nothing is left of the try."""
    with (save / "sub/a.bin").open("rb") as stream:
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{stream.fileno()}", flags)
        assert all(row["state"] != "open" for row in node.attempts("step-1"))
        assert stream.read() == b"a"
    with (save / "sub/a.bin").open("r+b") as stream:
        stream.write(b"b")
        stream.flush()
        assert (save / "sub/a.bin").read_bytes() == b"b"
        again = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY)
        os.close(again)
    run = save.parent.name
    rows = [row for row in node.attempts("step-1") if row["run"] == run]
    assert [row["state"] for row in rows][-1] == "open"
    assert main(["abort", str(save)]) == 0
