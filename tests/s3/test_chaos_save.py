"""A two-node save on S3 with a fault of one request: nothing wrong is ever seen, and it commits.

Each kind of request meets each fault at its first, a middle and its last occurrence. After that
the bucket is looked at by boto3, what was late arrives, both processes begin anew, and all must be
as without a fault. (I1 to I12, by `tests.s3.saving` and the checker of the simulation.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import give_credentials
from tests.s3 import faults
from tests.s3.chaos import chaos
from tests.s3.matrix import FAULTS, Case, cases
from tests.s3.saving import Lab
from tests.s3.servers import Bucket, Server, seaweedfs
from tests.s3.wire import Kind

ONCE = (Kind.CREATE_UPLOAD, Kind.COMPLETE)
MULTIPART = (*ONCE, Kind.UPLOAD_PART)
SMALL = (Kind.PUT, Kind.HEAD, Kind.GET, Kind.LIST)
ALL = [
    (kind, case, which)
    for kind, case in cases(*MULTIPART, *SMALL)
    for which in (("first",) if kind in ONCE else ("first", "middle", "last"))
]
CORE = [
    (Kind.UPLOAD_PART, FAULTS["bit flip in the request"], "first"),
    (Kind.COMPLETE, FAULTS["lost reply"], "first"),
    (Kind.PUT, FAULTS["lost reply"], "middle"),
    (Kind.PUT, FAULTS["late request"], "middle"),
    (Kind.GET, FAULTS["bit flip in the reply"], "middle"),
]


def names(rows: list[tuple[Kind, Case, str]]) -> list[str]:
    return [f"{case.name} of {kind}, {which}" for kind, case, which in rows]


def make_lab(server: Server, tmp: Path, *, has_parts: bool) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch, chaos(server.port) as proxy:
        give_credentials(server, patch)
        bucket = Bucket.make(server)
        lab = Lab.make(bucket, proxy, tmp, has_parts=has_parts)
        try:
            lab.measure()
            yield lab
        finally:
            lab.close()
            bucket.destroy()


@pytest.fixture(scope="module")
def small_lab(seaweed: Server, tmp_path_factory) -> Iterator[Lab]:
    yield from make_lab(seaweed, tmp_path_factory.mktemp("small"), has_parts=False)


@pytest.fixture(scope="module")
def parts_lab(seaweed: Server, tmp_path_factory) -> Iterator[Lab]:
    yield from make_lab(seaweed, tmp_path_factory.mktemp("parts"), has_parts=True)


@pytest.fixture
def lab_of(request: pytest.FixtureRequest) -> Callable[[Kind], Lab]:
    """The lab in whose saves the kind of request occurs, made when it is first needed."""
    return lambda kind: request.getfixturevalue("parts_lab" if kind in MULTIPART else "small_lab")


def occurrences(lab: Lab, kind: Kind) -> dict[str, int]:
    """Which of all requests of the kind is the first, the middle, and the last."""
    count = lab.counts[kind]
    assert count >= (1 if kind in ONCE else 3)
    return {"first": 1, "middle": (count + 1) // 2, "last": count}


def check(lab: Lab, kind: Kind, case: Case, nth: int) -> None:
    lab.proxy.clear()
    rule = lab.proxy.rule(case.fault, kind, nth=nth)
    saving = lab.saving()
    saving.go()
    # How often both ask varies by one or two, so the last one may not come.
    assert rule.met or nth == lab.counts[kind], "the fault met nothing"
    assert saving.finish() == lab.reference


@pytest.mark.parametrize(("kind", "case", "which"), CORE, ids=names(CORE))
def test_one_fault_of_some_requests_changes_nothing(lab_of, kind: Kind, case: Case, which: str):
    """I1 to I12."""
    lab = lab_of(kind)
    check(lab, kind, case, occurrences(lab, kind)[which])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "case", "which"), ALL, ids=names(ALL))
def test_one_fault_of_any_request_changes_nothing(lab_of, kind: Kind, case: Case, which: str):
    """I1 to I12."""
    lab = lab_of(kind)
    check(lab, kind, case, occurrences(lab, kind)[which])


@pytest.mark.parametrize("kind", [Kind.UPLOAD_PART, pytest.param(Kind.PUT, marks=pytest.mark.full)])
def test_the_server_may_be_killed_in_a_request_and_come_back(s3_programs, tmp_path, kind: Kind):
    """I1 to I12: what it had said to be stored it has, and what it had not is sent again."""
    with seaweedfs() as server:
        for lab in make_lab(server, tmp_path, has_parts=kind is Kind.UPLOAD_PART):
            place = occurrences(lab, kind)["middle"]
            rule = lab.proxy.rule(faults.during(server.restart), kind, nth=place)
            saving = lab.saving()
            saving.go()
            assert rule.met
            assert saving.finish() == lab.reference
