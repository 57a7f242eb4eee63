"""The S3 servers that tests use: they store, keep their data over kill -9, and leave nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.s3.servers import Bucket, Server, moto, seaweedfs

ROOT = Path(__file__).parents[2]
START = """
import time
from tests.s3.servers import {kind}
with {kind}() as server:
    print(server.pid, server.root, flush=True)
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_bucket_of_a_test_is_empty_and_its_own(bucket: Bucket):
    assert bucket.keys() == []
    bucket.put("a/b", b"data")
    assert bucket.read("a/b") == b"data"
    other = Bucket.make(bucket.server)
    assert other.keys() == []
    other.destroy()


def test_only_the_test_server_s_credentials_are_in_the_environment(seaweed: Server, bucket: Bucket):
    found = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert found == {n: v for n, v in seaweed.environment.items() if n.startswith("AWS_")}
    assert not os.path.exists(found["AWS_CONFIG_FILE"])


def test_the_second_server_refuses_what_exists_as_the_first_does(
    bucket: Bucket, mini_bucket: Bucket
):
    for each in (bucket, mini_bucket):
        each.put("once", b"1", IfNoneMatch="*")
        with pytest.raises(each.client.exceptions.ClientError) as caught:
            each.put("once", b"2", IfNoneMatch="*")
        assert caught.value.response["Error"]["Code"] == "PreconditionFailed"
        assert each.read("once") == b"1"


def test_seaweedfs_keeps_objects_and_open_uploads_over_kill_9(s3_programs):
    with seaweedfs() as server:
        bucket = Bucket.make(server)
        bucket.put("kept", b"data")
        part = {"Bucket": bucket.name, "Key": "big"}
        part["UploadId"] = bucket.client.create_multipart_upload(**part)["UploadId"]
        etag = bucket.client.upload_part(**part, PartNumber=1, Body=b"part")["ETag"]
        before = server.pid
        server.restart()
        assert server.pid != before
        assert not is_alive(before)
        assert bucket.read("kept") == b"data"
        parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
        bucket.client.complete_multipart_upload(**part, MultipartUpload=parts)
        assert bucket.read("big") == b"part"


def test_a_killed_server_answers_nothing(s3_programs):
    with moto() as server:
        bucket = Bucket.make(server)
        server.kill()
        with pytest.raises(Exception, match="connect"):
            bucket.put("a", b"")


@pytest.mark.parametrize("kind", ["seaweedfs", "moto"])
def test_a_server_dies_with_whoever_started_it_however_that_ends(s3_programs, kind):
    with subprocess.Popen(
        [sys.executable, "-c", START.format(kind=kind)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as starter:  # fmt: skip
        assert starter.stdout is not None
        first, root = starter.stdout.readline().split()
        pid = int(first)
        assert is_alive(pid)
        starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)
    shutil.rmtree(root)
