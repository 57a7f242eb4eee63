"""In the guest: save until the quota is used up, make room, and go on; see `test_quota`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import ckptgate

MIB = 1 << 20
FILE_BYTES = 2 * MIB


def fill(step: Path) -> tuple[list[list[str]], int]:
    """Files of 2 MiB until one isn't taken: which calls said so, and how many were."""
    said: list[list[str]] = []
    whole = 0
    while not said:
        fd = -1
        doing = "open"
        try:
            fd = os.open(step / f"{whole}.bin", os.O_CREAT | os.O_WRONLY)
            doing = "write"
            left = FILE_BYTES
            while left:
                left -= os.write(fd, bytes([whole]) * min(left, MIB))
            doing = "fsync"
            os.fsync(fd)
            whole += 1
        except OSError as exc:
            said.append([doing, errno.errorcode[exc.errno or 0]])
        try:
            if fd >= 0:
                os.close(fd)
        except OSError as exc:
            said.append(["close", errno.errorcode[exc.errno or 0]])
    return said, whole


def go_on(step: Path, whole: int) -> None:
    """Make room, and finish the save."""
    for number in (0, whole):
        (step / f"{number}.bin").unlink(missing_ok=True)
    (step / "last.bin").write_bytes(b"last")
    ckptgate.commit(str(step), 0, 1)
    ckptgate.wait(str(step), 60)


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "ckptgate.app.cli", *words], check=True)


def main(store: str, mountpoint: str, spool: str) -> None:
    config = Path("/run/ckptgate.toml")
    config.write_text("[commit]\nidle_interval_s = 0.3\n[room]\nfree_min_share = 0.0\n")
    os.environ["CKPTGATE_RUN_ID"] = "job"
    command("mount", store, mountpoint, "--spool", spool, "--config", str(config))
    step = Path(mountpoint, "run/step-1")
    step.mkdir(parents=True)
    said, whole = fill(step)
    go_on(step, whole)
    committed = {path.name: path.read_bytes() for path in step.iterdir()}
    files = {f"{number}.bin": bytes([number]) * FILE_BYTES for number in range(1, whole)}
    command("umount", mountpoint)
    is_right = committed == files | {"last.bin": b"last"}
    print(json.dumps({"said": said, "whole": whole, "is_right": is_right}))


if __name__ == "__main__":
    main(*sys.argv[1:])
