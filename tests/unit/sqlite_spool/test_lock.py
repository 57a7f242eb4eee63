"""Who has the spool."""

from __future__ import annotations

import os
import subprocess

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
