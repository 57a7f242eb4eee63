"""Starts the ranks of a training, and reads checkpoints, in processes that have it imported.

    python -m tests.frameworks.starter FRAMEWORK FD_OF_JOBS FD_OF_LOADS

Two servers, each with a socket on which it gets and answers JSON lines. One forks the ranks, with
an environment as torchrun gives it, waits for them and ends those that outlive the first that
failed. The other forks a reader for each checkpoint that it is asked for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.frameworks.job import Job, digest
from tests.frameworks.stops import Fault, Listener, install, kill_group, set_environment
from tests.frameworks.trainings import known
from tests.frameworks.trainings.rules import Framework

GRACE_S = 1.0
"""For what goes on when a rank failed, as on other nodes that don't know of it yet."""
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


def main() -> None:
    name, jobs, loads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    framework = known.get(name)
    if os.fork() == 0:
        serve(socket.socket(fileno=loads), lambda asked: read(framework, asked))
        os._exit(0)
    os.close(loads)
    serve(socket.socket(fileno=jobs), lambda asked: start(framework, asked))
    os._exit(0)


def start(framework: Framework, asked: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks; what they imported themselves the next ones have from the beginning."""
    result = Start(framework, asked).result()
    modules = Path(asked["out"], "modules")
    for name in modules.read_text().split() if modules.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return result


def serve(connection: socket.socket, answer: Callable[[Any], Any]) -> None:
    with connection, connection.makefile("rw") as lines:
        lines.write("{}\n")
        lines.flush()
        for line in lines:
            lines.write(json.dumps(answer(json.loads(line))) + "\n")
            lines.flush()


def forked(child: Callable[[], None], log: Path) -> int:
    """The pid of a process, in a group of its own, that does this and ends."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        child()
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def environment(**more: str) -> dict[str, str]:
    """What the ranks have in common with this process, and more."""
    return {key: os.environ[key] for key in _KEPT if key in os.environ} | more


class Start:
    """One start of a training."""

    def __init__(self, framework: Framework, asked: dict[str, Any]) -> None:
        self.framework = framework
        self.asked = asked
        self.out = Path(asked["out"])
        self.out.mkdir()
        self.listeners: dict[int, Listener] = {}
        self.pids: dict[int, int] = {}

    def result(self) -> dict[str, Any]:
        """How it ended."""
        for rank in range(self.framework.world):
            self.pids[rank] = self._rank(rank)
        codes = self._wait()
        for listener in self.listeners.values():
            listener.join(10)
        return {
            "codes": codes,
            "ops": {
                rank: {save: [[op.call, op.path] for op in ops] for save, ops in known.ops.items()}
                for rank, known in self.listeners.items()
            },
            "has_struck": any(listener.has_struck for listener in self.listeners.values()),
        }

    def _rank(self, rank: int) -> int:
        watched = self.asked["watched"].get(str(rank))
        ours, theirs = socket.socketpair()
        root = self.asked["roots"][rank * len(self.asked["roots"]) // self.framework.world]

        def child() -> None:
            ours.close()
            set_environment(self._environment(rank))
            if watched is not None:
                fd = install()
                socket.send_fds(theirs, [b"x"], [fd])
                os.close(fd)
            theirs.close()
            # Where a rank hangs is in its log.
            faulthandler.dump_traceback_later(0.9 * self.asked["timeout_s"])
            job = Job(
                root=Path(root),
                out=self.out,
                rank=rank,
                world=self.framework.world,
                steps=self.asked["steps"],
                every=self.asked["every"],
                keep=self.asked["keep"],
            )
            state = self.framework.train(job)
            (self.out / f"final-{rank}").write_text(digest(state))
            if rank == 0:
                (self.out / "modules").write_text("\n".join(sorted(sys.modules)))

        pid = forked(child, self.out / f"log-{rank}")
        theirs.close()
        with ours:
            if watched is not None:
                _, (fd, *_), _, _ = socket.recv_fds(ours, 1, 1)
                fault = Fault(**watched) if watched else None
                self.listeners[rank] = Listener(
                    fd, root, f"{self.out}/saving-", fault, lambda all_: self._kill(rank, all_)
                )
        return pid

    def _environment(self, rank: int) -> dict[str, str]:
        world = str(self.framework.world)
        return environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=world,
            LOCAL_WORLD_SIZE=world,
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.asked["port"]),
            TORCHELASTIC_RUN_ID=self.asked["job"],
            TORCHELASTIC_RESTART_COUNT="0",
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            DS_ACCELERATOR="cpu",
            JAX_PLATFORMS="cpu",
        )

    def _kill(self, rank: int, is_all: bool) -> None:
        for pid in self.pids.values() if is_all else [self.pids[rank]]:
            kill_group(pid)

    def _wait(self) -> dict[int, int]:
        """Exit codes; of those that had to be ended, the signal's number below zero."""
        for listener in self.listeners.values():
            listener.start()
        codes: dict[int, int] = {}
        deadline = time.monotonic() + self.asked["timeout_s"]
        while len(codes) < len(self.pids):
            for rank in self.pids.keys() - codes.keys():
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                for rank in self.pids.keys() - codes.keys():
                    kill_group(self.pids[rank])
            time.sleep(0.01)
        # What they started themselves.
        for pid in self.pids.values():
            kill_group(pid)
        return codes


def read(framework: Framework, asked: dict[str, Any]) -> dict[str, Any]:
    """Digest of what is in a checkpoint, or why it can't be read, by a process of no job."""
    ours, theirs = os.pipe()

    def child() -> None:
        os.close(ours)
        set_environment(environment(OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu"))
        path = Path(asked["path"])
        try:
            found = {"files": framework.files(path), "digest": digest(framework.load(path))}
        except BaseException as exc:  # noqa: BLE001 - whatever it is, it can't be loaded
            found = {"error": f"{type(exc).__name__}: {str(exc)[:300]}"}
        with os.fdopen(theirs, "w") as file:
            json.dump(found, file)

    pid = forked(child, Path(asked["log"]))
    os.close(theirs)
    with os.fdopen(ours) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "the reader died"}


if __name__ == "__main__":
    main()
