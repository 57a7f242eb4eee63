"""The process whose system calls are recorded: saves with and without fsync, in one gateway.

`recorded.py SPOOL STORE ACKNOWLEDGED`. What somebody relies on is written to ACKNOWLEDGED, one line
each, when it is promised: `file PATH`, `config VERSION`, `committed NAME`.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from tests.gateway_harness import Gateway

from ckptgate.engine.powerloss import begin_boot
from ckptgate.model.states import AttemptState
from ckptgate_adapters.posix_store import PosixStore

FILES = ("a.bin", "b.bin", "deep/c.bin", "d.bin")
SYNCED = ("a.bin", "deep/c.bin")
STEPS = ("step-1", "step-2", "step-3")


class FarStore(PosixStore):
    """A store on another machine: it shares no bytes with the spool."""

    def local_path(self, key: str) -> str | None:
        return None


def content(path: str) -> bytes:
    """The bytes of a file, by its path below the run."""
    chance = random.Random(path)
    return chance.randbytes(chance.randrange(5_000, 20_000))


def config(version: int) -> bytes:
    return b"version %d\n" % version * 100


class Recorded:
    def __init__(self, spool: str, store: str, noted: str) -> None:
        os.makedirs(store, exist_ok=True)
        self.gateway = Gateway(Path(spool), FarStore(store))
        self.noted = os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *words: str) -> None:
        os.write(self.noted, (" ".join(words) + "\n").encode())

    def mkdir(self, path: str) -> None:
        with self.gateway.request() as caller:
            self.gateway.mkdir(caller, path)

    def put(self, path: str, data: bytes, *, is_synced: bool) -> None:
        gateway = self.gateway
        with gateway.request() as caller:
            fh = gateway.open_new(caller, path)
            fd = gateway.opened(fh).fd
            for start in range(0, len(data), 6000):
                os.pwrite(fd, data[start : start + 6000], start)
            if is_synced:
                gateway.vfs.fsync(caller, fh, data_only=False)
            gateway.close_file(fh)

    def replace_config(self, version: int, *, is_dir_synced: bool) -> None:
        gateway = self.gateway
        self.put("config.new", config(version), is_synced=True)
        with gateway.request() as caller:
            gateway.rename(caller, "config.new", "config.json")
            if is_dir_synced:
                gateway.vfs.fsyncdir(caller, 1)
                self.note("config", str(version))

    def save(self, name: str) -> None:
        gateway = self.gateway
        self.mkdir(f"run/{name}")
        self.mkdir(f"run/{name}/deep")
        for path in FILES:
            full = f"run/{name}/{path}"
            is_synced = path in SYNCED
            if path == "d.bin":
                self.put(full + ".part", content(f"{name}/{path}"), is_synced=False)
                with gateway.request() as caller:
                    gateway.rename(caller, full + ".part", full)
            else:
                self.put(full, content(f"{name}/{path}"), is_synced=is_synced)
            if is_synced:
                self.note("file", f"{name}/{path}")
        with gateway.request() as caller:
            gateway.commit(caller, f"run/{name}")

    def settle(self) -> None:
        for _ in range(40):
            self.gateway.publisher.step()
            self.gateway.clock.advance(1.0)
            for row in self.gateway.attempts(AttemptState.COMMITTED):
                self.note("committed", row.name)

    def run(self) -> None:
        begin_boot(self.gateway.mount.spool, "before", self.gateway.events)
        self.mkdir("run")
        self.replace_config(1, is_dir_synced=True)
        self.save("step-1")
        self.settle()
        self.replace_config(2, is_dir_synced=False)
        self.save("step-2")
        self.replace_config(3, is_dir_synced=True)
        self.settle()
        self.save("step-3")
        self.replace_config(4, is_dir_synced=False)
        self.gateway.mount.spool.finish_removals()


if __name__ == "__main__":
    Recorded(*sys.argv[1:]).run()
