"""Where an answer of S3, or none, becomes an error of the store's contract: here, once.

Grouped by what the caller would do: call again, call a person, wait for space. What isn't known to
be final is transient. The classes of this module are for the adapter alone: it has to tell a lost
upload from a missing object. Messages carry the service's code and text, never a header. Any
thread.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import time
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

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

__all__ = [
    "PERMISSIONS",
    "BadBytesError",
    "BadCredentialsError",
    "ConditionFailedError",
    "ConflictError",
    "DeniedError",
    "InvalidPartError",
    "NoSuchUploadError",
    "OutOfRangeError",
    "ThrottledError",
    "first_error",
    "from_answer",
    "from_transport",
    "translated",
]


class NoSuchUploadError(MissingError):
    """The multipart upload is unknown: it was completed, or aborted, or never was."""


class ConditionFailedError(ExistsError):
    """The object isn't as the request's condition says (412, or 304)."""


class ConflictError(TransientStoreError):
    """Another operation on the same key ran at that moment (409): nothing is known, ask again."""


class ThrottledError(TransientStoreError):
    """The store asks to be called less often."""


class BadBytesError(IntegrityError):
    """The bytes arrived with another checksum than was said, so the store refused them."""


class InvalidPartError(IntegrityError):
    """The store lacks a part that Complete names, or has another under its number."""


class OutOfRangeError(IntegrityError):
    """The object ends before the range that was asked for."""


class DeniedError(UnusableError):
    """What was asked for isn't allowed to these credentials."""

    errno_value = errno.EACCES


class BadCredentialsError(DeniedError):
    """There are none, or they are wrong or too old."""


PERMISSIONS: Final = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "copy_object": "s3:GetObject and s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "get_object_attributes": "s3:GetObjectAttributes",
    "head_bucket": "s3:ListBucket",
    "head_object": "s3:GetObject and s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_objects_v2": "s3:ListBucket",
    "list_parts": "s3:ListMultipartUploadParts",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "upload_part_copy": "s3:GetObject and s3:PutObject",
}
"""What a user must be allowed to for each call of the client."""

_TEXT_CHARS_MAX: Final = 200
_CREDENTIALS_HINT: Final = (
    "aws sts get-caller-identity; credentials come from the environment, a profile or the instance"
)
_CREDENTIALS: Final = frozenset({
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
    "TokenRefreshRequired", "InvalidClientTokenId", "UnrecognizedClientException",
    "ExpiredTokenException", "InvalidSecurity", "CredentialsNotSupported",
})  # fmt: skip
_BY_CODE: Final[Mapping[str, type[CkptError]]] = {
    code: kind
    for kind, codes in {
        NoSuchUploadError: ("NoSuchUpload",),
        MissingError: ("NoSuchKey", "NoSuchVersion", "NotFound"),
        ConditionFailedError: ("PreconditionFailed", "NotModified"),
        ConflictError: ("ConditionalRequestConflict", "OperationAborted"),
        BadBytesError: (
            "BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
            "ChecksumMismatch",
        ),
        InvalidPartError: ("InvalidPart", "InvalidPartOrder", "EntityTooSmall"),
        OutOfRangeError: ("InvalidRange",),
        FullError: (
            "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
            "InsufficientCapacity", "StorageFull", "InsufficientStorage", "NotEnoughSpace",
        ),
        ThrottledError: (
            "SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException",
            "RequestLimitExceeded", "TooManyRequests", "TooManyRequestsException",
            "RequestThrottled", "BandwidthLimitExceeded", "ServiceUnavailable",
        ),
        TransientStoreError: (
            "InternalError", "RequestTimeout", "RequestTimeoutException", "IncompleteBody",
            "PriorRequestNotComplete", "ServerBusy",
        ),
        DeniedError: ("AccessDenied", "AllAccessDisabled", "AccountProblem"),
        InvalidNameError: ("KeyTooLongError", "KeyTooLong", "InvalidURI"),
        UnusableError: (
            "NoSuchBucket", "NotImplemented", "PermanentRedirect", "TemporaryRedirect",
            "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
            "RequestTimeTooSkewed", "InvalidObjectState",
        ),
    }.items()
    for code in codes
}  # fmt: skip
_BY_STATUS: Final[Mapping[int, type[CkptError]]] = {
    304: ConditionFailedError,
    401: DeniedError,
    403: DeniedError,
    404: MissingError,
    409: ConflictError,
    412: ConditionFailedError,
    416: OutOfRangeError,
    429: ThrottledError,
    500: TransientStoreError,
    502: TransientStoreError,
    503: ThrottledError,
    504: TransientStoreError,
    507: FullError,
}
_BODILESS: Final = frozenset({"head_object", "head_bucket"})
"""Answers to these never have a code."""
_ELSEWHERE: Final = frozenset({
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "TemporaryRedirect", "301", "307",
})  # fmt: skip


