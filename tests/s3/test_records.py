"""Records on S3: one of two writers wins, and what happened to a request is never guessed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.s3.servers import Bucket

from ckptgate.errors import ExistsError, IntegrityError, MissingError
from ckptgate_adapters.s3_store.location import S3Options, parse_s3_url
from ckptgate_adapters.s3_store.records import S3Records
from ckptgate_adapters.s3_store.session import Session


@pytest.fixture
def session(bucket: Bucket) -> Iterator[Session]:
    made = Session(
        parse_s3_url(f"{bucket.url}/some/prefix"),
        S3Options(endpoint_url=bucket.server.endpoint),
    )
    yield made
    made.close()


@pytest.fixture
def records(session: Session) -> S3Records:
    return S3Records(session)


def test_a_record_is_created_once_and_its_own_repetition_is_success(
    records: S3Records, bucket: Bucket
) -> None:
    """I7."""
    for _ in range(2):
        records.create("r/log/0.json", b"first")
    with pytest.raises(ExistsError) as raised:
        records.create("r/log/0.json", b"other")
    assert raised.value.subject == "r/log/0.json"
    assert records.get("r/log/0.json") == b"first"
    assert bucket.read("some/prefix/r/log/0.json") == b"first"
    with pytest.raises(MissingError):
        records.get("r/log/1.json")
    with pytest.raises(IntegrityError, match="larger than 4 bytes"):
        records.get("r/log/0.json", limit=4)


def test_children_are_names_right_below_over_all_pages(records: S3Records, bucket: Bucket) -> None:
    for name in ("b/x", "b/y", "a", "c d+é%", ".tmp-ckptgate-1", "b"):
        bucket.put(f"some/prefix/r/{name}", b"")
    bucket.put("some/prefix/r/", b"")
    bucket.put("some/prefix/rest", b"")
    assert records.children("r") == ["a", "b", "c d+é%"]
    assert records.children("") == ["r", "rest"]
    assert records.children("none") == []


def test_of_two_writers_one_wins(records: S3Records) -> None:
    """I2, I3."""
    won: list[bytes] = []
    start = threading.Barrier(4)

    def write(data: bytes) -> None:
        start.wait()
        try:
            records.create("r/one", data)
        except ExistsError:
            return
        won.append(data)

    threads = [threading.Thread(target=write, args=(b"%d" % n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [records.get("r/one")]
