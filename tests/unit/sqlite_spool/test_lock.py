"""Who has the spool."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from ckptgate.errors import (
    BusyError,
    UnusableError,
)
from ckptgate_adapters.sqlite_spool import SpoolLock


def test_the_second_holder_is_told_who_has_the_spool(spool):
    with SpoolLock(spool.path, mountpoint="/mnt/ckpt") as lock:
        assert lock.fd >= 0
        lock.acquire()
        with pytest.raises(
            BusyError, match=f"process {os.getpid()}, mounted on /mnt/ckpt"
        ) as caught:
            SpoolLock(spool.path).acquire()
        assert caught.value.hint == "ckptgate umount /mnt/ckpt"
        holder = SpoolLock(spool.path).holder() or {}
        assert holder["pid"] == os.getpid()
        assert set(holder) == {"pid", "host", "since", "mountpoint"}
    assert lock.fd == -1
    lock.release()
    assert lock.holder() is None
    with SpoolLock(spool.path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00" * 5000])
def test_a_lock_with_a_torn_holder_is_still_held(spool, content):
    with SpoolLock(spool.path) as lock:
        os.ftruncate(lock.fd, 0)
        os.pwrite(lock.fd, content.encode(), 0)
        assert lock.holder() == {}
        with pytest.raises(BusyError, match="in use by another process"):
            SpoolLock(spool.path).acquire()


def test_the_lock_of_a_missing_spool_is_refused(tmp_path):
    with pytest.raises(UnusableError, match="cannot lock the spool"):
        SpoolLock(str(tmp_path / "none")).acquire()
    assert SpoolLock(str(tmp_path / "none")).holder() is None


@pytest.mark.parametrize("is_inheritable", [True, False])
def test_a_child_keeps_the_lock_only_if_it_is_inheritable(spool, is_inheritable):
    lock = SpoolLock(spool.path, is_inheritable=is_inheritable)
    lock.acquire()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.release()
        assert (SpoolLock(spool.path).holder() is not None) is is_inheritable
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert SpoolLock(spool.path).holder() is None


def test_a_lock_that_is_handed_over_is_never_free(spool, tmp_path):
    """I2: the next holder has it before the present one is gone."""
    first, second = SpoolLock(spool.path, mountpoint="/one"), SpoolLock(spool.path)
    first.acquire()
    second.adopt(os.dup(first.fd))
    assert (SpoolLock(spool.path).holder() or {})["mountpoint"] == "/one"
    second.declare()
    assert (SpoolLock(spool.path).holder() or {})["mountpoint"] == ""
    first.leave()
    assert first.fd == -1
    assert (SpoolLock(spool.path).holder() or {})["pid"] == os.getpid()
    second.release()
    assert SpoolLock(spool.path).holder() is None


def test_who_only_looks_keeps_nobody_from_the_lock(spool):
    """I2: the first daemon of many ranks, all of which look who runs the spool."""
    with open(SpoolLock(spool.path)._path, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, lambda: fcntl.flock(stream, fcntl.LOCK_UN))
        timer.start()
        with SpoolLock(spool.path) as lock:
            assert (lock.holder() or {})["pid"] == os.getpid()
        timer.join()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_its_parent_looks_has_no_lock(spool, monkeypatch):
    """I2: it may live as long as its training, in which no daemon could be started again."""
    children: list[int] = []
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        real(fd, operation)
        if operation & fcntl.LOCK_SH:
            children.append(os.fork())
            if not children[-1]:
                signal.pause()

    with SpoolLock(spool.path):
        pass
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        assert SpoolLock(spool.path).holder() is None
    try:
        real_lock = SpoolLock(spool.path)
        real_lock.acquire()
        real_lock.release()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert children


def test_who_looks_while_the_holder_changes_finds_one_of_them(spool):
    """I2: never nobody: a mount that seems dead would be aborted by the next one."""
    lock, is_over = SpoolLock(spool.path, mountpoint="/" + "m" * 700), threading.Event()
    short = SpoolLock(spool.path, mountpoint="/s")
    lock.acquire()
    short.adopt(os.dup(lock.fd))
    found: list[object] = []

    def look() -> None:
        while not is_over.is_set():
            found.append((SpoolLock(spool.path).holder() or {}).get("mountpoint"))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        lock.declare()
        short.declare()
    is_over.set()
    thread.join()
    assert set(found) <= {"/s", "/" + "m" * 700}
    short.leave()
    lock.release()


def test_only_the_lock_of_this_spool_can_be_adopted(spool, tmp_path):
    with SpoolLock(spool.path):
        pass
    fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    with pytest.raises(UnusableError, match="not the lock of the spool"):
        SpoolLock(spool.path).adopt(fd)
    os.close(fd)
    with SpoolLock(spool.path) as lock:
        fd = os.open(os.path.join(spool.path, "lock"), os.O_RDWR)
        with pytest.raises(BusyError):
            SpoolLock(spool.path).adopt(fd)
        os.close(fd)
        assert lock.fd >= 0


HOLDING = """
import signal, sys, time
from ckptgate_adapters.sqlite_spool import SpoolLock
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if sys.argv[2] == "stopped":
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
lock = SpoolLock(sys.argv[1], name="mount.lock")
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["hears", "deaf", "stopped"])
def test_who_takes_a_lock_ends_its_holder(spool, kind):
    """I2: one that hears nothing, or is stopped, is killed; nobody else is signalled."""
    command = [sys.executable, "-c", HOLDING, spool.path, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        if kind == "stopped":
            child.send_signal(signal.SIGSTOP)
        lock = SpoolLock(spool.path, name="mount.lock")
        lock.acquire_from(signal.SIGUSR1, patience_s=0.3)
        assert (lock.holder() or {})["pid"] == os.getpid()
        assert child.wait() == -(signal.SIGUSR1 if kind == "hears" else signal.SIGKILL)
        lock.release()
    # It is another lock than the spool's own.
    with SpoolLock(spool.path), SpoolLock(spool.path, name="mount.lock"):
        pass
