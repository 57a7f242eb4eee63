"""Keys in the store: where each document and each byte of a run lies, and only here.

Two kinds: keys below the store's root (functions that take *run*), and keys below the run's
directory (`data_key`, `chunk_table_key`), as documents carry them, so that a run can be moved.
Names and ids must have passed the checks of `ids` before. Pure; any thread.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "DATA_NAME",
    "GATEWAY_DIR",
    "TEMP_PREFIX",
    "attempt_prefix",
    "attempts_prefix",
    "chunk_table_key",
    "data_key",
    "data_name",
    "format_key",
    "full_key",
    "intent_key",
    "join_key",
    "log_key",
    "log_prefix",
    "manifest_key",
    "member_key",
    "members_prefix",
    "mover_key",
    "movers_prefix",
    "names_key",
    "vote_key",
]

GATEWAY_DIR: Final = ".ckptgate"
TEMP_PREFIX: Final = ".tmp-ckptgate-"
"""Unfinished writes in a store; nobody else's names may begin so."""
"""Directory of everything that is the gateway's own, in a run and in a published checkpoint."""

_INDEX_DIGITS: Final = 10
_ATTEMPTS: Final = "attempts"
_DIGEST_DIGITS: Final = 16
DATA_NAME: Final = re.compile(f"[0-9]+(-[0-9a-f]{{{_DIGEST_DIGITS}}})?")
"""What `data_name` gives, and what it gave before it named the digest."""


def join_key(*parts: str) -> str:
    """Join *parts* with `/`; empty ones are skipped, so the root's run is `""`."""
    return "/".join(part for part in parts if part)


def full_key(run: str, relative: str) -> str:
    """The key below the store's root of *relative*, which is below the directory of *run*."""
    return join_key(run, relative)


def format_key(run: str) -> str:
    """Which format the run has (`StoreFormat`)."""
    return join_key(run, GATEWAY_DIR, "format.json")


def log_prefix(run: str) -> str:
    """Directory of the run's decision log."""
    return join_key(run, GATEWAY_DIR, "log")


def log_key(run: str, index: int) -> str:
    """Slot *index* of the run's decision log, from 0 (`LogRecord`)."""
    return join_key(log_prefix(run), f"{index:0{_INDEX_DIGITS}d}.json")


def attempts_prefix(run: str) -> str:
    """Directory of all attempts of the run."""
    return join_key(run, GATEWAY_DIR, _ATTEMPTS)


def attempt_prefix(run: str, attempt: str) -> str:
    """Directory of one attempt."""
    return full_key(run, _relative(attempt))


def intent_key(run: str, attempt: str) -> str:
    """The attempt's `Intent`."""
    return join_key(attempt_prefix(run, attempt), "intent.json")


def members_prefix(run: str, attempt: str) -> str:
    """Directory of the attempt's members: the one that is listed."""
    return join_key(attempt_prefix(run, attempt), "members")


def member_key(run: str, attempt: str, member: str) -> str:
    """One `Member` of the attempt."""
    return join_key(members_prefix(run, attempt), f"{member}.json")


def movers_prefix(run: str, attempt: str) -> str:
    """Directory of the members that renamed or removed a directory; it is listed, too."""
    return join_key(attempt_prefix(run, attempt), "movers")


def mover_key(run: str, attempt: str, member: str) -> str:
    """One `Mover` of the attempt."""
    return join_key(movers_prefix(run, attempt), f"{member}.json")


def names_key(run: str, attempt: str, member: str, n: int) -> str:
    """The *n*-th `NameOp` of a member, from 0."""
    return join_key(attempt_prefix(run, attempt), "names", member, f"{n}.json")


def vote_key(run: str, attempt: str, member: str, n: int) -> str:
    """The *n*-th `Vote` of a member, from 0."""
    return join_key(attempt_prefix(run, attempt), "votes", member, f"{n}.json")


def manifest_key(run: str, attempt: str, digest: str) -> str:
    """The attempt's `Manifest` whose bytes have this digest."""
    return join_key(attempt_prefix(run, attempt), f"manifest-{digest}.json")


def data_key(attempt: str, member: str, file: str | int) -> str:
    """Where a member puts the bytes of its file *file*; below the run's directory."""
    return join_key(_relative(attempt), "data", member, str(file))


def data_name(file: int, digest: str) -> str:
    """The last part of the `data_key` of a file with these bytes.

    Other bytes have another key: a request to store the ones before, which its sender gave up, may
    still arrive when the new ones are stored and verified.
    """
    return f"{file}-{digest[:_DIGEST_DIGITS]}"


def chunk_table_key(attempt: str, digest: str) -> str:
    """A binary table of chunk digests whose own digest is *digest*; below the run's directory."""
    return join_key(_relative(attempt), "chunks", digest)


def _relative(attempt: str) -> str:
    return join_key(GATEWAY_DIR, _ATTEMPTS, attempt)
