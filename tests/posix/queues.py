"""Asynchronous I/O without a library: Linux AIO and io_uring by their system calls."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct

from tests.posix.kernel import syscall

_AIO = {"x86_64": (206, 208, 209, 207), "aarch64": (0, 4, 2, 1)}
AIO_PREAD, AIO_PWRITE, AIO_FSYNC, AIO_FDSYNC = 0, 1, 2, 3

NOP, READV, WRITEV, FSYNC = 0, 1, 2, 3
FALLOCATE, OPENAT, CLOSE, READ, WRITE = 17, 18, 19, 22, 23
RENAMEAT, UNLINKAT, MKDIRAT, SYMLINKAT, LINKAT = 35, 36, 37, 38, 39


def aligned(size: int) -> mmap.mmap:
    """A buffer on a page boundary."""
    return mmap.mmap(-1, size)


def address(buffer: mmap.mmap | bytearray) -> int:
    """Where it is in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Aio:
    """A context of io_setup(2)."""

    def __init__(self, depth: int = 16) -> None:
        setup, self._getevents, self._submit, self._destroy = _AIO[os.uname().machine]
        self._context = ctypes.c_ulong(0)
        syscall(setup, ctypes.c_uint(depth), ctypes.byref(self._context))

    def run(self, jobs: list[tuple[int, int, int, int, int]]) -> list[int]:
        """Do (opcode, fd, address, length, offset) all at once; results in their order."""
        blocks = [
            ctypes.create_string_buffer(
                struct.pack("<QIIHhIQQqQII", number, 0, 0, op, 0, fd, at, size, offset, 0, 0, 0), 64
            )
            for number, (op, fd, at, size, offset) in enumerate(jobs)
        ]
        pointers = (ctypes.c_void_p * len(blocks))(*map(ctypes.addressof, blocks))
        count = syscall(self._submit, self._context, ctypes.c_long(len(blocks)), pointers)
        events = ctypes.create_string_buffer(32 * count)
        syscall(
            self._getevents, self._context, ctypes.c_long(count), ctypes.c_long(count), events, None
        )
        found = {data: result for data, _, result, _ in struct.iter_unpack("<QQqq", events.raw)}
        return [found[number] for number in range(count)]

    def close(self) -> None:
        """End."""
        syscall(self._destroy, self._context)


class Ring:
    """An io_uring whose queues are in memory of this process."""

    def __init__(self, entries: int = 8) -> None:
        params = ctypes.create_string_buffer(120)
        self.fd = syscall(425, ctypes.c_uint(entries), params)
        fields = struct.unpack_from("<IIIIIII", params.raw)
        self._sq_entries, cq_entries = fields[0], fields[1]
        sq = struct.unpack_from("<IIIIIII", params.raw, 40)
        cq = struct.unpack_from("<IIIIIII", params.raw, 80)
        self._sq, self._cq = sq, cq
        self._sq_map = mmap.mmap(self.fd, sq[6] + 4 * self._sq_entries, offset=0)
        self._cq_map = mmap.mmap(self.fd, cq[5] + 16 * cq_entries, offset=0x8000000)
        self._sqes = mmap.mmap(self.fd, 64 * self._sq_entries, offset=0x10000000)

    def run(
        self, op: int, fd: int, at: int, size: int, offset: int, *, flags: int = 0
    ) -> int | str:
        """One operation; its result, or the errno's name."""
        head, tail, mask, _, _, _, array = self._sq
        (position,) = struct.unpack_from("<I", self._sq_map, tail)
        (ring_mask,) = struct.unpack_from("<I", self._sq_map, mask)
        slot = position & ring_mask
        entry = struct.pack("<BBHiQQIIQ24x", op, 0, 0, fd, offset, at, size, flags, 1)
        self._sqes[64 * slot : 64 * slot + 64] = entry
        struct.pack_into("<I", self._sq_map, array + 4 * slot, slot)
        struct.pack_into("<I", self._sq_map, tail, position + 1)
        syscall(426, self.fd, ctypes.c_uint(1), ctypes.c_uint(1), ctypes.c_uint(1), None, 0)
        head, _, mask, _, _, cqes = self._cq[:6]
        (position,) = struct.unpack_from("<I", self._cq_map, head)
        (ring_mask,) = struct.unpack_from("<I", self._cq_map, mask)
        at_entry = cqes + 16 * (position & ring_mask)
        (result,) = struct.unpack_from("<i", self._cq_map, at_entry + 8)
        struct.pack_into("<I", self._cq_map, head, position + 1)
        return errno.errorcode[-result] if result < 0 else int(result)

    def close(self) -> None:
        """End."""
        for item in (self._sqes, self._cq_map, self._sq_map):
            item.close()
        os.close(self.fd)
