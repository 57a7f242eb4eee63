"""A file's bytes under every fault: the bucket has exactly them, or nothing and it is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest
from tests.conftest import give_credentials
from tests.s3 import faults
from tests.s3.chaos import ALWAYS, ChaosProxy
from tests.s3.matrix import Case, cases, options
from tests.s3.servers import Bucket
from tests.s3.wire import Kind

from ckptgate.engine.digest import digest_file
from ckptgate.errors import CkptError, IntegrityError, MissingError
from ckptgate.ports.store import DigestedFile, VerifyMode
from ckptgate_adapters.s3_store import S3Store

KEY = "r/.ckptgate/attempts/step-1.0/data/a/1"
SMALL_BYTES = 70_001
LARGE_BYTES = (10 << 20) + 17


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[int, DigestedFile]:
    """A small file, and one of three parts."""
    base, found = tmp_path_factory.mktemp("sources"), {}
    for size in (SMALL_BYTES, LARGE_BYTES):
        path = base / str(size)
        path.write_bytes(os.urandom(size))
        with open(path, "rb") as file:
            made = digest_file(file.fileno(), lambda: None)
        found[size] = DigestedFile(
            path=str(path), size=size, digest=made.digest, chunks=made.chunks, may_link=False
        )
    return found


@pytest.fixture(scope="module")
def store(shared_bucket: Bucket, shared_proxy: ChaosProxy) -> Iterator[S3Store]:
    """It waits longer than others: parts take time on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        give_credentials(shared_bucket.server, patch)
        made = S3Store(shared_bucket.url, options(shared_proxy.endpoint, stall_s=2.0))
        # What it finds out once, it finds out now.
        path = Path(__file__)
        with open(path, "rb") as file:
            digest = digest_file(file.fileno(), lambda: None)
        source = DigestedFile(
            path=str(path), size=path.stat().st_size, digest=digest.digest,
            chunks=digest.chunks, may_link=False,
        )  # fmt: skip
        assert made.put_all({"warm": source}, VerifyMode.CHECKSUM) == {}
        yield made
        made.close()


def names(pairs: list[tuple[Kind, Case]]) -> list[str]:
    return [f"{case.name} of {kind}" for kind, case in pairs]


def stored(bucket: Bucket, source: DigestedFile, prefix: str) -> bool:
    """Whether the object is there; if so, it is exactly the file."""
    keys = bucket.keys(f"{prefix}/")
    assert keys in ([], [f"{prefix}/{KEY}"]), keys
    if not keys:
        return False
    data = bucket.read(keys[0])
    assert blake3.blake3(data).hexdigest() == source.digest
    return True


def in_part(bucket: Bucket, prefix: str) -> list[str]:
    return [key for key, _ in bucket.uploads() if key.startswith(f"{prefix}/")]


PART = cases(Kind.UPLOAD_PART)
LARGE = [*cases(Kind.CREATE_UPLOAD), *PART, *cases(Kind.COMPLETE, Kind.HEAD)]
PAIRS = [
    *((SMALL_BYTES, kind, case) for kind, case in cases(Kind.PUT)),
    *((LARGE_BYTES, kind, case) for kind, case in LARGE),
]
NAMES = names([(kind, case) for _, kind, case in PAIRS])
CORE = {
    (Kind.CREATE_UPLOAD, "lost reply"), (Kind.UPLOAD_PART, "late request"),
    (Kind.UPLOAD_PART, "bit flip in the request"), (Kind.COMPLETE, "lost reply"),
    (Kind.COMPLETE, "unheard duplicate"), (Kind.COMPLETE, "200 with an error after"),
    (Kind.HEAD, "500 before"),
}  # fmt: skip


def is_core(size: int, kind: Kind, case: Case) -> bool:
    """Few, as they take their time: stalls, and files of many bytes."""
    if size == SMALL_BYTES:
        return "stalled" not in case.name
    return (kind, case.name) in CORE


ONE_FAULT = [
    pytest.param(*pair, marks=() if is_core(*pair) else pytest.mark.full, id=name)
    for pair, name in zip(PAIRS, NAMES, strict=True)
]


