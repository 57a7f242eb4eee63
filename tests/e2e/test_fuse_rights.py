"""The FUSE driver on a real kernel without the right to pass through, or to mount."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.e2e.toy_mounts import mounted, need_mount
from tests.facilities import lacking

from ckptgate_adapters.fuse import channel
from ckptgate_adapters.fuse.channel import MountOptions

pytestmark = pytest.mark.fuse


def test_without_the_right_to_pass_through_the_server_moves_the_bytes(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        lacking("no setpriv")
    with mounted(tmp_path, is_unprivileged=True) as toy:
        for name in ("a", "b"):
            (toy.mnt / name).write_bytes(b"x" * 100_000)
            assert (toy.mnt / name).read_bytes() == b"x" * 100_000
        assert toy.ask("passthrough") == "off: EPERM"
        assert toy.log().count("passthrough-off reason=EPERM") == 1
        assert toy.counts()["WRITE"] >= 2


@pytest.mark.skipif(not os.access("/sys/class/bdi", os.W_OK), reason="needs a writable /sys")
def test_what_does_not_pass_through_is_read_in_large_requests(tmp_path: Path) -> None:
    """The kernel's own default asks for 128 KiB at once."""
    if shutil.which("setpriv") is None:
        lacking("no setpriv")
    with mounted(tmp_path, is_unprivileged=True) as toy:
        data = os.urandom(8 << 20)
        (toy.mnt / "f").write_bytes(data)
        assert (toy.mnt / "f").read_bytes() == data
        assert 8 <= toy.counts()["READ"] <= 12


def test_an_unprivileged_server_mounts_with_the_helper(tmp_path: Path) -> None:
    """By fusermount3, where the kernel refuses mount(2)."""
    need_mount()
    mnt = tmp_path / "helper"
    mnt.mkdir()
    fd = channel._mount_by_helper(str(mnt), MountOptions(fsname="a,b"))
    try:
        lines = [
            line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(mnt) in line
        ]
        assert "fuse.ckptgate" in lines[-1]
        assert "a,b" in lines[-1]
    finally:
        channel.unmount(str(mnt), lazy=True)
        os.close(fd)
