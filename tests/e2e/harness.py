"""Real mounts for tests, started and stopped through the command line as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptgate.app.asking import ask
from ckptgate.app.registry import MountInfo, find_mount
from ckptgate.errors import CkptError
from ckptgate_adapters.channels import control_call
from ckptgate_adapters.fuse.channel import unmount

FAST = (
    "[commit]\nidle_interval_s = 0.3\nsurvivor_delay_s = 1.0\nlive_interval_s = 0.3\n"
    # However full the disk is that the tests run on.
    "[room]\nfree_min_share = 0.0\n"
)


def cli(
    *words: str | Path, env: dict[str, str] | None = None, timeout: float = 90.0
) -> subprocess.CompletedProcess[str]:
    """Run a `ckptgate` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ckptgate.app.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=dict(os.environ, **(env or {})),
        check=False,
    )


def until(what: str, is_true: Callable[[], object], timeout_s: float = 30.0) -> Any:
    """Wait for a condition; fails with its name."""
    deadline = time.monotonic() + timeout_s
    while not (value := is_true()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.03)
    return value


class Gateway:
    """One node: a mount of the store with a spool of its own."""

    def __init__(
        self,
        base: Path,
        name: str,
        store: Path,
        config: str = FAST,
        *,
        url: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.address = url or str(store)
        self.env = dict(env or {})
        self.mnt = base / name / "mnt"
        self.spool = base / name / "spool"
        self.config = base / name / "ckptgate.toml"
        self.mnt.mkdir(parents=True)
        self.config.write_text(config)

    def start(self) -> Gateway:
        """Mount; fails with the command's words."""
        done = self.mount()
        assert done.returncode == 0, done.stderr + self.log()
        return self

    def mount(self) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        where = (self.address, self.mnt, "--spool", self.spool)
        return cli("mount", *where, "--config", self.config, env=self.env)

    def stop(self, timeout: float = 15.0) -> subprocess.CompletedProcess[str]:
        """Unmount through the command line."""
        return cli("umount", self.mnt, "--timeout", str(timeout))

    def info(self) -> MountInfo:
        """Its registration."""
        info = find_mount(str(self.mnt))
        assert info is not None, f"{self.mnt} is not mounted"
        return info

    def child(self, kind: str) -> int:
        """Pid of the `mount` or `publisher` process."""

        def find() -> int:
            pid = self.info().pid
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                    if b"ckptgate.app.child" in words and kind.encode() in words:
                        return int(child)
            return 0

        return until(f"a {kind} process", find)

    def kill(self, kind: str) -> int:
        """kill -9 the `mount` or `publisher` process; returns its pid."""
        pid = self.child(kind)
        os.kill(pid, signal.SIGKILL)
        return pid

    def status(self) -> dict[str, Any]:
        """The daemon's report; a mount is there a moment before its publisher answers."""
        request = {"op": "status"}
        info = find_mount(str(self.mnt))
        return ask(info, request) if info else control_call(str(self.spool), request)

    def attempts(self, name: str) -> list[dict[str, Any]]:
        """The report's rows of one checkpoint."""
        with contextlib.suppress(CkptError):
            return [row for row in self.status()["attempts"] if row["name"] == name]
        return []

    def log(self) -> str:
        """The daemon's log."""
        path = self.spool / "ckptgate.log"
        return path.read_text() if path.exists() else ""

    def destroy(self) -> None:
        """End everything, whatever state it is in."""
        info = find_mount(str(self.mnt))
        if info is not None:
            with contextlib.suppress(CkptError):
                control_call(str(self.spool), {"op": "drain", "timeout_s": 0}, timeout_s=5)
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGTERM)
            deadline = time.monotonic() + 20
            while info.is_alive and time.monotonic() < deadline:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-1, os.WNOHANG)
                time.sleep(0.05)
            if info.is_alive:
                kill_daemon(self.spool)
        with contextlib.suppress(CkptError, OSError):
            unmount(str(self.mnt), lazy=True)