@pytest.mark.parametrize(("size", "kind", "case"), ONE_FAULT)
def test_one_fault_is_survived(store, proxy, shared_bucket, sources, prefix, size, kind, case):
    """I1, I11: what `put_all` says to be stored and proved is there, whatever comes late."""
    source = sources[size]
    rule = proxy.rule(case.fault, kind)
    failed = store.put_all({f"{prefix}/{KEY}": source}, VerifyMode.CHECKSUM)
    assert not failed, failed
    assert len(rule.met) == 1
    assert stored(shared_bucket, source, prefix)
    proxy.land()
    assert stored(shared_bucket, source, prefix)
    # Of an upload whose id nobody was told, nobody can take care at once.
    lost = kind is Kind.CREATE_UPLOAD
    assert len(in_part(shared_bucket, prefix)) <= lost


@pytest.mark.full
@pytest.mark.parametrize("nth", [2, 3])
@pytest.mark.parametrize(("kind", "case"), PART, ids=names(PART))
def test_it_may_be_any_part(store, proxy, shared_bucket, sources, prefix, kind, case, nth):
    """I1."""
    source = sources[LARGE_BYTES]
    rule = proxy.rule(case.fault, kind, nth=nth)
    assert store.put_all({f"{prefix}/{KEY}": source}, VerifyMode.CHECKSUM) == {}
    assert len(rule.met) == 1
    proxy.land()
    assert stored(shared_bucket, source, prefix)
    assert in_part(shared_bucket, prefix) == []


@pytest.mark.full
@pytest.mark.parametrize(("size", "kind", "case"), PAIRS, ids=NAMES)
def test_a_lasting_fault_is_told_and_ends_well(
    store, proxy, shared_bucket, sources, prefix, size, kind, case
):
    """I1, I10: nothing that is wrong is said to be stored; the same call again stores it."""
    source = sources[size]
    proxy.rule(case.fault, kind, times=ALWAYS)
    failed = store.put_all({f"{prefix}/{KEY}": source}, VerifyMode.CHECKSUM)
    assert all(isinstance(exc, CkptError) for exc in failed.values())
    is_there = stored(shared_bucket, source, prefix)
    assert is_there or failed
    proxy.clear()
    proxy.land()
    assert store.put_all({f"{prefix}/{KEY}": source}, VerifyMode.CHECKSUM) == {}
    assert stored(shared_bucket, source, prefix)


@pytest.mark.parametrize("mode", [VerifyMode.CHECKSUM, VerifyMode.READBACK])
def test_other_bytes_in_its_place_are_noticed(store, proxy, shared_bucket, sources, prefix, mode):
    """I1: whatever put them there, they aren't what was digested."""
    source = sources[SMALL_BYTES]
    key = f"{prefix}/{KEY}"
    with pytest.raises(MissingError):
        store.verify(key, source, mode)
    data = bytearray(Path(source.path).read_bytes())
    data[-1] ^= 1
    shared_bucket.put(key, bytes(data), ChecksumAlgorithm="CRC64NVME")
    with pytest.raises(IntegrityError):
        store.verify(key, source, mode)
    shared_bucket.put(key, bytes(data[:-1]), ChecksumAlgorithm="CRC64NVME")
    with pytest.raises(IntegrityError):
        store.verify(key, source, mode)


@pytest.mark.parametrize("kind", [Kind.ABORT, Kind.LIST_PARTS])
@pytest.mark.parametrize("fault", [faults.drop_reply, faults.error_before(500, "InternalError")])
def test_an_abort_that_fails_hides_no_error_and_is_made_up_for(
    store, proxy, shared_bucket, sources, prefix, kind, fault
):
    """I1: an upload that can't be finished is given up, and said to have failed."""
    source = sources[LARGE_BYTES]
    proxy.rule(faults.error_before(403, "AccessDenied"), Kind.COMPLETE, times=ALWAYS)
    proxy.rule(fault, kind)
    failed = store.put_all({f"{prefix}/{KEY}": source}, VerifyMode.CHECKSUM)
    (exc,) = failed.values()
    assert isinstance(exc, CkptError)
    assert "AccessDenied" in str(exc)
    assert not stored(shared_bucket, source, prefix)
    assert in_part(shared_bucket, prefix) == []
