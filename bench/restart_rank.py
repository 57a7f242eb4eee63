"""A rank that saves while the gateway is restarted: `python -m bench.restart_rank DIRECTORY`.

It makes calls that need the gateway, and writes that pass through the kernel, one after the other,
without a pause. For each line on standard input it prints what the slowest of both took since the
last one, and how many failed. Ends with standard input.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path

__all__ = ["main"]

_BLOCK = bytes(65536)


class _Rank:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.makedirs(directory, exist_ok=True)
        self.fd = os.open(f"{directory}/shard", os.O_CREAT | os.O_WRONLY)
        self.clear()

    def clear(self) -> None:
        self.call_s = self.write_s = 0.0
        self.calls = self.failed = 0

    def cycle(self, number: int) -> None:
        name = f"{self.directory}/{number}"
        for call, words in (
            (os.mkdir, (name,)),
            (os.rename, (name, f"{name}.new")),
            (os.stat, (f"{name}.new",)),
            (os.rmdir, (f"{name}.new",)),
            (Path(f"{name}.file").touch, ()),
            (os.unlink, (f"{name}.file",)),
        ):
            began = time.monotonic()
            try:
                call(*words)
            except OSError:
                self.failed += 1
            self.call_s = max(self.call_s, time.monotonic() - began)
            self.calls += 1
        began = time.monotonic()
        try:
            os.pwrite(self.fd, _BLOCK, number % 64 * len(_BLOCK))
        except OSError:
            self.failed += 1
        self.write_s = max(self.write_s, time.monotonic() - began)


def main(directory: str) -> None:
    """Work until standard input ends."""
    rank = _Rank(directory)
    number = 0
    print("begun", flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            told = {"call_s": rank.call_s, "write_s": rank.write_s}
            print(json.dumps(told | {"calls": rank.calls, "failed": rank.failed}), flush=True)
            rank.clear()
        rank.cycle(number)
        number += 1
        time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1])
