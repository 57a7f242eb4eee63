"""Structure of zip archives as torch.save and numpy.savez write them.

Owns the rule when an archive proves itself: its end of central directory is the file's last bytes,
the directory ends right before it, every record lies inside the file, in order, without overlap,
and has a local header that agrees; small ones (torch's pickle, numbers, short tensors) have the
CRC-32 that the directory names. Large data are not read here: a CRC-32 of all bytes costs as much
as their digest, which is taken anyway. Nothing is inflated. No state; any thread.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptgate.formats.base import FileView, damaged, read_exact

__all__ = [
    "CRC_BYTES",
    "CRC_RECORD_BYTES",
    "MAX_DIRECTORY_BYTES",
    "MAX_RECORDS",
    "ZIP_MAGICS",
    "ZipSummary",
    "check_zip",
    "read_stored",
]

MAX_DIRECTORY_BYTES: Final = 64 * 1024 * 1024
"""A larger central directory is refused (torch needs about 100 bytes for a tensor)."""
MAX_RECORDS: Final = 1_000_000
"""More records are refused."""
CRC_RECORD_BYTES: Final = 1024 * 1024
"""Records up to this size are compared with their CRC-32,"""
CRC_BYTES: Final = 4 * 1024 * 1024
"""as far as this goes; each counts for 16 KiB at least, as reading it takes its time."""
ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
"""How an archive starts: a record, or (empty archive) the end of the directory."""

_CRC_SHARE: Final = 16 * 1024
_PADDING: Final = 128
"""More than torch puts before a record's bytes to align them."""
# Deflate cannot shrink better than this, so a record that claims more is a bomb or damaged.
_MAX_RATIO: Final = 1032
_STORED, _DEFLATED = 0, 8
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipSummary:
    """What an archive that proved itself holds.

    Attributes:
        records: how many.
        has_data_pkl: a record `<stem>/data.pkl`, torch's pickled object.
        is_all_npy: there are records and all are named `*.npy`.
    """

    records: int
    has_data_pkl: bool
    is_all_npy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Directory:
    start: int
    size: int
    records: int


class _Record(NamedTuple):
    """One of the directory's; there are thousands, and a tuple is made in no time."""

    name: bytes
    start: int
    stored: int
    size: int
    method: int
    crc: int


def check_zip(view: FileView) -> ZipSummary:
    """What the archive holds.

    Raises:
        IntegrityError: it does not prove itself; says what and where.
    """
    directory = _find_directory(view)
    raw = read_exact(view, directory.start, directory.size, "zip central directory")
    floor, unread = 0, CRC_BYTES
    has_data_pkl, is_all_npy = False, directory.records > 0
    for record in _records(raw, directory):
        # With a small record's header its bytes are read, too.
        is_small = record.size <= min(unread, CRC_RECORD_BYTES) and record.method == _STORED
        more = record.stored + _PADDING if is_small else 0
        end, head = _check_record(view, record, floor, directory.start, more)
        if is_small:
            _check_crc(view, record, end, head)
            unread -= max(record.size, _CRC_SHARE)
        floor = end
        has_data_pkl = has_data_pkl or record.name.endswith(b"/data.pkl")
        is_all_npy = is_all_npy and record.name.endswith(b".npy")
    return ZipSummary(records=directory.records, has_data_pkl=has_data_pkl, is_all_npy=is_all_npy)


def read_stored(view: FileView, suffix: str, limit: int) -> bytes:
    """The bytes of the first record whose name ends with *suffix*, which is not compressed.

    Only the directory and that record are read.

    Raises:
        IntegrityError: there is none, it has more than *limit* bytes, or the archive is damaged.
    """
    directory = _find_directory(view)
    raw = read_exact(view, directory.start, directory.size, "zip central directory")
    ending = suffix.encode()
    for record in _records(raw, directory):
        if record.name.endswith(ending):
            if record.method != _STORED or record.size > limit:
                msg = f"zip record {suffix!r}: {record.size} bytes by method {record.method}"
                raise damaged(msg)
            end, _ = _check_record(view, record, 0, directory.start)
            return read_exact(view, end - record.stored, record.size, f"zip record {suffix!r}")
    msg = f"zip has no record {suffix!r}"
    raise damaged(msg)


def _find_directory(view: FileView) -> _Directory:
    """Where the tail says the central directory is, checked against the file's size."""
    at = view.size - _END.size
    if at < 0:
        msg = f"zip of {view.size} bytes is too short for an end record"
        raise damaged(msg)
    magic, disk, start_disk, here, total, size, start, comment = _END.unpack(
        read_exact(view, at, _END.size, "zip end record")
    )
    if magic != b"PK\x05\x06" or comment:
        msg = f"zip has no end record in its last {_END.size} bytes (cut off?)"
        raise damaged(msg)
    if disk or start_disk or here != total:
        msg = f"zip end record at byte {at} speaks of several disks"
        raise damaged(msg)
    end = at
    # The 64 bit record counts wherever its locator is: torch always writes both.
    if at >= _LOCATOR.size + _END64.size:
        locator = read_exact(view, at - _LOCATOR.size, _LOCATOR.size, "zip64 locator")
        if locator[:4] == b"PK\x06\x07":
            start, size, total, end = _end64(view, at - _LOCATOR.size, locator)
    elif _U32 in {size, start} or total == _U16:
        msg = f"zip end record at byte {at} needs a 64 bit record, there is none"
        raise damaged(msg)
    return _checked(_Directory(start=start, size=size, records=total), end)


