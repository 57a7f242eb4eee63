"""A toy file system on real mounts, served by the driver in processes that may be killed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facilities import lacking

from ckptgate.errors import CkptError
from ckptgate_adapters.fuse import channel
from ckptgate_adapters.fuse.channel import MountOptions

_ANY = "Errno"
"""The errno is looked at afterwards."""

_libc = ctypes.CDLL(None, use_errno=True)
_WITHOUT_ADMIN = ("--inh-caps=-sys_admin", "--bounding-set=-sys_admin")
_ROOT = Path(__file__).resolve().parents[2]


class Toy:
    """A mount, its descriptor, and the process that serves it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root / "spool"
        self.mnt = root / "mnt"
        self.root.mkdir()
        self.mnt.mkdir()
        self.options = options
        self.fd = channel.mount(str(self.mnt), MountOptions(fsname="toy"))
        self.process = self.start()

    def start(self, **more: Any) -> subprocess.Popen[str]:
        options = {"root": str(self.root), "fd": self.fd, **self.options, **more}
        prefix = ["setpriv", *_WITHOUT_ADMIN] if options.get("is_unprivileged") else []
        with (self.root / "log").open("a") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.e2e.toyfs", json.dumps(options)],
                cwd=_ROOT,
                pass_fds=[self.fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert process.stdout is not None
        assert process.stdout.readline() == '"ready"\n', self.log()
        return process

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def counts(self) -> dict[str, int]:
        return dict(self.ask("counts"))

    def is_passing(self) -> bool:
        # The first answer proves that INIT is done; an open decides the rest.
        os.stat(self.mnt)
        return bool(self.ask("passthrough") == "on")

    def log(self) -> str:
        return (self.root / "log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def take_over(self, **more: Any) -> None:
        self.kill()
        self.process = self.start(resume=True, **more)

    def close(self) -> None:
        # Whoever still waits for this mount must not wait for ever.
        with contextlib.suppress(OSError):
            channel.abort(str(self.mnt))
        with contextlib.suppress(OSError):
            channel.unmount(str(self.mnt), lazy=True)
        self.kill()
        os.close(self.fd)


_CLIENT = """
import json, mmap, os, sys, threading
scope = {"os": os, "mmap": mmap}
for line in sys.stdin:
    code = json.loads(line)
    try:
        result = eval(code, scope)
    except SyntaxError:
        result = exec(code, scope)
    except OSError as exc:
        result = ["OSError", exc.errno]
    print(json.dumps(result, default=repr), flush=True)
"""


class Client:
    """A process that uses a mount.

    The tests' own process must hold no file of a mount while it starts a server: the child closes
    its copies before exec, and each close waits for the server that is not there yet.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, code: str) -> Any:
        self.begin(code)
        return self.end()

    def is_waiting(self, seconds: float = 0.15) -> bool:
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], seconds)[0]

    def close(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()


def need_mount() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        if os.environ.get("CI") == "true":
            pytest.fail("no /dev/fuse")
        lacking("no /dev/fuse")


@contextlib.contextmanager
def mounted(root: Path, **options: Any) -> Iterator[Toy]:
    need_mount()
    try:
        toy = Toy(root, **options)
    except CkptError as exc:
        if os.environ.get("CI") == "true":
            raise
        lacking(f"cannot mount: {exc}")
    try:
        yield toy
    finally:
        toy.close()


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.01)
