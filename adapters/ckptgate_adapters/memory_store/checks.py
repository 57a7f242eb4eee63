"""Names and bytes that the store in memory is given: what it refuses. Any thread."""

from __future__ import annotations

from typing import Final

import blake3
import msgspec

from ckptgate.errors import IntegrityError, MissingError, RefusedError
from ckptgate.model.ids import CHUNK_BYTES, check_relative_path
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.ports.store import DigestedFile, VerifyMode, check_verify_mode

__all__ = ["MODES", "check_mode", "check_plain", "compare", "read_local", "shown_attempt"]

DIGEST_BYTES: Final = 32
MODES: Final = frozenset({VerifyMode.SIZE, VerifyMode.READBACK})


class _Shown(msgspec.Struct):
    attempt: str


def shown_attempt(manifest: bytes) -> str:
    """The attempt that a published manifest names, "" if it is none."""
    try:
        return msgspec.json.decode(manifest, type=_Shown).attempt
    except msgspec.MsgspecError:
        return ""


def check_mode(mode: VerifyMode) -> None:
    """Refuse what needs checksums."""
    check_verify_mode(mode, MODES, "memory:")


def check_plain(path: str) -> None:
    """Refuse the gateway's own names."""
    if path:
        check_relative_path(path)
    if GATEWAY_DIR in path.split("/"):
        msg = f"{path!r} is the gateway's own, not a plain name"
        raise RefusedError(msg, subject=path)


def read_local(path: str) -> bytes:
    """The bytes of a local file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as exc:
        msg = f"cannot read {path!r}: it is not there"
        raise MissingError(msg, subject=path) from exc


def compare(key: str, data: bytes, source: DigestedFile) -> None:
    """Refuse bytes that are not those of *source*."""
    for index, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        found = blake3.blake3(data[start : start + CHUNK_BYTES]).digest()
        wanted = source.chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if source.chunks and found != wanted:
            msg = f"chunk {index} of {key!r} differs in the store"
            raise IntegrityError(msg, subject=key)
    if blake3.blake3(data).hexdigest() != source.digest:
        msg = f"{key!r} differs in the store"
        raise IntegrityError(msg, subject=key)
