"""The table of operations: who serves an opcode, which wait for the disk, which only look.

What is not in it is answered ENOSYS, which tells the kernel not to ask again: ACCESS (the kernel
checks modes itself), POLL, BMAP, STATX, and locks, which stay in the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ckptgate_adapters.fuse import data, ops_attr, ops_files, ops_names, ops_session
from ckptgate_adapters.fuse.request import Operation
from ckptgate_adapters.fuse.wire import Opcode

__all__ = ["LOOKS", "OPERATIONS", "SLOW"]

OPERATIONS: Final[Mapping[int, Operation]] = MappingProxyType({
    Opcode.LOOKUP: ops_names.lookup,
    Opcode.FORGET: ops_names.forget,
    Opcode.BATCH_FORGET: ops_names.batch_forget,
    Opcode.READLINK: ops_names.readlink,
    Opcode.SYMLINK: ops_names.symlink,
    Opcode.MKNOD: ops_names.mknod,
    Opcode.MKDIR: ops_names.mkdir,
    Opcode.UNLINK: ops_names.unlink,
    Opcode.RMDIR: ops_names.rmdir,
    Opcode.RENAME: ops_names.rename,
    Opcode.RENAME2: ops_names.rename2,
    Opcode.LINK: ops_names.link,
    Opcode.GETATTR: ops_attr.getattr_,
    Opcode.SETATTR: ops_attr.setattr_,
    Opcode.STATFS: ops_attr.statfs,
    Opcode.GETXATTR: ops_attr.getxattr,
    Opcode.SETXATTR: ops_attr.setxattr,
    Opcode.LISTXATTR: ops_attr.listxattr,
    Opcode.REMOVEXATTR: ops_attr.removexattr,
    Opcode.OPEN: ops_files.open_,
    Opcode.CREATE: ops_files.create,
    Opcode.RELEASE: ops_files.release,
    Opcode.FLUSH: ops_files.flush,
    Opcode.FSYNC: ops_files.fsync,
    Opcode.FSYNCDIR: ops_files.fsyncdir,
    Opcode.SYNCFS: ops_files.syncfs,
    Opcode.TMPFILE: ops_files.tmpfile,
    Opcode.OPENDIR: ops_files.opendir,
    Opcode.READDIR: ops_files.readdir,
    Opcode.READDIRPLUS: ops_files.readdirplus,
    Opcode.RELEASEDIR: ops_files.releasedir,
    Opcode.READ: data.read,
    Opcode.WRITE: data.write,
    Opcode.LSEEK: data.lseek,
    Opcode.FALLOCATE: data.fallocate,
    Opcode.COPY_FILE_RANGE: data.copy_file_range,
    Opcode.COPY_FILE_RANGE_64: data.copy_file_range_64,
    Opcode.INIT: ops_session.init,
    Opcode.DESTROY: ops_session.destroy,
    Opcode.IOCTL: ops_session.ioctl,
})  # fmt: skip

SLOW: Final = frozenset({
    Opcode.FSYNC,
    Opcode.FSYNCDIR,
    Opcode.FALLOCATE,
    Opcode.COPY_FILE_RANGE,
    Opcode.COPY_FILE_RANGE_64,
})  # fmt: skip
"""These wait for the disk: they go to the pool at once."""

LOOKS: Final = frozenset({
    Opcode.LOOKUP,
    Opcode.GETATTR,
    Opcode.READLINK,
    Opcode.STATFS,
    Opcode.GETXATTR,
    Opcode.LISTXATTR,
    Opcode.OPENDIR,
    Opcode.READDIR,
    Opcode.READDIRPLUS,
    Opcode.RELEASEDIR,
    Opcode.READ,
    Opcode.LSEEK,
    Opcode.IOCTL,
})  # fmt: skip
"""These change nothing, so they needn't wait for whoever is changing the spool."""
