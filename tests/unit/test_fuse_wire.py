"""The layouts of the FUSE protocol, against sizes and bytes of the kernel's header."""

from __future__ import annotations

import errno
import struct

import pytest

from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Attr, Entry, FsStats
from ckptgate_adapters.fuse import wire

SIZES = {
    "IN_HEADER": 40,
    "OUT_HEADER": 16,
    "ATTR": 88,
    "ENTRY": 40,
    "ATTR_OUT": 104,
    "ENTRY_OUT": 128,
    "IN_HEADER_USED": 40,
    "IO_AFTER_HEADER": 64,
    "WRITE_REPLY": 24,
    "OPEN_OUT": 16,
    "OPEN_IN": 8,
    "CREATE_IN": 16,
    "MKNOD_IN": 16,
    "MKDIR_IN": 8,
    "RENAME_IN": 8,
    "RENAME2_IN": 16,
    "GETATTR_IN": 16,
    "SETATTR_IN": 88,
    "READ_IN": 40,
    "WRITE_IN": 40,
    "WRITE_OUT": 8,
    "RELEASE_IN": 24,
    "FLUSH_IN": 24,
    "FSYNC_IN": 16,
    "FALLOCATE_IN": 32,
    "LSEEK_IN": 24,
    "LSEEK_OUT": 8,
    "COPY_IN": 56,
    "GETXATTR_IN": 8,
    "SETXATTR_IN": 8,
    "FORGET_IN": 8,
    "FORGET_ONE": 16,
    "BATCH_FORGET_IN": 8,
    "INTERRUPT_IN": 8,
    "DIRENT": 24,
    "STATFS_OUT": 80,
    "INIT_OUT": 64,
    "INVAL_INODE": 24,
    "INVAL_ENTRY": 16,
    "BACKING_MAP": 16,
}

ATTR = Attr(
    7, NodeKind.FILE, 0o644, 1, 10, 20, 1000, 8, 1_000_000_001, 2_000_000_002, 3_000_000_003, 1.5
)


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_every_struct_has_the_size_of_the_header(name: str, size: int) -> None:
    assert getattr(wire, name).size == size


def test_an_attribute_reply_has_these_bytes() -> None:
    expected = struct.pack("<QII", 1, 500_000_000, 0)
    expected += struct.pack("<6Q", 7, 1000, 8, 1, 2, 3)
    expected += struct.pack("<10I", 1, 2, 3, 0o100644, 1, 10, 20, 0, 4096, 0)
    assert wire.attr_out(ATTR) == expected


def test_an_entry_reply_carries_both_timeouts() -> None:
    raw = wire.entry_out(Entry(ATTR, 0.0))
    assert len(raw) == 128
    assert wire.ENTRY.unpack_from(raw) == (7, 0, 0, 1, 0, 500_000_000)


def test_directory_records_are_padded_to_eight_bytes() -> None:
    assert wire.dirent(7, 3, b"abc", NodeKind.DIR) == struct.pack("<QQII", 7, 3, 3, 4) + b"abc" + (
        bytes(5)
    )
    assert len(wire.dirent(7, 3, b"12345678", NodeKind.SYMLINK)) == 32


def test_an_error_reply_carries_the_negated_errno() -> None:
    assert wire.error_reply(5, errno.ENOENT) == bytes.fromhex("10000000feffffff0500000000000000")


def test_a_notification_has_no_request_and_its_code_as_error() -> None:
    message = wire.notification(wire.Notify.RESEND)
    assert message == bytes.fromhex("10000000070000000000000000000000")


def test_ioctl_numbers_are_those_of_the_header() -> None:
    def iow(number: int, size: int) -> int:
        return 1 << 30 | size << 16 | 229 << 8 | number

    assert iow(1, wire.BACKING_MAP.size) == wire.IOCTL_BACKING_OPEN
    assert iow(2, wire.BACKING_ID.size) == wire.IOCTL_BACKING_CLOSE


def test_statfs_names_the_longest_name() -> None:
    raw = wire.statfs_out(FsStats(1, 2, 3, 4, 5, 4096, 512))
    assert struct.unpack_from("<5Q3I", raw) == (1, 2, 3, 4, 5, 4096, 255, 512)


def test_names_that_are_not_utf8_are_eilseq() -> None:
    with pytest.raises(OSError, match="not UTF-8") as caught:
        wire.decode_names(b"ok\0\xff\0", 2)
    assert caught.value.errno == errno.EILSEQ
    with pytest.raises(OSError, match="no UTF-8 form") as caught:
        wire.encode_name("\udcff")
    assert caught.value.errno == errno.EILSEQ
    with pytest.raises(OSError, match="1 names, 2 are needed"):
        wire.decode_names(b"one\0", 2)
