"""Checkpoints' bytes on S3: of any size, in parts, proved by the store's checksum or read back."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import give_credentials
from tests.s3.chaos import ChaosProxy, chaos
from tests.s3.servers import Bucket, moto
from tests.s3.wire import Kind

from ckptgate.errors import IntegrityError, MissingError, UsageError
from ckptgate.ports.store import DigestedFile, VerifyMode
from ckptgate.testing.samples import digested
from ckptgate_adapters.s3_store import S3Options, S3Store

MIB = 1024 * 1024
PART = 5 * MIB

Write = Callable[[str, bytes], DigestedFile]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def made(name: str, data: bytes) -> DigestedFile:
        path = tmp_path / name
        path.write_bytes(data)
        return digested(str(path))

    return made


@pytest.fixture
def store(bucket: Bucket, proxy: ChaosProxy) -> Iterator[S3Store]:
    made = _store(bucket, proxy.endpoint)
    yield made
    made.close()


def _store(bucket: Bucket, endpoint: str) -> S3Store:
    options = S3Options(
        endpoint_url=endpoint, part_bytes=PART, parts_in_flight=3, stall_s=20, retry_first_s=0.01
    )
    return S3Store(f"{bucket.url}/pre", options)


@pytest.mark.parametrize("mode", [VerifyMode.CHECKSUM, VerifyMode.READBACK])
def test_files_of_all_sizes_are_stored_proved_and_read(
    store: S3Store, bucket: Bucket, write: Write, mode: VerifyMode
) -> None:
    """I1: an independent client finds the same bytes, and no upload is left."""
    sizes = (0, 1, 70_000, MIB, MIB + 1, PART, PART + 1, 4 * PART + 17)
    data = {f"r/{size}": os.urandom(size) for size in sizes}
    files = {key: write(key.replace("/", "-"), value) for key, value in data.items()}
    assert store.put_all(files, mode) == {}
    for key, value in data.items():
        assert bucket.read(f"pre/{key}") == value
        assert store.read(key, 0, len(value) + 9) == value
        assert store.read(key, len(value) // 2, 9) == value[len(value) // 2 :][:9]
        assert store.read(key, len(value) + 1, 9) == b""
        head = bucket.client.head_object(Bucket=bucket.name, Key=f"pre/{key}")
        assert head["Metadata"]["ckptgate-blake3"] == files[key].digest
    assert bucket.uploads() == []
    assert not any("probe-" in key for key in bucket.keys("pre"))


def test_a_small_file_costs_two_requests_and_a_large_one_three_beside_its_parts(
    store: S3Store, proxy: ChaosProxy, write: Write
) -> None:
    files = {f"r/{n}": write(f"s{n}", b"%d" % n) for n in range(50)}
    assert store.put_all(files, VerifyMode.CHECKSUM) == {}
    # One more asks whether a wrong checksum is refused, once for all.
    assert (proxy.count(Kind.PUT), proxy.count(Kind.HEAD), len(proxy.seen)) == (51, 50, 101)
    proxy.clear()
    assert store.put_all({"r/big": write("big", os.urandom(3 * PART))}, VerifyMode.CHECKSUM) == {}
    assert [request.kind for request in proxy.seen if request.kind is not Kind.UPLOAD_PART] == [
        Kind.CREATE_UPLOAD, Kind.COMPLETE, Kind.HEAD,
    ]  # fmt: skip
    assert proxy.count(Kind.UPLOAD_PART) == 3


def test_a_file_that_is_not_what_its_digest_says_is_never_completed(
    store: S3Store, bucket: Bucket, write: Write
) -> None:
    """I1: it may have been written after it was digested."""
    for size in (100, 2 * MIB, 2 * PART):
        source = write("f", bytes(size))
        Path(source.path).write_bytes(bytes(size - 1) + b"x")
        with pytest.raises(IntegrityError, match="has digest"):
            store.put("r/f", source)
        Path(source.path).write_bytes(bytes(size - 1))
        with pytest.raises(IntegrityError, match="said to have"):
            store.put("r/f", source)
        os.unlink(source.path)
        with pytest.raises(MissingError):
            store.put("r/f", source)
    assert (bucket.keys(), bucket.uploads()) == ([], [])


def test_other_bytes_of_the_same_size_are_found_after_a_restart_too(
    store: S3Store, bucket: Bucket, proxy: ChaosProxy, write: Write
) -> None:
    """I1: what was sent isn't remembered then; the file tells its checksum."""
    source = write("f", os.urandom(2 * PART))
    store.put("r/f", source)
    other = write("g", os.urandom(2 * PART))
    again = _store(bucket, proxy.endpoint)
    again.verify("r/f", source, VerifyMode.CHECKSUM)
    for mode in again.verify_modes:
        with pytest.raises(IntegrityError) as raised:
            again.verify("r/f", other, mode)
        assert raised.value.subject == "r/f"
        with pytest.raises(MissingError):
            again.verify("r/none", source, mode)
    # Even where the metadata says that it is: they are only what a client said.
    said = dataclasses.replace(other, digest=source.digest)
    with pytest.raises(IntegrityError):
        again.verify("r/f", said, VerifyMode.CHECKSUM)
    again.close()
    with pytest.raises(UsageError, match="size"):
        store.verify("r/f", source, VerifyMode.SIZE)


