"""CRC64NVME: the checksum that S3 keeps of a whole object, whatever parts it came in. Pure.

The wire's and the store's checksum, not a digest: what a checkpoint consists of is told by BLAKE3.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from awscrt.checksums import combine_crc64nvme, crc64nvme

__all__ = ["Bytes", "combine", "composite", "crc64", "decode", "encode"]

Bytes: TypeAlias = bytes | bytearray | memoryview

_WIDTH: Final = 8


def crc64(data: Bytes, so_far: int = 0) -> int:
    """The checksum of *data*, or of what had *so_far* with *data* after it."""
    # It takes any contiguous buffer.
    return int(crc64nvme(cast("bytes", data), so_far))


def combine(first: int, second: int, second_size: int) -> int:
    """The checksum of two runs of bytes, one after the other, from those of each."""
    return int(combine_crc64nvme(first, second, second_size))


def encode(value: int) -> str:
    """As a header or an answer of the store has it."""
    return base64.b64encode(value.to_bytes(_WIDTH, "big")).decode()


def decode(text: str) -> int | None:
    """The value of `encode`, None if *text* isn't that of one object's checksum."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    return int.from_bytes(raw, "big") if len(raw) == _WIDTH else None


def composite(parts: Sequence[int]) -> str:
    """The checksum of the parts' checksums, from stores that know no checksum of the whole."""
    joined = b"".join(part.to_bytes(_WIDTH, "big") for part in parts)
    return f"{encode(crc64(joined))}-{len(parts)}"
