"""The servers that S3 clients are measured against: the null server, and SeaweedFS beside it."""

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
from typing import Any, Protocol

from tests.s3 import servers

__all__ = [
    "BUCKET",
    "CREDENTIALS",
    "NullServer",
    "S3Server",
    "WeedServer",
    "content_file",
    "null_server",
    "weed_server",
]

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


class S3Server(Protocol):
    """A running one, with the bucket."""

    @property
    def endpoint(self) -> str: ...

    def put(self, key: str, data: bytes) -> None:
        """Store a small object."""
        ...

    def size(self, key: str) -> int:
        """Bytes of an object; -1 if there is none."""
        ...


def check_stored(server: S3Server, keys: Iterable[str], size: int) -> None:
    """Fail if it doesn't have all of them: no figure of a client that does less."""
    for key in keys:
        found = server.size(key)
        if found != size:
            msg = f"{key} has {found} bytes on the server, not {size}"
            raise RuntimeError(msg)


@dataclass(frozen=True, slots=True)
class NullServer:
    """A process of the null server."""

    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> dict[str, int]:
        """Requests of each kind so far."""
        counts: dict[str, int] = json.loads(self._ask("GET", "/")[2])
        return counts

    def put(self, key: str, data: bytes) -> None:
        self._ask("PUT", f"/{BUCKET}/{key}", data)

    def size(self, key: str) -> int:
        status, length, _ = self._ask("HEAD", f"/{BUCKET}/{key}")
        return length if status == 200 else -1

    def _ask(self, method: str, target: str, body: bytes | None = None) -> tuple[int, int, bytes]:
        """Status, length and bytes of the answer."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request(method, target, body=body)
            reply = client.getresponse()
            return reply.status, int(reply.headers["Content-Length"]), reply.read()


@dataclass(frozen=True, slots=True)
class WeedServer:
    """A process of SeaweedFS."""

    endpoint: str
    client: Any

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def size(self, key: str) -> int:
        try:
            length: int = self.client.head_object(Bucket=BUCKET, Key=key)["ContentLength"]
        except self.client.exceptions.ClientError:
            return -1
        return length


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


@contextlib.contextmanager
def weed_server() -> Iterator[WeedServer]:
    """Run SeaweedFS, which keeps what it is given below the system's temporary directory."""
    keys = {
        "accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    with servers.seaweedfs([{**servers.ADMIN, "credentials": [keys]}]) as server:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        yield WeedServer(server.endpoint, client)


def content_file(path: Path, size: int) -> Path:
    """A file of *size* random bytes, in the page cache."""
    with open(path, "wb") as file:
        step = 1 << 24
        file.writelines(os.urandom(min(step, size - start)) for start in range(0, size, step))
    return path
