"""CRC64NVME: of parts, combined, and as the service writes it."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from ckptgate_adapters.s3_store import checksums


def test_it_is_the_checksum_of_the_catalogue() -> None:
    """CRC-64/NVME's check value, that of `123456789`."""
    assert checksums.crc64(b"123456789") == 0xAE8B14860A799888
    assert checksums.encode(0xAE8B14860A799888) == "rosUhgp5mIg="


@given(st.lists(st.binary(max_size=3000), max_size=8))
def test_combined_checksums_are_those_of_the_joined_bytes(parts: list[bytes]) -> None:
    whole = crc = 0
    for part in parts:
        whole = checksums.combine(whole, checksums.crc64(part), len(part))
        crc = checksums.crc64(memoryview(bytearray(part)), crc)
    assert whole == crc == checksums.crc64(b"".join(parts))


@given(st.binary(min_size=1, max_size=200), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_is_seen(data: bytes, at: int, bit: int) -> None:
    other = bytearray(data)
    other[at % len(data)] ^= 1 << bit
    assert checksums.crc64(other) != checksums.crc64(data)


@given(st.integers(0, 2**64 - 1))
def test_what_was_written_is_read(value: int) -> None:
    assert checksums.decode(checksums.encode(value)) == value


@given(st.text(max_size=20))
def test_anything_else_is_no_checksum(text: str) -> None:
    found = checksums.decode(text)
    assert found is None or len(base64.b64decode(text)) == 8
    assert checksums.decode(f"{checksums.encode(7)}-2") is None
