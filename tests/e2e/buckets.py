"""Mounts of a bucket on real SeaweedFS, and what an independent client sees there."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import blake3
from tests.e2e.harness import FAST, Gateway
from tests.s3.servers import Bucket

from ckptgate.app.cli import main

SAVE = """
import os, sys, ckptgate
path, rank, world, size, fill = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(path, exist_ok=True)
with open(f"{path}/rank{rank}.bin", "wb") as f:
    f.write(bytes([fill]) * size)
ckptgate.commit(path, rank, world)
"""
S3_FAST = FAST + '[s3]\npart_size = "5MiB"\nstall_s = 20\n'


def environment(bucket: Bucket) -> dict[str, str]:
    """Where the bucket is and who may use it, as boto's users say it."""
    return {**bucket.server.environment, "AWS_ENDPOINT_URL": bucket.server.endpoint}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(*words: str | Path, env: Mapping[str, str]) -> Done:
    """A command without a process of its own, which would take a second of its own."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main([str(word) for word in words])
        except SystemExit as exc:
            code = int(exc.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


class BucketCluster:
    """A prefix of a bucket and the nodes that mount it."""

    def __init__(
        self,
        base: Path,
        bucket: Bucket,
        nodes: int,
        config: str = S3_FAST,
        *,
        prefix: str = "ckpts",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.base = base
        self.bucket = bucket
        self.below = bucket.below(prefix)
        self.url = self.below.url
        self.env = environment(bucket) | dict(env or {})
        self.config = config
        self.nodes = [self.make(f"node{i + 1}") for i in range(nodes)]

    def make(self, name: str) -> Gateway:
        """One more node, not started."""
        nowhere = self.base / "no directory"
        return Gateway(self.base, name, nowhere, self.config, url=self.url, env=self.env)

    def cli(self, *words: str | Path, **more: str) -> Done:
        """A command of somebody who may use the bucket; run in this process, as many are."""
        return run_here(*words, env=self.env | more)

    def address(self, path: str) -> str:
        """How a command is told a path in the store."""
        return f"{self.url}/{path}"

    def names(self, path: str) -> list[str]:
        """What somebody without a mount finds in a directory, but the gateway's own."""
        below = {key[len(path) + 1 :].partition("/")[0] for key in self.below.keys(f"{path}/")}
        return sorted(below - {"", ".ckptgate"})

    def shown(self, path: str) -> dict[str, bytes]:
        """The files that such a one finds under a checkpoint's name; nothing where it isn't."""
        run, _, name = path.rpartition("/")
        manifest = f"{path}/.ckptgate/manifest.json"
        if manifest not in self.below.keys(manifest):
            return {}
        files = self.proved(run, name)
        links = {
            entry["path"]: os.path.normpath(f"{os.path.dirname(entry['path'])}/{entry['target']}")
            for entry in self.published(run, name)["entries"]
            if entry["type"] == "symlink"
        }
        return files | {link: files[to.lstrip("/")] for link, to in links.items()}

    def pointer(self, path: str) -> str:
        """What a pointer says to such a one, "" where there is none."""
        return self.plain(path).decode().rstrip("\n")

    def plain(self, path: str) -> bytes:
        """The bytes of a plain file, b"" where there is none."""
        return self.below.read(path) if path in self.below.keys(path) else b""

    def committed(self, run: str) -> list[str]:
        """Names of the committed checkpoints, oldest first, as the store's log says."""
        done = self.cli("ls", f"{self.url}/{run}", "--json")
        if done.returncode != 0:
            return []
        return [row["name"] for row in json.loads(done.stdout)["checkpoints"]]

    def latest(self, run: str) -> str:
        """What `R/latest` holds, as somebody without ckptgate reads it; "" for nothing."""
        key = f"{run}/latest"
        return self.below.read(key).decode() if key in self.below.keys(key) else ""

    def published(self, run: str, name: str) -> dict[str, Any]:
        """The manifest where somebody without ckptgate finds it."""
        return json.loads(self.below.read(f"{_in(run)}{name}/.ckptgate/manifest.json"))

    def proved(self, run: str, name: str) -> dict[str, bytes]:
        """I1: each file that the published manifest names, read by boto3 and compared with it."""
        found: dict[str, bytes] = {}
        for entry in self.published(run, name)["entries"]:
            if entry["type"] == "file":
                data = self.below.read(f"{_in(run)}{entry['key']}")
                assert len(data) == entry["size"], entry
                assert blake3.blake3(data).hexdigest() == entry["digest"], entry
                found[entry["path"]] = data
        return found

    def logs(self) -> str:
        """All daemons' logs, for a failing test."""
        return "\n".join(f"--- {node.name}\n{node.log()[-6000:]}" for node in self.nodes)


def _in(run: str) -> str:
    """What keys in a run begin with."""
    return f"{run}/" if run else ""


@contextlib.contextmanager
def bucket_cluster(
    base: Path, bucket: Bucket, nodes: int = 1, config: str = S3_FAST, **more: Any
) -> Iterator[BucketCluster]:
    """A started one; it is taken down whatever happens, and a failure shows the logs."""
    made = BucketCluster(base, bucket, nodes, config, **more)
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


def secrets_in_processes(secret: str) -> list[str]:
    """Command lines on this machine that have the secret in them."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if secret.encode() in words:
                found.append(words.decode(errors="replace"))
    return found
