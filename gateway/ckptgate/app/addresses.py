"""What a STORE argument names: a directory, or a bucket of an S3 service and a prefix in it.

An address is an absolute directory or a canonical `s3://bucket/prefix`, and names a place below a
store just as well. It owns the rule that no credentials are ever taken from an address, nor shown.
"""

from __future__ import annotations

import os
import posixpath
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from ckptgate.errors import UsageError

__all__ = [
    "below",
    "is_url",
    "joined",
    "split_address",
    "store_address",
    "store_identity",
    "store_url",
]

_S3_SCHEMES: Final = frozenset({"s3", "s3a"})
_MARK: Final = "://"
_CREDENTIALS_HINT: Final = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID, ...), a profile, or the instance"
)


def is_url(address: str) -> bool:
    """Whether it is in a bucket, and not in the local file system."""
    return _MARK in address


def store_address(store: str) -> str:
    """The address that a STORE argument means.

    Raises:
        UsageError: it is a URL of a kind that isn't served, or has credentials in it.
    """
    scheme, mark, rest = store.partition(_MARK)
    if not mark:
        return os.path.realpath(os.path.expanduser(store))
    if scheme in _S3_SCHEMES:
        return _bucket_address(store, rest)
    parts = urlsplit(store)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"}:
        msg = f"a store is a directory, a file:/// URL or s3://BUCKET/PREFIX, not {scheme}://..."
        raise UsageError(msg, subject="store", hint="ckptgate mount STORE MOUNTPOINT")
    return os.path.realpath(unquote(parts.path))


def _bucket_address(store: str, rest: str) -> str:
    bucket = rest.partition("/")[0]
    if not bucket.startswith("arn:") and any(mark in bucket for mark in "@:"):
        msg = "the URL of the store has credentials in it: s3://BUCKET/PREFIX takes none"
        raise UsageError(msg, subject="store", hint=_CREDENTIALS_HINT)
    from ckptgate_adapters.s3_store import parse_s3_url  # noqa: PLC0415 - s3fs takes its time

    return parse_s3_url(store).url


def split_address(address: str) -> tuple[str, str]:
    """The address of what it lies in, and its name there; "" for a name at the top."""
    if not is_url(address):
        return os.path.split(address.rstrip("/"))
    scheme, mark, rest = address.partition(_MARK)
    head, _, name = rest.rpartition("/")
    return (f"{scheme}{mark}{head}", name) if head else (address, "")


def joined(address: str, path: str) -> str:
    """The address of *path* (relative, may have `..`) below *address*."""
    if not is_url(address):
        return os.path.normpath(os.path.join(address, path))
    scheme, mark, rest = address.partition(_MARK)
    return f"{scheme}{mark}{posixpath.normpath(posixpath.join(rest, path))}"


def below(address: str, store: str) -> str | None:
    """The path of *address* below *store*, "" for the store itself, None if it isn't in it.

    Nothing lies in "", which is the mount point of a daemon without one.
    """
    if not store:
        return None
    if address == store:
        return ""
    start = store.rstrip("/") + "/"
    return address[len(start) :] if address.startswith(start) else None


def store_identity(address: str, endpoint_url: str) -> str:
    """Of which store an address is: a bucket's name means something at one service only."""
    if not is_url(address) or not endpoint_url:
        return address
    return f"{endpoint_url.rstrip('/')}/{address.partition(_MARK)[2]}"


def store_url(address: str, endpoint_url: str) -> str:
    """What a spool remembers of its store, as it serves no other one."""
    if is_url(address):
        return store_identity(address, endpoint_url)
    return "file://" + quote(address)
