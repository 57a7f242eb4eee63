"""Where an S3 store is and how it is spoken to: `s3://bucket/prefix` and the options.

Credentials are not here: they come from where boto looks for them (environment, profile, instance),
so nothing in these values is secret. Pure; any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import ConfigError, InvalidNameError
from ckptgate.model.ids import check_relative_path
from ckptgate_adapters.s3_store.parts import PART_BYTES_MAX, PART_BYTES_MIN

__all__ = ["MAX_KEY_BYTES", "S3Location", "S3Options", "parse_s3_url"]

MAX_KEY_BYTES: Final = 1024
"""The longest key that S3 takes, in bytes of UTF-8."""

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,253}[a-z0-9]")
_ARN: Final = re.compile(r"arn:aws[a-z-]*:s3:[a-z0-9-]*:[0-9]{12}:accesspoint[:/][a-z0-9.-]+")
_MIB: Final = 1024 * 1024
_SHOWN_CHARS: Final = 64
_PARALLEL_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A bucket and the prefix below which the store is.

    Attributes:
        bucket: its name, or the ARN of an access point.
        prefix: without `/` at either end; "" is the whole bucket.
    """

    bucket: str
    prefix: str = ""

    @property
    def url(self) -> str:
        """How a user names it."""
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    def key(self, path: str) -> str:
        """The object's key for *path*, which is relative to the store's root; "" is the root.

        Raises:
            InvalidNameError: the path is unsafe, or the key is longer than S3 takes.
        """
        if path:
            check_relative_path(path)
        return check_key("/".join(part for part in (self.prefix, path) if part), path)

    def directory_key(self, path: str) -> str:
        """The key of the object that stands for the directory *path*; raises as `key`."""
        return check_key(f"{self.key(path)}/", path)

    def below(self, path: str) -> str:
        """What all keys below the directory *path* begin with ("" if it is the whole bucket)."""
        key = self.key(path)
        return f"{key}/" if key else ""

    def path(self, key: str) -> str:
        """The path below the store's root of *key*, or the whole of it if it isn't below."""
        start = f"{self.prefix}/" if self.prefix else ""
        return key.removeprefix(start)


def check_key(key: str, path: str) -> str:
    """*key*, which is that of *path*.

    Raises:
        InvalidNameError: it is longer than S3 takes.
    """
    length = len(key.encode("utf-8", "surrogateescape"))
    if length > MAX_KEY_BYTES:
        shown = f"{key[:_SHOWN_CHARS]}...{key[-_SHOWN_CHARS:]}"
        msg = f"the key {shown!r} has {length} bytes, S3 takes {MAX_KEY_BYTES} at most"
        raise InvalidNameError(msg, subject=path, hint="shorter names, or a shorter prefix")
    return key


def parse_s3_url(url: str) -> S3Location:
    """The location that `s3://bucket/prefix` names.

    Raises:
        ConfigError: not such a URL; the message says what is wrong.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in {"s3", "s3a"}:
        msg = f"{url!r} is not an s3:// URL"
        raise ConfigError(msg, subject="store", hint="s3://BUCKET/PREFIX")
    arn = _ARN.match(rest)
    bucket = arn.group() if arn else rest.partition("/")[0]
    prefix = rest[len(bucket) :].strip("/")
    if not arn and ("@" in bucket or not _BUCKET.fullmatch(bucket)):
        shown = "..." if any(mark in bucket for mark in "@:") else bucket
        msg = f"{shown!r} is not the name of a bucket"
        hint = "s3://BUCKET/PREFIX; credentials come from the environment or a profile"
        raise ConfigError(msg, subject="store", hint=hint)
    if any(mark in rest for mark in "?#"):
        msg = f"the URL of the store {scheme}://{bucket}/... has a query or a fragment"
        raise ConfigError(msg, subject="store", hint="give options by the configuration")
    location = S3Location(bucket=bucket, prefix=prefix)
    try:
        S3Location(bucket=bucket).key(prefix)
    except InvalidNameError as exc:
        msg = f"the prefix {prefix!r} can't be a directory: {exc}"
        raise ConfigError(msg, subject="store") from exc
    return location


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How an S3 store is spoken to.

    Attributes:
        endpoint_url: of the service; "" is AWS, or what the environment or the profile says.
        profile: of the AWS configuration; "" is the default one.
        region: of the bucket; "" is what the environment or the profile says.
        path_style: the bucket is in the path of a URL, not in the host's name.
        anon: requests aren't signed.
        ca_bundle: a file of certificates to trust; "" is the system's.
        max_parallel: requests in flight.
        part_bytes: size of a part where 10,000 of them are enough.
        parts_in_flight: parts being read or sent at a time, of all files together; with
            *part_bytes* it bounds the memory.
        single_writer: the user says that nobody else writes there, so that put-if-absent isn't
            needed.
        plain_copy: after each COMMIT the store copies the files to their plain names, for people
            without ckptgate.
        connect_timeout_s: for a connection.
        stall_s: without any progress in a request, before it is given up.
        tries_max: of a request, the first included.
        retry_first_s: pause before the second try, at most; it doubles from there.
        retry_max_s: longest pause.
    """

    endpoint_url: str = ""
    profile: str = ""
    region: str = ""
    path_style: bool = False
    anon: bool = False
    ca_bundle: str = ""
    max_parallel: int = 32
    part_bytes: int = 16 * _MIB
    parts_in_flight: int = 8
    single_writer: bool = False
    plain_copy: bool = False
    connect_timeout_s: float = 10.0
    stall_s: float = 60.0
    tries_max: int = 6
    retry_first_s: float = 0.1
    retry_max_s: float = 10.0

    def __post_init__(self) -> None:
        _check_range("part_bytes", self.part_bytes, PART_BYTES_MIN, PART_BYTES_MAX)
        _check_range("max_parallel", self.max_parallel, 1, _PARALLEL_MAX)
        _check_range("parts_in_flight", self.parts_in_flight, 1, _PARALLEL_MAX)
        _check_range("tries_max", self.tries_max, 1, 100)
        for name in ("connect_timeout_s", "stall_s", "retry_first_s", "retry_max_s"):
            if not 0 < getattr(self, name) <= 24 * 3600:
                msg = f"{name} is {getattr(self, name)!r}, not between 0 and a day"
                raise ConfigError(msg, subject=name)
        scheme, mark, rest = self.endpoint_url.partition("://")
        if self.endpoint_url and (not mark or scheme not in {"http", "https"} or not rest):
            msg = f"the endpoint {_without_user(self.endpoint_url)!r} is not an http(s) URL"
            raise ConfigError(msg, subject="endpoint_url", hint="https://HOST[:PORT]")
        if "@" in rest.partition("/")[0]:
            msg = f"the endpoint {_without_user(self.endpoint_url)!r} has credentials in it"
            hint = "credentials come from the environment or a profile"
            raise ConfigError(msg, subject="endpoint_url", hint=hint)


def _check_range(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        msg = f"{name} is {value}, not between {lowest} and {highest}"
        raise ConfigError(msg, subject=name)


def _without_user(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}{mark}...@{host}" if at and user else url
