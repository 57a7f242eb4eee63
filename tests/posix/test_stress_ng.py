"""stress-ng's stressors of file systems verify what they do: what passes on ext4 passes here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway

pytestmark = [pytest.mark.fuse]

IMPORTANT = ["rename", "copy-file", "hdd", "lockofd", "utime", "fallocate", "open", "chmod"]
# Of the class all that work in the directory that they are given, but for `link`: there are no hard
# links here, for which it asks over and over. `fiemap` and `verity` find that there is nothing.
OTHERS = [
    *("access", "chattr", "chdir", "chown", "dentry", "dir", "dirdeep", "dirmany", "dnotify"),
    *("dup", "fanotify", "fcntl", "fiemap", "file-ioctl", "filename", "flock", "fpunch"),
    *("fsize", "fstat", "getdent", "handle", "inode-flags", "inotify", "io", "iomix", "lease"),
    *("locka", "lockf", "mknod", "symlink", "sync-file", "touch", "verity", "xattr"),
]
# 3: a resource is missing, 4: not implemented here.
PASSED = {0, 3, 4}


def _run(stressor: str, directory: Path, work: Path) -> tuple[int, str]:
    """One instance for two seconds; its processes overwrite their environments by titles."""
    script = 'mkdir -p "$DIR" && exec stress-ng --temp-path "$DIR" --"$0" 1 --timeout 2 --verify'
    done = subprocess.run(
        ["sh", "-c", script, stressor],
        env=dict(os.environ, DIR=str(directory), CKPTGATE_RUN_ID=f"stress-{stressor}"),
        cwd=work,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout[-1500:] + done.stderr[-1500:]


def _check(node: Gateway, kind: str, stressor: str, work: Path) -> None:
    code, words = _run(stressor, node.mnt / f"run-{stressor}-{kind}" / kind, work)
    assert "dispatching hogs: 1 " in words
    assert code in PASSED or _fails_locally(stressor, work), (code, words)


def _fails_locally(stressor: str, work: Path) -> bool:
    return _run(stressor, work / "local", work)[0] not in PASSED


@pytest.mark.parametrize("kind", ["step-1", pytest.param("plain", marks=pytest.mark.full)])
@pytest.mark.parametrize("stressor", IMPORTANT)
def test_a_stressor_that_passes_on_a_local_disk_passes_here(
    node: Gateway, kind, stressor, require, tmp_path
):
    require(shutil.which("stress-ng"), "stress-ng is not installed")
    _check(node, kind, stressor, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["step-1", "plain"])
@pytest.mark.parametrize("stressor", OTHERS)
def test_each_other_stressor_that_passes_on_a_local_disk_passes_here(
    node: Gateway, kind, stressor, require, tmp_path
):
    require(shutil.which("stress-ng"), "stress-ng is not installed")
    _check(node, kind, stressor, tmp_path)
