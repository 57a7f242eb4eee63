"""Records under every fault: it is created whole, once, and read as it is, or it is an error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.s3 import faults
from tests.s3.chaos import ALWAYS, ChaosProxy
from tests.s3.matrix import FAULTS, Case, cases
from tests.s3.servers import Bucket
from tests.s3.wire import Kind

from ckptgate.errors import CkptError, ExistsError, TransientStoreError
from ckptgate_adapters.s3_store import S3Store

RECORD = b'{"kind": "commit", "n": 1234567890}' * 10


@dataclass
class Below:
    """The records of one test, all below its prefix."""

    store: S3Store
    prefix: str

    def create(self, key: str, data: bytes) -> None:
        self.store.create(f"{self.prefix}/{key}", data)

    def get(self, key: str) -> bytes:
        return self.store.get(f"{self.prefix}/{key}")

    def children(self, key: str) -> list[str]:
        return self.store.children(f"{self.prefix}/{key}")


@pytest.fixture
def records(shared_store: S3Store, proxy: ChaosProxy, prefix: str) -> Below:
    return Below(shared_store, prefix)


@pytest.fixture
def bucket(shared_bucket: Bucket, prefix: str) -> Bucket:
    return shared_bucket.below(prefix)


def names(pairs: list[tuple[Kind, Case]]) -> list[str]:
    return [f"{case.name} of {kind}" for kind, case in pairs]


CREATING = cases(Kind.PUT)
# Each stall takes its time: where there are several, they are lost requests and replies once more.
QUICK_CREATING = [pair for pair in CREATING if "stalled" not in pair[1].name]


@pytest.mark.parametrize(("kind", "case"), CREATING, ids=names(CREATING))
def test_one_fault_neither_hides_a_record_nor_changes_it(records, proxy, bucket, kind, case: Case):
    """I7, I10: a retry makes one record of one fault."""
    rule = proxy.rule(case.fault, kind)
    records.create("r/log/0", RECORD)
    assert len(rule.met) == 1
    proxy.land()
    assert bucket.read("r/log/0") == RECORD


@pytest.mark.parametrize(("kind", "case"), QUICK_CREATING, ids=names(QUICK_CREATING))
def test_a_record_is_never_taken_for_another_s(records, proxy, bucket, kind, case: Case):
    """I2, I3, I7: who lost the slot is told so, or that nothing is known."""
    bucket.put("r/log/0", b"another's")
    proxy.rule(case.fault, kind, times=2)
    with pytest.raises((ExistsError, TransientStoreError)):
        records.create("r/log/0", RECORD)
    proxy.clear()
    with pytest.raises(ExistsError):
        records.create("r/log/0", RECORD)
    proxy.land()
    assert bucket.read("r/log/0") == b"another's"


@pytest.mark.parametrize("name", [case.name for _, case in QUICK_CREATING])
def test_while_the_fault_lasts_it_is_told_and_a_later_try_lands(records, proxy, bucket, name):
    """I10, I11: not known is not success; the same call again ends it."""
    proxy.rule(FAULTS[name].fault, Kind.PUT, times=ALWAYS)
    try:
        records.create("r/log/0", RECORD)
    except CkptError:
        pass
    else:
        assert bucket.read("r/log/0") == RECORD
    proxy.clear()
    records.create("r/log/0", RECORD)
    proxy.land()
    assert bucket.read("r/log/0") == RECORD


READING = cases(Kind.GET)


@pytest.mark.parametrize(("kind", "case"), READING, ids=names(READING))
@pytest.mark.parametrize("times", [1, ALWAYS])
def test_what_is_read_is_what_is_there_or_an_error(records, proxy, bucket, kind, case, times):
    """I8: neither a cut nor a changed record is ever given out."""
    bucket.put("r/log/0", RECORD, ChecksumAlgorithm="CRC64NVME")
    if times > 1 and "stalled" in case.name:
        times = 2
    rule = proxy.rule(case.fault, kind, times=times)
    try:
        assert records.get("r/log/0") == RECORD
    except CkptError:
        assert times > 1, "one fault is survived"
    assert rule.met


LISTING = [pair for pair in cases(Kind.LIST) if not pair[1].is_silent]


@pytest.mark.parametrize(("kind", "case"), LISTING, ids=names(LISTING))
def test_a_listing_is_complete_or_an_error(records, proxy, bucket, kind, case: Case):
    for number in range(3):
        bucket.put(f"r/members/m{number}", b"")
    rule = proxy.rule(case.fault, kind)
    assert records.children("r/members") == ["m0", "m1", "m2"]
    assert len(rule.met) == 1


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.GET])
@pytest.mark.parametrize("code", ["AccessDenied", "SignatureDoesNotMatch"])
def test_what_no_retry_helps_is_not_retried(records, proxy, bucket, kind, code):
    bucket.put("r/there", RECORD)
    rule = proxy.rule(faults.error_before(403, code), kind, times=ALWAYS)
    with pytest.raises(CkptError) as caught:
        if kind is Kind.PUT:
            records.create("r/new", RECORD)
        else:
            records.get("r/there")
    assert not isinstance(caught.value, TransientStoreError)
    assert len(rule.met) == 1


def test_a_refusal_after_a_lost_reply_is_no_proof_that_nothing_was_stored(records, proxy, bucket):
    """I6: credentials may end between two tries, the first of which landed."""
    refused = faults.error_before(403, "ExpiredToken")
    proxy.rule(faults.drop_reply, Kind.PUT)
    proxy.rule(refused, Kind.PUT, Kind.GET, times=ALWAYS)
    with pytest.raises(TransientStoreError, match="unknown whether"):
        records.create("r/log/0", RECORD)
    assert bucket.read("r/log/0") == RECORD
    proxy.clear()
    records.create("r/log/0", RECORD)
