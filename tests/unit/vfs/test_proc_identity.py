"""Processes as /proc shows them: real ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ckptgate.model.jobkey import OUTSIDE, JobKind
from ckptgate_adapters.proc_identity import ProcIdentity


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    environ = {**os.environ, "CKPTGATE_RUN_ID": "r1", "RANK": "3", "WORLD_SIZE": "8"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_processes_environment_tells_its_job_and_rank(child):
    found = ProcIdentity().process(child.pid)
    assert (found.pid, str(found.job_key)) == (child.pid, "run:r1")
    assert (found.rank.rank, found.rank.world_size) == (3, 8)


def test_a_thread_belongs_to_its_process():
    found: list[int] = []
    identity = ProcIdentity()

    def run() -> None:
        found.append(identity.process(threading.get_native_id()).pid)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [os.getpid()]


def test_a_dead_process_is_not_alive(child):
    identity = ProcIdentity()
    found = identity.process(child.pid)
    assert identity.is_alive(found.pid, found.start)
    assert not identity.is_alive(found.pid, found.start + 1)
    assert not identity.closer(child.pid)[1]
    child.kill()
    child.wait()
    assert not identity.is_alive(found.pid, found.start)
    assert identity.process(child.pid).job_key == OUTSIDE
    assert identity.closer(child.pid)[1]


def test_a_number_that_another_process_got_is_that_process(tmp_path):
    """The descriptors that are kept are of processes, not of their numbers."""
    proc = tmp_path / "proc"
    proc.mkdir()
    identity = ProcIdentity(proc=str(proc))
    known = []
    for number in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            env={**os.environ, "CKPTGATE_RUN_ID": f"r{number}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            (proc / "7").unlink(missing_ok=True)
            for name in ("7", str(process.pid)):
                (proc / name).symlink_to(f"/proc/{process.pid}")
            known.append(str(identity.process(7).job_key))
            process.communicate(b"\n")
        assert identity.closer(7)[1]
    assert known == ["run:r0", "run:r1"]


def test_a_zombie_is_not_alive(child):
    identity = ProcIdentity()
    found = identity.process(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive(found.pid, found.start)


def test_unknown_callers_are_outside():
    assert ProcIdentity().process(0).job_key == OUTSIDE
    assert ProcIdentity().process(2**22 + 7).pid == 0


def test_without_a_job_the_session_counts(monkeypatch):
    identity = ProcIdentity(host="h")
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CKPTGATE", "SLURM", "TORCHELASTIC"))
    }
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        found = identity.process(process.pid)
        assert found.job_key.kind is JobKind.SESSION
        assert found.job_key.value == f"h/{process.pid}@{found.start}"
        process.communicate(b"\n")


def test_a_process_that_starts_another_program_is_known_anew():
    """A child may touch the mount before its exec: then it still has its parent's environment."""
    code = """
import os, sys
def again(*names):
    os.read(0, 1)
    if names:
        words = [sys.executable, "-c", sys.argv[1], sys.argv[1], *names[1:]]
        os.execve(sys.executable, words, {"CKPTGATE_RUN_ID": names[0]})
if sys.argv[2] != "fork":
    again(*sys.argv[2:])
elif pid := os.fork():
    print(pid, flush=True)
    os.waitpid(pid, 0)
else:
    again("two", "three", "four")
"""
    identity = ProcIdentity()
    with subprocess.Popen(
        [sys.executable, "-c", code, code, "fork"],
        env={"CKPTGATE_RUN_ID": "one"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    ) as parent:  # fmt: skip
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        for run_id in ("one", "two", "three"):
            deadline = time.monotonic() + 10
            while str(identity.process(pid).job_key) != f"run:{run_id}":
                assert time.monotonic() < deadline, identity.process(pid)
            parent.stdin.write(b"x")
        parent.stdin.write(b"xx")


OVERWRITE = """
import os, sys
def overwrite(text):
    # As programs do that show a title: over the environment's strings, from their beginning.
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(end - start, b"\\0"))
print(os.getpid(), flush=True)
input()
"""


@contextlib.contextmanager
def overwriting(code: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A process of the job r1 that runs *code* after a line; it ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", OVERWRITE + code],
        env={"CKPTGATE_RUN_ID": "r1", "RANK": "3", "WORLD_SIZE": "8"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
    ) as process:  # type: ignore[call-overload]  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> str:
    """Let it go on, and return its next line."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("title", ["", "worker: rank=3", "\\0\\0x"])
def test_a_process_that_overwrote_its_environment_is_who_it_was(title):
    code = f"overwrite(b'{title}'); print('done', flush=True); input()"
    identity = ProcIdentity()
    with overwriting(code) as process:
        assert str(identity.process(process.pid).job_key) == "run:r1"
        assert told(process) == "done"
        # An exec, or a title that is elsewhere in memory, makes it unknown.
        identity._known.clear()
        found = identity.process(process.pid)
        assert str(found.job_key) == "run:r1"
        assert found.rank.rank is None


def test_a_process_that_was_never_seen_before_is_of_its_parents_job():
    """Its parent and grandparent are asked, the session's leader at last."""
    code = """
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    overwrite(b"child")
    if not os.fork():
        overwrite(b"grandchild")
        print(os.getpid(), flush=True)
        sys.stdin.read()
    os.wait()
"""
    with overwriting(code) as process:
        pid = int(told(process))
        assert str(ProcIdentity().process(pid).job_key) == "run:r1"
        os.kill(pid, signal.SIGKILL)


def test_an_overwritten_environment_is_not_asked_for_beyond_its_session(monkeypatch):
    monkeypatch.setenv("CKPTGATE_RUN_ID", "another")
    code = "overwrite(b'leader'); print('done', flush=True); input()"
    with overwriting(code, start_new_session=True) as process:
        assert told(process) == "done"
        assert ProcIdentity().process(process.pid).job_key.kind is JobKind.SESSION


def test_what_is_left_of_an_overwritten_environment_counts():
    code = """
data = open("/proc/self/environ", "rb").read()
overwrite(b"title".ljust(8, b"\\0") + data[8:])
print("done", flush=True)
input()
"""
    environ = {"A": "0123456789", "CKPTGATE_RUN_ID": "left"}
    with subprocess.Popen(
        [sys.executable, "-c", OVERWRITE + code],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        assert told(process) == "done"
        assert str(ProcIdentity().process(process.pid).job_key) == "run:left"
        process.kill()


def test_a_duplicated_descriptor_is_found_by_its_inode(tmp_path):
    identity = ProcIdentity()
    path = tmp_path / "f"
    first = os.open(path, os.O_WRONLY | os.O_CREAT)
    ino = os.fstat(first).st_ino
    reader = os.open(path, os.O_RDONLY)
    second = os.dup(first)
    os.close(first)
    assert identity.holds(os.getpid(), ino)
    os.close(second)
    assert not identity.holds(os.getpid(), ino)
    os.close(reader)
    assert not identity.holds(2**22 + 7, ino)