def users_of(spool: Path, *locks: str) -> list[int]:
    """Pids of the processes that have one of these locks of a spool open; a keeper comes first."""
    wanted = {str(spool / name) for name in locks}
    found: list[tuple[bool, int]] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fds = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            if wanted.intersection(fds):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found.append((b"/keeper.py" not in words, int(pid)))
    return [pid for _, pid in sorted(found)]


def kill_daemon(spool: Path, *, with_children: bool = True) -> None:
    """kill -9 of everything that runs a spool, and of who would start it again."""
    locks = ["lock", *(["mount.lock", "publisher.lock"] if with_children else [])]
    while pids := users_of(spool, *locks):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)


class Cluster:
    """A store directory and the nodes that mount it."""

    def __init__(self, base: Path, nodes: int = 1, config: str = FAST) -> None:
        self.store = base / "store"
        self.store.mkdir()
        self.nodes = [Gateway(base, f"node{i + 1}", self.store, config) for i in range(nodes)]

    def address(self, path: str) -> str:
        """How a command is told a path in the store."""
        return str(self.store / path)

    def cli(self, *words: str | Path) -> Any:
        """A command of somebody who may read the store."""
        return cli(*words)

    def names(self, path: str) -> list[str]:
        """What somebody without a mount finds in a directory, but the gateway's own."""
        return sorted(name for name in os.listdir(self.store / path) if name != ".ckptgate")

    def shown(self, path: str) -> dict[str, bytes]:
        """The files that such a one finds under a checkpoint's name; nothing where it isn't."""
        return tree(self.store / path)

    def pointer(self, path: str) -> str:
        """What a pointer says to such a one, "" where there is none."""
        there = self.store / path
        return os.readlink(there) if os.path.islink(there) else ""

    def plain(self, path: str) -> bytes:
        """The bytes of a plain file, b"" where there is none."""
        there = self.store / path
        return there.read_bytes() if there.exists() else b""

    def committed(self, run: str) -> list[str]:
        """Names of the committed checkpoints, oldest first."""
        done = cli("ls", self.store / run, "--json")
        if done.returncode != 0:
            return []
        return [row["name"] for row in json.loads(done.stdout)["checkpoints"]]

    def records(self, run: str) -> list[dict[str, Any]]:
        """The run's log."""
        done = cli("log", self.store / run, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["records"]

    def logs(self) -> str:
        """All daemons' logs, for a failing test."""
        return "\n".join(f"--- {node.name}\n{node.log()[-6000:]}" for node in self.nodes)


@contextlib.contextmanager
def cluster(base: Path, nodes: int = 1, config: str = FAST) -> Iterator[Cluster]:
    """A started cluster; it is taken down whatever happens, and a failure shows the logs."""
    made = Cluster(base, nodes, config)
    try:
        for node in made.nodes:
            node.start()
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        for node in made.nodes:
            node.destroy()


def job(code: str, *words: str | Path, run_id: str = "job1", **env: str):
    """Run Python code as a process of the job *run_id*."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env=dict(os.environ, CKPTGATE_RUN_ID=run_id, **env),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


class Job(subprocess.Popen[str]):
    """A process that doesn't outlive the `with` block it was started in."""

    def __exit__(self, *error: Any) -> None:
        if self.poll() is None:
            self.kill()
        super().__exit__(*error)


def start_job(code: str, *words: str | Path, run_id: str = "job1", **env: str) -> Any:
    """Start Python code as a process of the job *run_id*; its standard streams are pipes."""
    return Job(
        [sys.executable, "-u", "-c", code, *map(str, words)],
        env=dict(os.environ, CKPTGATE_RUN_ID=run_id, **env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tree(path: Path, without: Sequence[str] = (".ckptgate",)) -> dict[str, bytes]:
    """All files below *path* and their bytes."""
    found: dict[str, bytes] = {}
    for root, dirs, files in os.walk(path):
        dirs[:] = [name for name in dirs if name not in without]
        for name in files:
            full = Path(root) / name
            found[str(full.relative_to(path))] = full.read_bytes()
    return found
