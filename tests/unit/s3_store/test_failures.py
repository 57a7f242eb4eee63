"""What an answer of S3 means, and when a request is made again; clock and chance are the test's."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FullError,
    IntegrityError,
    InvalidNameError,
    MissingError,
    TransientStoreError,
    UnusableError,
)
from ckptgate_adapters.s3_store import failures
from ckptgate_adapters.s3_store.retry import RetryPolicy, may_help


def _answer(code: str, status: int, message: str = "why") -> CkptError:
    response = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}},
    }
    return failures.from_answer(boto.ClientError(response, "PutObject"), "put_object", "a/b")


@pytest.mark.parametrize(
    ("code", "status", "kind", "is_retried"),
    [
        ("NoSuchKey", 404, MissingError, False),
        ("404", 404, TransientStoreError, True),
        ("NoSuchUpload", 404, failures.NoSuchUploadError, False),
        ("NoSuchBucket", 404, UnusableError, False),
        ("PreconditionFailed", 412, ExistsError, False),
        ("304", 304, ExistsError, False),
        ("ConditionalRequestConflict", 409, failures.ConflictError, True),
        ("OperationAborted", 409, failures.ConflictError, True),
        ("SlowDown", 503, failures.ThrottledError, True),
        ("TooManyRequests", 429, failures.ThrottledError, True),
        ("InternalError", 500, TransientStoreError, True),
        ("InternalError", 200, TransientStoreError, True),
        ("RequestTimeout", 400, TransientStoreError, True),
        ("", 502, TransientStoreError, True),
        ("Strange", 599, TransientStoreError, True),
        ("BadDigest", 400, failures.BadBytesError, True),
        ("InvalidPart", 400, failures.InvalidPartError, False),
        ("InvalidRange", 416, failures.OutOfRangeError, False),
        ("QuotaExceeded", 403, FullError, False),
        ("", 507, FullError, False),
        ("AccessDenied", 403, failures.DeniedError, False),
        ("403", 403, failures.DeniedError, False),
        ("InvalidAccessKeyId", 403, failures.BadCredentialsError, False),
        ("ExpiredToken", 400, failures.BadCredentialsError, False),
        ("KeyTooLongError", 400, InvalidNameError, False),
        ("NotImplemented", 501, UnusableError, False),
        ("InvalidArgument", 400, UnusableError, False),
        ("InvalidObjectState", 403, UnusableError, False),
    ],
)
def test_each_answer_has_its_kind(
    code: str, status: int, kind: type[CkptError], is_retried: bool
) -> None:
    error = _answer(code, status)
    assert isinstance(error, kind)
    assert type(error) is kind or kind is ExistsError
    assert may_help(error) is is_retried
    assert error.errno
    assert ("no bucket" if code == "NoSuchBucket" else "a/b") in str(error)


def test_a_404_that_is_not_s3s_never_says_that_something_is_missing() -> None:
    """I7: a log doesn't end where a proxy's page says that nothing was found."""
    response = {
        "Error": {"Code": "404", "Message": "Not Found"},
        "ResponseMetadata": {"HTTPStatusCode": 404},
    }
    for operation, kind in (("get_object", TransientStoreError), ("head_object", MissingError)):
        exc = boto.ClientError(response, operation)
        assert type(failures.from_answer(exc, operation, "a/b")) is kind


@pytest.mark.parametrize(
    "exc",
    [
        boto.EndpointConnectionError(endpoint_url="http://x"),
        boto.ReadTimeoutError(endpoint_url="http://x"),
        boto.ConnectionClosedError(endpoint_url="http://x"),
        aiohttp.ClientPayloadError("broke off"),
        ConnectionResetError(104, "reset"),
        TimeoutError(),
    ],
)
def test_without_an_answer_nothing_is_known(exc: Exception) -> None:
    with pytest.raises(TransientStoreError), failures.translated("get_object", "k"):
        raise exc


def test_no_credentials_and_a_wrong_certificate_need_a_person() -> None:
    with pytest.raises(failures.BadCredentialsError), failures.translated("get_object", "k"):
        raise boto.NoCredentialsError
    with (
        pytest.raises(UnusableError, match="isn't trusted"),
        failures.translated("get_object", "k"),
    ):
        raise boto.SSLError(endpoint_url="https://x", error="CERTIFICATE_VERIFY_FAILED")


def test_an_error_of_ours_passes_as_it_is_and_a_bug_stays_a_bug() -> None:
    with pytest.raises(FullError), failures.translated("get_object", "k"):
        raise FullError("full")
    with pytest.raises(KeyError), failures.translated("get_object", "k"):
        raise KeyError("bug")


class _Calls:
    """Fails with each of *errors*, then succeeds."""

    def __init__(self, *errors: CkptError) -> None:
        self.errors = list(errors)
        self.slept: list[float] = []

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def run(self, tries_max: int, chance: float = 0.999) -> str:
        policy = RetryPolicy(
            tries_max=tries_max, first_s=1, max_s=5, sleep=self.sleep, chance=lambda: chance
        )
        return asyncio.run(policy.run(self, "test"))


def test_pauses_grow_up_to_a_limit_and_tries_end() -> None:
    calls = _Calls(*[TransientStoreError("x") for _ in range(5)])
    assert calls.run(6) == "done"
    assert [round(pause) for pause in calls.slept] == [1, 2, 4, 5, 5]
    calls = _Calls(*[TransientStoreError("x") for _ in range(5)])
    with pytest.raises(TransientStoreError):
        calls.run(5)
    assert len(calls.slept) == 4


def test_what_is_final_is_not_tried_again() -> None:
    calls = _Calls(MissingError("gone"))
    with pytest.raises(MissingError):
        calls.run(9)
    assert calls.slept == []


def test_bytes_that_were_refused_are_sent_again() -> None:
    calls = _Calls(failures.BadBytesError("flipped"))
    assert calls.run(2) == "done"
    with pytest.raises(IntegrityError):
        _Calls(failures.BadBytesError("flipped"), failures.BadBytesError("again")).run(2)


@given(st.integers(1, 60), st.integers(0), st.booleans())
def test_a_pause_is_never_longer_than_its_limit(tries: int, seed: int, is_slow: bool) -> None:
    policy = RetryPolicy(tries_max=99, first_s=0.1, max_s=10, chance=random.Random(seed).random)
    exc = failures.ThrottledError("slow down") if is_slow else TransientStoreError("x")
    limit = min(10, 0.1 * 2 ** (tries - 1))
    pause = policy.pause_s(tries, exc)
    assert (limit / 2 if is_slow else 0) <= pause <= limit
