"""One client of an S3 server in a process of its own: `python -m bench.s3_client JSON`.

What it imports and connects beforehand isn't measured. It prints what the transfer cost as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.s3_servers import BUCKET

__all__ = ["CLIENTS", "main"]

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be moved.

    Attributes:
        files: local path by key.
        digests: what `s3_sides.digests_of` says of each of them.
    """

    endpoint: str
    files: dict[str, str]
    digests: dict[str, Any]

    def each(self, one: Callable[[tuple[str, str]], None]) -> None:
        """Do *one* for all (key, path) at once."""
        with ThreadPoolExecutor(len(self.files)) as pool:
            list(pool.map(one, self.files.items()))


def _ours_put(job: Job) -> Callable[[], None]:
    from ckptgate.ports.store import DigestedFile, VerifyMode
    from ckptgate_adapters.s3_store import S3Options, S3Store

    store = S3Store(f"s3://{BUCKET}", S3Options(endpoint_url=job.endpoint, path_style=True))
    store.children("nothing")
    sources = {
        key: DigestedFile(
            path=path,
            size=job.digests["size"],
            digest=job.digests["digest"],
            chunks=bytes.fromhex(job.digests["chunks"]),
            may_link=False,
        )
        for key, path in job.files.items()
    }

    def act() -> None:
        failed = store.put_all(sources, VerifyMode.CHECKSUM)
        if failed:
            raise next(iter(failed.values()))
        store.close()

    return act


def _ours_get(job: Job) -> Callable[[], None]:
    """`ckptgate export`: all of a checkpoint, whose folder the keys name."""
    from ckptgate.engine.export import export_directory
    from ckptgate.engine.manifests import load_manifest
    from ckptgate.engine.verify import fold_log
    from ckptgate_adapters.s3_store import S3Options, S3Store

    (folder,) = {key.rpartition("/")[0] for key in job.files}
    (target,) = {str(Path(path).parent) for path in job.files.values()}
    prefix, _, name = folder.rpartition("/")
    options = S3Options(endpoint_url=job.endpoint, path_style=True)
    store = S3Store(f"s3://{BUCKET}/{prefix}", options)
    store.children("nothing")

    def act() -> None:
        state = fold_log(store, "")
        attempt = state.current[name]
        manifest = load_manifest(store, "", attempt, state.attempts[attempt].manifest)
        export_directory(store, "", manifest, target, may_replace=False)
        store.close()

    return act


def _boto3(endpoint: str) -> tuple[Any, Any]:
    """A client and its settings for transfers, the fastest with a checksum."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(
        s3={"payload_signing_enabled": False, "addressing_style": "path"},
        max_pool_connections=64,
    )
    transfer = TransferConfig(
        multipart_chunksize=PART_BYTES,
        multipart_threshold=PART_BYTES,
        max_concurrency=PARTS_IN_FLIGHT,
    )
    return boto3.client("s3", endpoint_url=endpoint, config=config), transfer


def _boto3_put(job: Job) -> Callable[[], None]:
    client, transfer = _boto3(job.endpoint)

    def one(item: tuple[str, str]) -> None:
        extra = {"ChecksumAlgorithm": "CRC64NVME"}
        client.upload_file(item[1], BUCKET, item[0], ExtraArgs=extra, Config=transfer)

    return lambda: job.each(one)


def _boto3_get(job: Job) -> Callable[[], None]:
    client, transfer = _boto3(job.endpoint)

    def one(item: tuple[str, str]) -> None:
        client.download_file(BUCKET, item[0], item[1], Config=transfer)

    return lambda: job.each(one)


def _obstore(endpoint: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=endpoint,
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )


def _obstore_put(job: Job) -> Callable[[], None]:
    import obstore

    store = _obstore(job.endpoint)

    def one(item: tuple[str, str]) -> None:
        obstore.put(
            store, item[0], Path(item[1]), use_multipart=True,
            chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT,
        )  # fmt: skip

    return lambda: job.each(one)


def _obstore_get(job: Job) -> Callable[[], None]:
    import obstore

    store = _obstore(job.endpoint)

    def one(item: tuple[str, str]) -> None:
        with open(item[1], "wb") as file:
            file.writelines(obstore.get(store, item[0]).stream(min_chunk_size=1 << 20))

    return lambda: job.each(one)


def _s3fs(endpoint: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True)


def _s3fs_put(job: Job) -> Callable[[], None]:
    fs = _s3fs(job.endpoint)
    keys = [f"{BUCKET}/{key}" for key in job.files]
    return lambda: fs.put(
        list(job.files.values()), keys, chunksize=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
    )


def _s3fs_get(job: Job) -> Callable[[], None]:
    fs = _s3fs(job.endpoint)
    keys = [f"{BUCKET}/{key}" for key in job.files]
    return lambda: fs.get(keys, list(job.files.values()), max_concurrency=PARTS_IN_FLIGHT)


CLIENTS: dict[str, Callable[[Job], Callable[[], None]]] = {
    "ours_put": _ours_put,
    "ours_get": _ours_get,
    "boto3_put": _boto3_put,
    "boto3_get": _boto3_get,
    "obstore_put": _obstore_put,
    "obstore_get": _obstore_get,
    "s3fs_put": _s3fs_put,
    "s3fs_get": _s3fs_get,
}


def _peak_mb() -> float:
    """The most resident memory that this program (not who started it) has had, in MB."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("VmHWM:"):
            return int(text.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> None:
    """Do the one transfer that the argument names."""
    request = json.loads(sys.argv[1])
    act = CLIENTS[request.pop("who")](Job(**request))
    cpu, began = time.process_time(), time.monotonic()
    act()
    seconds = time.monotonic() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = time.process_time() - cpu + children.ru_utime + children.ru_stime
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_mb": _peak_mb()}))


if __name__ == "__main__":
    main()
