"""A zip's records are compared with their CRC-32 as far as that costs next to nothing."""

from __future__ import annotations

import io
import zipfile

import pytest

from ckptgate.formats import torch_zip
from ckptgate.formats.base import BytesView
from ckptgate.formats.containers import Container, check_container


def check(data: bytes) -> Container:
    return check_container("a.pt", BytesView(data))


def plain_zip(names: list[str], body: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            archive.writestr(name, body)
    return out.getvalue()


def test_a_byte_changed_in_a_small_record_is_found_by_its_crc() -> None:
    good = plain_zip(["s/data.pkl", "s/data/0"], body=b"weights")
    for at in (good.index(b"weights"), good.rindex(b"weights") + 6):
        bad = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        found = check(bad)
        assert not found.is_valid
        assert "CRC-32" in found.problem
        assert "'s/data" in found.problem


def test_a_record_without_a_crc_proves_itself_by_its_place() -> None:
    """torch writes 0 there where `compute_crc32` is off, which its own reader never minds."""
    good = bytearray(plain_zip(["s/data.pkl"], body=b"weights"))
    directory = good.index(b"PK\x01\x02")
    good[14:18] = good[directory + 16 : directory + 20] = bytes(4)
    assert check(bytes(good)) == Container("torch-zip", True, "")


@pytest.mark.torch
@pytest.mark.parametrize("compute", [True, False])
def test_torch_files_with_and_without_crcs_are_valid(compute: bool) -> None:
    torch = pytest.importorskip("torch")
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(compute)
        out = io.BytesIO()
        torch.save({"w": torch.arange(6.0), "step": 3}, out)
        assert check(out.getvalue()) == Container("torch-zip", True, "")
    finally:
        torch.serialization.set_crc32_options(before)


class _Counting:
    """A file that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.was_read = data, len(data), 0

    def read(self, offset: int, length: int) -> bytes:
        self.was_read += length
        return self.data[offset : offset + length]


def test_of_large_records_nothing_is_read_and_of_many_small_ones_a_part() -> None:
    large = _Counting(plain_zip(["s/data.pkl", "s/data/0"], body=bytes(3 << 20)))
    assert check_container("a.pt", large).is_valid
    assert large.was_read < 64 * 1024
    names = [f"s/data/{n}" for n in range(40)]
    many = _Counting(plain_zip(["s/data.pkl", *names], body=bytes(512 * 1024)))
    assert check_container("a.pt", many).is_valid
    assert many.was_read < torch_zip.CRC_BYTES + 64 * 1024
