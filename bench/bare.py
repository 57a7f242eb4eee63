"""What the kernel's protocol costs in Python at least: a daemon that answers from dictionaries.

`python -m bench.bare BACKING MOUNTPOINT`. It keeps nothing, checks nothing and knows no callers; it
has the kernel ask for every directory anew, as a checkpoint's root must be, and write to the files
itself. One thread, and no more Python for a request than unpacking it and packing its reply.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys

from ckptgate_adapters.fuse import channel, wire
from ckptgate_adapters.fuse.session import FuseSession
from ckptgate_adapters.fuse.wire import Opcode, OpenFlag

__all__ = ["Bare"]

_BUFFER_BYTES = (1 << 20) + 4096
_FORGETS = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET})


class Bare:
    """The tree, and the open files."""

    def __init__(self, backing: str, device: int) -> None:
        self._backing = backing
        self._device = device
        self._session = FuseSession(device)
        self._children: dict[tuple[int, bytes], int] = {}
        self._directories = {1}
        self._files: dict[int, tuple[int, int]] = {}
        self._last = 1

    def serve(self) -> None:
        """Until it is unmounted."""
        buffer = bytearray(_BUFFER_BYTES)
        with contextlib.suppress(OSError):
            while True:
                size = os.readv(self._device, [buffer])
                _, opcode, unique, node = wire.IN_HEADER.unpack_from(buffer)[:4]
                if opcode in _FORGETS:
                    continue
                try:
                    number, reply = 0, self._reply(opcode, node, bytes(buffer[40:size]))
                except OSError as exc:
                    number, reply = exc.errno or errno.EIO, b""
                header = wire.OUT_HEADER.pack(16 + len(reply), -number, unique)
                os.writev(self._device, [header, reply])

    def _reply(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == Opcode.LOOKUP:
            return self._entry(self._children.get((node, body[:-1]), 0))
        if opcode == Opcode.CREATE:
            return self._created(node, body[wire.CREATE_IN.size : -1])
        if opcode == Opcode.GETXATTR:
            raise OSError(errno.ENODATA, "none")
        if opcode == Opcode.RELEASE:
            fd, backing_id = self._files.pop(wire.RELEASE_IN.unpack_from(body)[0])
            os.close(fd)
            channel.backing_close(self._device, backing_id)
        elif opcode == Opcode.MKDIR:
            name = body[wire.MKDIR_IN.size : -1]
            made = self._children[node, name] = self._number()
            self._directories.add(made)
            return self._entry(made)
        elif opcode == Opcode.GETATTR:
            return wire.ATTR_OUT.pack(1, 0, 0, *self._attr(node))
        elif opcode == Opcode.INIT:
            return self._session.accept(body, passthrough=True)
        elif opcode != Opcode.FLUSH:
            raise OSError(errno.ENOSYS, "not needed here")
        return b""

    def _number(self) -> int:
        self._last += 1
        return self._last

    def _created(self, node: int, name: bytes) -> bytes:
        made = self._children[node, name] = self._number()
        fd = os.open(f"{self._backing}/{made}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        backing_id = channel.backing_open(self._device, fd)
        self._files[made] = fd, backing_id
        return self._entry(made) + wire.OPEN_OUT.pack(made, OpenFlag.PASSTHROUGH, backing_id)

    def _entry(self, node: int) -> bytes:
        if not node:
            raise OSError(errno.ENOENT, "no such name")
        timeout_s = 0 if node in self._directories else 1
        return wire.ENTRY.pack(node, 0, timeout_s, 1, 0, 0) + wire.ATTR.pack(*self._attr(node))

    def _attr(self, node: int) -> tuple[int, ...]:
        mode = stat.S_IFDIR | 0o755 if node in self._directories else stat.S_IFREG | 0o644
        return node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0


if __name__ == "__main__":
    Bare(sys.argv[1], channel.mount(sys.argv[2])).serve()