def _end64(view: FileView, before: int, locator: bytes) -> tuple[int, int, int, int]:
    """Start, size, records, and the place right after the directory, from the 64 bit record."""
    _, disk, at, disks = _LOCATOR.unpack(locator)
    if disk or disks != 1 or at + _END64.size != before:
        msg = f"zip64 end record is said to be at byte {at}, not right before byte {before}"
        raise damaged(msg)
    raw = read_exact(view, at, _END64.size, "zip64 end record")
    magic, length, _, _, disk, start_disk, here, total, size, start = _END64.unpack(raw)
    if magic != b"PK\x06\x06" or length != _END64.size - 12:
        msg = f"zip64 end record at byte {at} is damaged"
        raise damaged(msg)
    if disk or start_disk or here != total:
        msg = f"zip64 end record at byte {at} speaks of several disks"
        raise damaged(msg)
    return start, size, total, at


def _checked(directory: _Directory, end: int) -> _Directory:
    if directory.start + directory.size != end:
        msg = (
            f"zip central directory of {directory.size} bytes at byte {directory.start} "
            f"does not end at byte {end}"
        )
        raise damaged(msg)
    if directory.size > MAX_DIRECTORY_BYTES:
        msg = f"zip central directory has {directory.size} bytes, limit {MAX_DIRECTORY_BYTES}"
        raise damaged(msg)
    if directory.records > MAX_RECORDS:
        msg = f"zip claims {directory.records} records, limit {MAX_RECORDS}"
        raise damaged(msg)
    if directory.records * _CENTRAL.size > directory.size:
        msg = f"zip claims {directory.records} records in a directory of {directory.size} bytes"
        raise damaged(msg)
    return directory


def _records(raw: bytes, directory: _Directory) -> Iterator[_Record]:
    """The directory's records; together they fill it exactly."""
    at = 0
    for number in range(directory.records):
        if at + _CENTRAL.size > len(raw):
            msg = f"{_entry(directory, number, at)} is cut off"
            raise damaged(msg)
        fields = _CENTRAL.unpack_from(raw, at)
        magic, _, _, _, method, _, _, crc, stored, size, name_len, extra_len, note_len = fields[:13]
        disk, start = fields[13], fields[16]
        name_at = at + _CENTRAL.size
        after = name_at + name_len + extra_len + note_len
        if magic != b"PK\x01\x02" or after > len(raw):
            msg = f"{_entry(directory, number, at)} is damaged"
            raise damaged(msg)
        if _U32 in (size, stored, start):
            extra = raw[name_at + name_len : name_at + name_len + extra_len]
            wide = _wide(extra, (size, stored, start))
            if wide is None:
                msg = f"{_entry(directory, number, at)} lacks its 64 bit sizes"
                raise damaged(msg)
            size, stored, start = wide
        if disk not in {0, _U16}:
            msg = f"{_entry(directory, number, at)} is on another disk"
            raise damaged(msg)
        name = raw[name_at : name_at + name_len]
        yield _Record(name, start, stored, size, method, crc)
        at = after
    if at != len(raw):
        msg = f"zip central directory has {len(raw) - at} bytes after its last record"
        raise damaged(msg)


def _entry(directory: _Directory, number: int, at: int) -> str:
    return f"zip directory record {number} at byte {directory.start + at}"


def _wide(extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """Size, stored size and start, each taken from the zip64 extra where it does not fit.

    None where the extra lacks them.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            size, stored, start = (next(wide, -1) if v == _U32 else v for v in values)
            return None if min(size, stored, start) < 0 else (size, stored, start)
        at += 4 + length
    return None


def _check_record(
    view: FileView, record: _Record, floor: int, ceiling: int, more: int = 0
) -> tuple[int, bytes]:
    """The first byte after *record*, which lies between *floor* and *ceiling*.

    Returns:
        That, and the record's first bytes: its header, and up to *more*.
    """
    if record.start < floor:
        msg = f"{_where(record)} overlaps the one before it, which ends at byte {floor}"
        raise damaged(msg)
    if record.method == _STORED and record.stored != record.size:
        msg = f"{_where(record)} is not compressed, yet {record.size} bytes take {record.stored}"
        raise damaged(msg)
    if record.method == _DEFLATED and record.size > record.stored * _MAX_RATIO + 64:
        msg = f"{_where(record)} claims {record.size} bytes from {record.stored}: not possible"
        raise damaged(msg)
    length = _LOCAL.size + len(record.name)
    head = view.read(record.start, length + more)
    if len(head) < length:
        msg = f"{_where(record)} has no header there"
        raise damaged(msg)
    fields = _LOCAL.unpack_from(head)
    if fields[0] != b"PK\x03\x04" or head[_LOCAL.size : length] != record.name:
        msg = f"{_where(record)} has no header of that name there"
        raise damaged(msg)
    if fields[3] != record.method or fields[9] != len(record.name):
        msg = f"{_where(record)}: header and directory contradict each other"
        raise damaged(msg)
    extra_len: int = fields[10]
    end = record.start + length + extra_len + record.stored
    if end > ceiling:
        msg = f"{_where(record)} ends at byte {end}, after the last possible one {ceiling}"
        raise damaged(msg)
    return end, head


def _check_crc(view: FileView, record: _Record, end: int, head: bytes) -> None:
    """Compare a record's bytes, before *end*, with its CRC-32; 0 says that none was computed."""
    if not record.crc:
        return
    at = end - record.stored - record.start
    data = memoryview(head)[at : at + record.size]
    if len(data) < record.size:
        data = memoryview(read_exact(view, end - record.stored, record.size, "zip record"))
    found = zlib.crc32(data)
    if found != record.crc:
        msg = f"{_where(record)} has the CRC-32 {found:08x}, the directory says {record.crc:08x}"
        raise damaged(msg)


def _where(record: _Record) -> str:
    return f"zip record {record.name[:80].decode('utf-8', 'replace')!r} at byte {record.start}"