def from_answer(
    exc: boto.ClientError, operation: str, subject: str, bucket: str = "BUCKET"
) -> CkptError:
    """The contract's error for an answer that says no."""
    response: dict[str, Any] = exc.response
    error: dict[str, Any] = response.get("Error", {})
    about: dict[str, Any] = response.get("ResponseMetadata", {})
    code, status = str(error.get("Code", "")), int(about.get("HTTPStatusCode") or 0)
    text = " ".join(str(error.get("Message", "")).split())[:_TEXT_CHARS_MAX]
    headers: dict[str, str] = about.get("HTTPHeaders") or {}
    kind = BadCredentialsError if code in _CREDENTIALS else _BY_CODE.get(code)
    if kind is None:
        kind = _by_status(status, operation)
    doing = operation.replace("_", " ")
    if kind is MissingError:
        return MissingError(f"cannot {doing} {subject!r}: it is not there", subject=subject)
    msg = f"cannot {doing} {subject!r}: {code or status}: {text or 'no reason given'}"
    if code == "RequestTimeTooSkewed":
        msg = f"{msg} ({_skew(headers)})"
    hint = _hint(code, kind, operation, subject, headers)
    if code == "NoSuchBucket":
        msg = f"there is no bucket {bucket!r}: {text or 'no reason given'}"
        hint = f"aws s3 mb s3://{bucket}"
        return UnusableError(msg, subject=bucket, hint=hint, errno_value=errno.ENOENT)
    return kind(msg, subject=subject, hint=hint)


def _by_status(status: int, operation: str) -> type[CkptError]:
    """What an answer without one of S3's codes means."""
    if status == 404 and operation not in _BODILESS:
        # Whatever stands before the service said so (a proxy, a page of its own): to take the
        # next record of a log for missing would be to believe that the log ends there.
        return TransientStoreError
    return _BY_STATUS.get(status) or (UnusableError if status < 505 else TransientStoreError)


def _hint(
    code: str, kind: type[CkptError], operation: str, subject: str, headers: Mapping[str, str]
) -> str:
    if code in _CREDENTIALS:
        return _CREDENTIALS_HINT
    if kind is DeniedError:
        return f"allow {PERMISSIONS.get(operation, operation)} below {subject!r}"
    if code in _ELSEWHERE:
        region = headers.get("x-amz-bucket-region", "")
        return f"use the bucket's region{': ' + region if region else ''}"
    if code == "InvalidObjectState":
        return f"aws s3api restore-object: {subject!r} was moved to an archive"
    return "timedatectl" if code == "RequestTimeTooSkewed" else ""


def _skew(headers: Mapping[str, str]) -> str:
    try:
        theirs = email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return "this machine's clock differs from the store's"
    return f"this machine's clock is {time.time() - theirs:+.0f} s from the store's"


_NO_CREDENTIALS: Final = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound,
    boto.ConfigParseError, boto.ConfigNotFound, boto.UnauthorizedSSOTokenError,
    boto.SSOTokenLoadError, boto.TokenRetrievalError, boto.NoAuthTokenError,
    boto.InvalidConfigError, boto.RefreshWithMFAUnsupportedError,
)  # fmt: skip
_ENDPOINT_HINT: Final = "is it that service? --endpoint-url URL, or AWS_ENDPOINT_URL"
_TRANSPORT: Final = (
    boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError,
    boto.CredentialRetrievalError, boto.MetadataRetrievalError, boto.FlexibleChecksumError,
    aiohttp.ClientError, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError,
)  # fmt: skip


def from_transport(exc: Exception, operation: str, subject: str) -> CkptError:
    """The contract's error where there was no answer, or none that could be read."""
    doing = operation.replace("_", " ")
    why = " ".join((str(exc) or type(exc).__name__).split())[:_TEXT_CHARS_MAX]
    msg = f"cannot {doing} {subject!r}: {why}"
    if isinstance(exc, _NO_CREDENTIALS):
        return BadCredentialsError(msg, subject=subject, hint=_CREDENTIALS_HINT)
    if isinstance(exc, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(exc):
        msg = f"cannot {doing} {subject!r}: the service's certificate isn't trusted"
        hint = "give the file of the service's certificate authority (ca_bundle)"
        return UnusableError(msg, subject=subject, hint=hint)
    if isinstance(exc, (boto.EndpointConnectionError, boto.ConnectTimeoutError)):
        return TransientStoreError(msg, subject=subject, hint=_ENDPOINT_HINT)
    if isinstance(exc, (*_TRANSPORT, ResponseParserError)):
        return TransientStoreError(msg, subject=subject)
    hint = "check the endpoint, the region and the profile"
    return UnusableError(msg, subject=subject, hint=hint)


@contextmanager
def translated(operation: str, subject: str, bucket: str = "BUCKET") -> Generator[None]:
    """Let no error of the client's or the transport's leave the block."""
    try:
        yield
    except CkptError:
        raise
    except boto.ClientError as exc:
        raise from_answer(exc, operation, subject, bucket) from exc
    except (boto.BotoCoreError, *_TRANSPORT, ResponseParserError) as exc:
        raise from_transport(exc, operation, subject) from exc


async def first_error(work: Coroutine[Any, Any, None]) -> None:
    """Do *work*; of the errors of tasks that failed together, raise the first as itself."""
    try:
        await work
    except BaseExceptionGroup as group:
        raise _leaf(group) from None


def _leaf(exc: BaseException) -> BaseException:
    inner: tuple[BaseException, ...] = getattr(exc, "exceptions", ())
    return _leaf(inner[0]) if inner else exc
