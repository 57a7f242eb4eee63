"""The null S3 server as a process of its own, and what clients are told about it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUCKET", "CREDENTIALS", "NullServer", "content_file", "null_server"]

BUCKET = "bench"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKBENCH",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class NullServer:
    """A running one."""

    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> dict[str, int]:
        """Requests of each kind so far."""
        counts: dict[str, int] = json.loads(self._ask("GET", "/")[1])
        return counts

    def check_stored(self, keys: Iterable[str], size: int) -> None:
        """Fail if it wasn't sent all of them: no figure of a client that does less."""
        for key in keys:
            length, _ = self._ask("HEAD", f"/{BUCKET}/{key}")
            if length != size:
                msg = f"{key} has {length} bytes on the server, not {size}"
                raise RuntimeError(msg)

    def _ask(self, method: str, target: str) -> tuple[int, bytes]:
        """Length and bytes of the answer's body."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request(method, target)
            reply = client.getresponse()
            return int(reply.headers["Content-Length"]), reply.read()


@contextlib.contextmanager
def null_server(content: Path) -> Iterator[NullServer]:
    """Run it; *content* is what large objects are said to hold."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.null_s3", content],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        try:
            assert process.stdout is not None
            yield NullServer(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()


def content_file(path: Path, size: int) -> Path:
    """A file of *size* random bytes, in the page cache."""
    with open(path, "wb") as file:
        step = 1 << 24
        file.writelines(os.urandom(min(step, size - start)) for start in range(0, size, step))
    return path
