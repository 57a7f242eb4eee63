"""Mounts to measure: the gateway's, and that of the peer beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from bench import machine, peer
from ckptgate.app.registry import find_mount

__all__ = ["Mount", "PeerMount", "mounted", "peer_mounted", "scratch", "until"]

CONFIG = "[commit]\nidle_interval_s = 0.2\n[room]\nfree_min_share = 0.0\n"


def until(what: str, is_true: Callable[[], object], timeout_s: float = 600.0) -> None:
    """Wait for a condition, looking every 2 ms.

    Raises:
        TimeoutError: it names what did not happen.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            msg = f"not within {timeout_s:g} s: {what}"
            raise TimeoutError(msg)
        time.sleep(0.002)


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """A directory on the file system of *place* that is gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix="ckptgate-bench-", dir=place))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Mount:
    """A running mount of the gateway.

    Attributes:
        path: mount point.
        store, spool: where its data lie; a bucket's store is nowhere.
    """

    def __init__(self, base: Path, store: Path) -> None:
        self.path, self.store, self.spool = base / "mnt", store, base / "spool"
        self.supervisor = 0
        self._children: dict[str, int] = {}

    def find_processes(self) -> None:
        """Note the processes that serve it."""
        info = find_mount(str(self.path))
        assert info is not None, f"{self.path} is not mounted"
        self.supervisor = info.pid
        for child in _children_of(info.pid):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            for kind in ("mount", "publisher"):
                if kind.encode() in words:
                    self._children[kind] = child

    @property
    def server(self) -> int:
        """Pid of the process that answers requests."""
        return self._children["mount"]

    @property
    def publisher(self) -> int:
        """Pid of the process that digests and uploads."""
        return self._children["publisher"]

    @property
    def processes(self) -> list[int]:
        """All its processes, the supervisor and the relay among them."""
        children = _children_of(self.supervisor)
        return [self.supervisor, *children, *(pid for c in children for pid in _children_of(c))]

    def settle(self, size: int) -> None:
        """Before a measurement of *size* bytes; a stopped publisher counts as idle."""
        machine.settle(size, (self.server, self.publisher))

    @contextlib.contextmanager
    def paused(self, *, is_paused: bool = True) -> Iterator[None]:
        """With the publisher stopped: what is measured is the mount's path alone."""
        if not is_paused:
            yield
            return
        os.kill(self.publisher, signal.SIGSTOP)
        try:
            yield
        finally:
            # Where it is gone, something else went wrong, and is being told.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.publisher, signal.SIGCONT)

    def staged(self, size: int) -> Path:
        """The newest spool file of exactly *size* bytes."""
        found = [path for path in self.spool.rglob("*") if path.is_file()]
        return max(
            (path for path in found if path.stat().st_size == size),
            key=lambda path: path.stat().st_mtime_ns,
        )


@contextlib.contextmanager
def mounted(
    base: Path, *, store: Path | str | None = None, config: str = CONFIG, passthrough: bool = True
) -> Iterator[Mount]:
    """Mount below *base*; the spool lies there, the store beside it if none is given.

    A store `s3://...` is where the environment says. Whatever was written is thrown away: the
    unmount doesn't wait for unfinished checkpoints.
    """
    directory = base / "store" if store is None or isinstance(store, str) else store
    mount = Mount(base, directory)
    directory.mkdir(exist_ok=True)
    (base / "ckptgate.toml").write_text(f"passthrough = {str(passthrough).lower()}\n{config}")
    _command("mount", store or directory, mount.path, "--spool", mount.spool,
             "--config", base / "ckptgate.toml")  # fmt: skip
    try:
        mount.find_processes()
        yield mount
    finally:
        _command("umount", mount.path, "--timeout", "0", "--lazy", check=False)


class PeerMount:
    """A running file system of a peer's process.

    Attributes:
        path: mount point.
        pid: of its process.
    """

    def __init__(self, path: Path, pid: int) -> None:
        self.path, self.pid = path, pid


@contextlib.contextmanager
def peer_mounted(base: Path, module: ModuleType = peer) -> Iterator[PeerMount]:
    """Mount a peer (`bench.peer` or `bench.bare`) over a directory below *base*."""
    name = module.__name__.rpartition(".")[2]
    point, backing = base / f"{name}-mnt", base / f"{name}-data"
    point.mkdir()
    backing.mkdir()
    process = subprocess.Popen([sys.executable, "-m", module.__name__, backing, point])
    try:
        until("the peer's mount", lambda: os.path.ismount(point), 20)
        yield PeerMount(point, process.pid)
    finally:
        subprocess.run(["fusermount3", "-u", "-z", point], check=False)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(*words: str | Path, check: bool = True) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptgate.app.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode:
        msg = f"ckptgate {words[0]}: {done.stderr.strip()}"
        raise RuntimeError(msg)


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found
