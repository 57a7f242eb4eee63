"""The main job on a bucket of real SeaweedFS, by the command line; boto3 looks into the bucket."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.buckets import (
    S3_FAST,
    SAVE,
    BucketCluster,
    bucket_cluster,
    environment,
    run_here,
    secrets_in_processes,
)
from tests.e2e.harness import job, start_job, tree, until
from tests.s3.servers import Bucket, Server, seaweedfs

from ckptgate.app.addresses import store_url
from ckptgate.errors import ExitCode
from ckptgate_adapters.sqlite_spool import SqliteSpool

pytestmark = [pytest.mark.fuse]


@pytest.fixture(autouse=True)
def _needs_fuse(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")


def save(path: Path, rank: int, world: int, *, size: int = 1_000_000, fill: int = 1, **more: str):
    done = job(SAVE, path, str(rank), str(world), str(size), str(fill), **more)
    assert done.returncode == 0, done.stderr


def is_shown(path: Path, expected: dict[str, bytes]) -> bool:
    """Whether a reader finds just that."""
    try:
        return tree(path) == expected
    except FileNotFoundError:
        return False


def test_two_ranks_on_two_mounts_of_one_bucket_commit_save_again_and_are_read_cold(
    tmp_path: Path, bucket: Bucket
):
    """I1, I8: nothing is visible before all ranks committed; then all of it, everywhere."""
    with bucket_cluster(tmp_path, bucket, nodes=2) as c:
        one, two = c.nodes
        (one.mnt / "run").mkdir()
        save(one.mnt / "run/step-1", 0, 2, size=12_000_000, fill=1)
        assert not (one.mnt / "run/step-1").exists()
        assert c.latest("run") == ""
        assert [key for key in c.below.keys("run/") if not key.startswith("run/.ckptgate/")] in (
            [], ["run/"],
        )  # fmt: skip
        save(two.mnt / "run/step-1", 1, 2, size=300_000, fill=2)
        until("the commit", lambda: c.latest("run") == "step-1\n")
        expected = {"rank0.bin": b"\1" * 12_000_000, "rank1.bin": b"\2" * 300_000}
        assert c.proved("run", "step-1") == expected
        assert bucket.uploads() == []
        for node in c.nodes:
            until("all of it", partial(is_shown, node.mnt / "run/step-1", expected))
            assert os.readlink(node.mnt / "run/latest") == "step-1"

        # Saved again under the same name: the old one stays until the new one is committed.
        save(one.mnt / "run/step-1", 0, 2, size=400_000, fill=3, run_id="job2")
        assert c.proved("run", "step-1") == expected
        save(two.mnt / "run/step-1", 1, 2, size=500_000, fill=4, run_id="job2")
        again = {"rank0.bin": b"\3" * 400_000, "rank1.bin": b"\4" * 500_000}
        until("the second commit", lambda: c.published("run", "step-1")["attempt"] == "step-1.1")
        assert c.proved("run", "step-1") == again

        cold = c.make("cold").start()
        c.nodes.append(cold)
        assert os.listdir(cold.mnt) == ["run"]
        assert sorted(os.listdir(cold.mnt / "run")) == ["latest", "step-1"]
        assert tree(cold.mnt / "run/latest/") == again
        done = c.cli("verify", f"{c.url}/run/latest")
        assert done.returncode == 0, done.stderr
        for node in c.nodes:
            ended = node.stop()
            assert ended.returncode == 0, ended.stderr
            assert "everything is in the store" in ended.stdout


@pytest.fixture(scope="module")
def shared_bucket(seaweed: Server):
    made = Bucket.make(seaweed)
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def shared(shared_bucket: Bucket, tmp_path_factory):
    config = 'log_level = "DEBUG"\n' + S3_FAST + "plain_copy = true\n"
    with bucket_cluster(tmp_path_factory.mktemp("shared"), shared_bucket, config=config) as made:
        yield made


def committed(cluster: BucketCluster, run: str, name: str, /, **files: bytes) -> None:
    """A committed checkpoint of a session."""
    target = cluster.nodes[0].mnt / run / name
    target.mkdir(parents=True)
    for file, data in files.items():
        (target / file).write_bytes(data)
    done = cluster.cli("commit", target, "--all", "--wait", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    until("it is shown", lambda: cluster.latest(run) == f"{name}\n")


def test_commands_take_a_path_in_a_mount_and_in_the_bucket_alike(shared: BucketCluster):
    committed(shared, "alike", "step-1", a=b"1" * 1000, b=b"2" * 2000)
    mnt, url = shared.nodes[0].mnt / "alike", f"{shared.url}/alike"
    for command, below in (
        ("ls", ""), ("log", ""), ("show", "/step-1"), ("show", "/latest"), ("verify", "/step-1"),
    ):  # fmt: skip
        answers = [shared.cli(command, f"{base}{below}", "--json") for base in (mnt, url)]
        assert [done.returncode for done in answers] == [0, 0], answers[1].stderr
        first, second = (json.loads(done.stdout) for done in answers)
        for answer in (first, second):
            if command != "show":
                answer.pop("run")
        assert first == second
    for base in (str(mnt), url):
        (row,) = json.loads(shared.cli("status", f"{base}/step-1", "--json").stdout)["attempts"]
        assert (row["name"], row["state"]) == ("step-1", "committed")
        assert shared.cli("pin", f"{base}/latest").returncode == 0
        assert "pinned" in shared.cli("ls", base).stdout
        assert shared.cli("unpin", f"{base}/step-1").returncode == 0
        assert shared.cli("wait", f"{base}/step-1", "--timeout", "5").returncode == 0
        assert shared.cli("gc", base, "--dry-run").returncode == 0
    done = shared.cli("verify", url)
    assert (done.returncode, "is a run: name a checkpoint" in done.stderr) == (64, True)
    for path in (f"{shared.url}/nothing", f"{url}/step-7"):
        assert shared.cli("verify", path).returncode == ExitCode.NOT_FOUND


def test_the_readme_shows_how_to_find_and_check_a_checkpoint_without_ckptgate(
    shared: BucketCluster,
):
    committed(shared, "readme", "step-1", a=b"1" * 1000, b=b"")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
               if "boto3" in block]  # fmt: skip
    assert '"my-bucket", "ckpts/run1"' in code
    code = code.replace("my-bucket", shared.bucket.name).replace("ckpts/run1", "ckpts/readme")
    directory = shared.base / "by hand"
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, env={**os.environ, **shared.env}, check=False
    )
    assert done.returncode == 0
    assert tree(directory) == {"step-1/a": b"1" * 1000, "step-1/b": b""}


def test_plain_copies_are_made_after_the_commit_for_b3sum_and_other_tools(shared: BucketCluster):
    committed(shared, "plain", "step-1", a=b"1" * 1000, b=b"")
    copies = shared.below.below("plain/step-1")
    until("the copies", lambda: ".ckptgate/b3sums" in copies.keys(".ckptgate"))
    directory = shared.base / "synced"
    for key in copies.keys(""):
        path = directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(copies.read(key))
    assert tree(directory) == {"a": b"1" * 1000, "b": b""}
    done = subprocess.run(
        ["b3sum", "--check", ".ckptgate/b3sums"], cwd=directory, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_options_win_over_the_environment(shared: BucketCluster):
    """Where the service is may be an argument or in the file; who one is never is."""
    committed(shared, "options", "step-1", a=b"1")
    env = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    endpoint = shared.bucket.server.endpoint
    url = f"{shared.url}/options"
    done = shared.cli("ls", url, "--endpoint-url", endpoint, "--region", "us-east-1", **env)
    assert done.returncode == 0, done.stderr
    file = shared.base / "options.toml"
    file.write_text(f'[s3]\nendpoint_url = "{endpoint}"\n')
    assert shared.cli("ls", url, "--config", file, **env).returncode == 0
    # By a mount's path the mount's own service is asked, whatever the caller's environment says.
    assert shared.cli("ls", shared.nodes[0].mnt / "options", **env).returncode == 0
    # And by the bucket's where it says nothing.
    for path in (f"{url}/step-1", f"{url}/latest"):
        assert shared.cli("show", path, AWS_ENDPOINT_URL="").returncode == 0


def test_an_export_is_whole_verified_and_never_over_something(shared: BucketCluster):
    committed(shared, "exported", "step-1", a=os.urandom(20_000_000), b=b"", c=b"3")
    expected = shared.proved("exported", "step-1")
    target = shared.base / "out"
    url = f"{shared.url}/exported/latest"
    done = shared.cli("export", url, target)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(target) == expected
    done = shared.cli("export", url, target)
    assert done.returncode == ExitCode.REFUSED
    assert "is there and not empty" in done.stderr
    (target / "a").write_bytes(b"mine")
    assert shared.cli("export", shared.nodes[0].mnt / "exported/step-1", target,
                      "--overwrite").returncode == 0  # fmt: skip
    assert tree(target) == expected
    assert [n for n in os.listdir(shared.base) if n.startswith(".out")] == []
    # To another place in the bucket the service copies by itself.
    done = shared.cli("export", url, f"s3://{shared.bucket.name}/out/one")
    assert (done.returncode, done.stderr) == (0, "")
    copy = shared.bucket.below("out/one")
    assert {key: copy.read(key) for key in copy.keys("")} == expected


def test_unfinished_uploads_below_the_prefix_are_listed_and_aborted_and_no_others(
    shared: BucketCluster,
):
    client, name = shared.bucket.client, shared.bucket.name
    below = f"{shared.below.prefix}lost/.ckptgate/attempts/step-1.0/data/m-00000000/1-0"
    for key in (below, f"{shared.below.prefix[:-1]}-other/x"):
        upload = client.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
        client.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * 1000)
    done = shared.cli("uploads", "list", shared.url, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["uploads"]
    assert (found["parts"], found["size"]) == (1, 1000)
    assert found["path"] == below.removeprefix(shared.below.prefix)
    # Somebody may be at a young one.
    assert "0 uploads aborted" in shared.cli("uploads", "abort", shared.url).stdout
    mounted = shared.nodes[0].mnt
    assert "1 uploads unfinished" in shared.cli("uploads", "list", mounted).stdout
    done = shared.cli("uploads", "abort", f"{shared.url}/lost", "--older-than", "0s")
    assert "1 uploads aborted" in done.stdout, done.stderr
    ((key, _),) = shared.bucket.uploads()
    assert key.endswith("-other/x")
    assert shared.cli("uploads", "list", shared.base).returncode == ExitCode.USAGE


def test_what_is_deleted_leaves_the_bucket_after_its_grace(shared: BucketCluster):
    for name in ("step-1", "step-2"):
        committed(shared, "gone", name, w=name.encode() * 1000)
    run = shared.nodes[0].mnt / "gone"
    keys = {entry["key"] for entry in shared.published("gone", "step-1")["entries"]}
    for file in (run / "step-1").iterdir():
        file.unlink()
    (run / "step-1").rmdir()
    until("it is hidden", lambda: not shared.below.keys("gone/step-1/"))
    assert all(f"gone/{key}" in shared.below.keys("gone/") for key in keys)

    def is_gone() -> bool:
        done = shared.cli("gc", run, "--grace", "0s")
        assert done.returncode == 0, done.stderr
        return not any(f"gone/{key}" in shared.below.keys("gone/") for key in keys)

    until("its bytes are gone", is_gone, 40)
    assert shared.proved("gone", "step-2") == {"w": b"step-2" * 1000}


def test_no_secret_is_in_any_output_file_or_command_line(shared: BucketCluster):
    committed(shared, "secret", "step-1", a=b"1")
    secret, node = shared.bucket.server.secret_key, shared.nodes[0]
    url = f"{shared.url}/secret"
    outputs = [
        shared.cli(*words, *more)
        for words in (
            ("status",), ("status", url), ("ls", url), ("log", url), ("show", f"{url}/step-1"),
            ("verify", f"{url}/step-1"), ("uploads", "list", url), ("ls", f"{shared.url}-x"),
            ("gc", node.mnt, "--dry-run"),
        )
        for more in ((), ("--json",))
    ]  # fmt: skip
    assert not any(secret in done.stdout + done.stderr for done in outputs)
    assert secrets_in_processes(secret) == []
    places = [node.spool, Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / "ckptgate"]
    looked = 0
    for place in places:
        for path in (p for p in place.rglob("*") if p.is_file()):
            assert secret.encode() not in path.read_bytes(), path
            looked += 1
    assert looked > 4
    assert node.log()


@pytest.mark.full
def test_killed_publishers_and_servers_lose_nothing_and_saves_go_on_meanwhile(
    tmp_path: Path, s3_programs: None
):
    """I10, I11: the publisher and the server are killed while bytes are on their way."""
    with seaweedfs() as server:
        bucket = Bucket.make(server)
        with bucket_cluster(tmp_path, bucket) as c:
            (node,) = c.nodes
            size = 64_000_000
            with start_job(SAVE, node.mnt / "run/step-1", "0", "1", str(size), "7") as writer:
                until("an upload", bucket.uploads, 60)
                node.kill("publisher")
                assert writer.wait(60) == 0, writer.stderr.read()
            until("another upload", lambda: len(bucket.uploads()) > 0)
            server.kill()
            time.sleep(1.0)
            # With the store away what is staged is there, and saves go on.
            (attempt,) = until("status", lambda: node.attempts("step-1"), 60)
            assert attempt["state"] in {"open", "sealed"}
            save(node.mnt / "run/step-2", 0, 1, fill=8)
            server.start()
            until("both commits", lambda: c.latest("run") == "step-2\n", 90)
            assert c.proved("run", "step-1") == {"rank0.bin": b"\7" * size}
            assert c.proved("run", "step-2") == {"rank0.bin": b"\10" * 1_000_000}
            # What the killed ones had begun is cleaned up like everything that nobody needs.
            done = c.cli("uploads", "abort", c.url, "--older-than", "0s")
            assert "uploads aborted" in done.stdout, done.stderr
            assert bucket.uploads() == []
            assert node.stop(60).returncode == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "s3://no-such-bucket-anywhere/x"}, "no-such-bucket-anywhere"),
        ({"AWS_SECRET_ACCESS_KEY": "not-the-one"}, "signature"),
        ({"AWS_ACCESS_KEY_ID": "AKNOBODY"}, "key"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_mounted_says_why_and_leaves_nothing(
    tmp_path: Path, bucket: Bucket, change: dict[str, str], said: str
):
    url = change.pop("url", bucket.url)
    env = environment(bucket) | change
    mnt, spool = tmp_path / "mnt", tmp_path / "spool"
    config = tmp_path / "c.toml"
    config.write_text("[s3]\ntries_max = 2\n")
    began = time.monotonic()
    done = run_here("mount", url, mnt, "--spool", spool, "--config", config, env=env)
    assert done.returncode == ExitCode.UNUSABLE, done.stdout + done.stderr
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    for secret in (bucket.server.secret_key, "not-the-one"):
        assert secret not in done.stdout + done.stderr
    assert not mnt.exists()
    assert not spool.exists()
    assert time.monotonic() - began < 60


def test_a_prefix_of_another_format_version_is_not_mounted(tmp_path: Path, bucket: Bucket):
    """I9: nothing is written to what this release can't read."""
    bucket.put(".ckptgate/format.json", b'{"format":99}\n')
    mnt, spool = tmp_path / "mnt", tmp_path / "spool"
    done = run_here("mount", bucket.url, mnt, "--spool", spool, env=environment(bucket))
    assert done.returncode == ExitCode.UNUSABLE, done.stdout + done.stderr
    assert "99" in done.stderr
    assert "Traceback" not in done.stderr
    assert not mnt.exists()
    assert not spool.exists()
    assert bucket.keys("") == [".ckptgate/format.json"]


def test_ways_to_verify_that_a_bucket_does_not_offer_are_refused(tmp_path: Path, bucket: Bucket):
    config = tmp_path / "c.toml"
    config.write_text('verify = "size"\n')
    where = (bucket.url, tmp_path / "mnt", "--spool", tmp_path / "spool")
    done = run_here("mount", *where, "--config", config, env=environment(bucket))
    assert done.returncode == ExitCode.USAGE
    assert "can't be verified by 'size'" in done.stderr
    assert "checksum" in done.stderr


def test_a_spool_is_not_used_for_the_same_bucket_at_another_service(tmp_path: Path, bucket: Bucket):
    """I1: what it says is in the store must be in this one."""
    spool, other = tmp_path / "spool", "http://elsewhere:1"
    of_other = store_url(bucket.url, other)
    SqliteSpool.create_or_open(str(spool), store_url=of_other, host="h").close()
    where = (bucket.url, tmp_path / "mnt", "--spool", spool)
    done = run_here("mount", *where, env=environment(bucket))
    assert done.returncode == ExitCode.UNUSABLE
    assert f"belongs to the store {of_other}" in done.stderr
    assert bucket.server.endpoint in done.stderr