def test_checksums_that_the_store_does_not_compute_are_not_believed(
    s3_programs: None,
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I1: moto keeps what it is told; so all is read back, and that is said once."""
    with moto() as server, chaos(server.port) as proxy:
        give_credentials(server, monkeypatch)
        bucket = Bucket.make(server)
        store = _store(bucket, proxy.endpoint)
        files = {f"r/{n}": write(f"f{n}", os.urandom(n * PART + 5)) for n in range(3)}
        assert store.put_all(files, VerifyMode.CHECKSUM) == {}
        assert proxy.count(Kind.GET) >= len(files)
        assert [record.msg for record in caplog.records if "no-checksum" in record.msg] == [
            "s3-no-checksum store=%s why=%s: what is stored is read back instead"
        ]
        bucket.put("pre/r/1", b"x" * files["r/1"].size)
        with pytest.raises(IntegrityError):
            store.verify("r/1", files["r/1"], VerifyMode.CHECKSUM)
        assert not any("probe-" in key for key in bucket.keys("pre"))
        store.close()


def test_many_threads_send_and_read_at_once(store: S3Store, write: Write) -> None:
    sources = [write(f"f{n}", os.urandom(n * MIB + n)) for n in range(8)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        key, source = f"r/{number}", sources[number]
        try:
            store.put(key, source)
            store.verify(key, source, VerifyMode.CHECKSUM)
            assert store.read(key, 0, source.size) == Path(source.path).read_bytes()
        except (OSError, AssertionError) as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_forked_child_has_a_connection_of_its_own(
    store: S3Store, proxy: ChaosProxy, write: Write
) -> None:
    """And what is collected there takes nothing from its parent, which would wait for ever."""
    store.put("r/f", write("f", b"bytes"))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            gc.collect()
            status = 0 if store.read("r/f", 0, 9) == b"bytes" else 2
            gc.collect()
            store.close()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    proxy.clear()
    assert store.read("r/f", 0, 9) == b"bytes"
    assert len(proxy.seen) == 1


def test_a_part_larger_than_a_buffer_is_sent_as_it_is_read(
    store: S3Store, bucket: Bucket, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of more than 10,000 parts of the usual size have larger ones."""
    monkeypatch.setattr("ckptgate_adapters.s3_store.parts.PARTS_MAX", 2)
    data = os.urandom(4 * PART - 3)
    source = write("f", data)
    assert store.put_all({"r/f": source}, VerifyMode.CHECKSUM) == {}
    assert bucket.read("pre/r/f") == data
    assert bucket.client.head_object(Bucket=bucket.name, Key="pre/r/f")["ETag"].endswith('-2"')


def test_a_replaced_object_is_read_as_it_is_now(
    store: S3Store, bucket: Bucket, write: Write
) -> None:
    """A put that was repeated makes another version; a range of the old one is never mixed in."""
    store.put("r/f", write("f", b"a" * 100))
    assert store.read("r/f", 0, 10) == b"a" * 10
    bucket.put("pre/r/f", b"b" * 100)
    assert store.read("r/f", 10, 10) == b"b" * 10
