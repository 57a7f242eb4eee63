"""A spool whose user has a quota: a real one, of an XFS in a User-Mode Linux guest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "quota"
REPOSITORY = Path(__file__).parents[2]
BOOT = REPOSITORY / "tests/contract/nfs/boot_uml.sh"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
LIMIT_MIB = 64


@pytest.mark.timeout(300)
def test_a_used_up_quota_is_told_by_open_write_or_fsync_and_with_room_the_save_goes_on(
    require, disk_path: Path
) -> None:
    """I11: EDQUOT, never by close alone; what was written before is committed whole."""
    for name in ("linux.uml", "modprobe", "mkfs.xfs", "xfs_quota", "setpriv"):
        require(shutil.which(name, path=PATH), f"not installed: {name}")
    require(os.geteuid() == 0, "a guest with the host's root directory needs root")
    script = disk_path / "guest.sh"
    script.write_text(
        f"export PYTHON={sys.executable} REPOSITORY={REPOSITORY} PYTHONDONTWRITEBYTECODE=1\n"
        f"LIMIT_MIB={LIMIT_MIB}\ncd {REPOSITORY}\n. {HERE}/guest.sh\n"
    )
    done = subprocess.run(
        [str(BOOT), str(script)],
        env={**os.environ, "PATH": PATH, "UML_TIMEOUT_S": "240"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    doing, told = found["said"][0]
    assert doing in {"open", "write", "fsync"}
    assert told == "EDQUOT"
    assert LIMIT_MIB / 4 < found["whole"] * 2 < LIMIT_MIB
    assert found["is_right"]
