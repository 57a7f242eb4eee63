"""What kind of file system a path is on, read from `/proc/self/mountinfo`. Any thread."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["NETWORK_TYPES", "Mount", "mount_of"]

NETWORK_TYPES: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "fuseblk", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "smb2", "smb3", "smbfs", "virtiofs",
    "wekafs",
})  # fmt: skip
"""File systems whose bytes are kept by another machine or program."""

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mounted file system.

    Attributes:
        point: where it is mounted.
        type: its type, such as `ext4` or `nfs4`.
        source: what is mounted: a device, or `server:/export`.
        device: `major:minor`.
    """

    point: str
    type: str
    source: str
    device: str

    @property
    def is_network(self) -> bool:
        """Whether another machine or program keeps the bytes."""
        return self.type in NETWORK_TYPES or self.type.startswith("fuse.")

    @property
    def is_nfs3(self) -> bool:
        """NFS that decides by coarse times, not by a change number, what is new."""
        return self.type == "nfs"

    @property
    def identity(self) -> tuple[str, str, str]:
        """What stays the same when the same thing is mounted again."""
        return (self.point, self.type, self.source)


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """The mount that *path* is on; a type `unknown` where the kernel doesn't say."""
    real = os.path.realpath(path)
    found = Mount(point="/", type="unknown", source="", device="")
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                mount = _parse(line)
                # A later line of the same length is mounted over the earlier one.
                if mount and _is_below(real, mount.point) and len(mount.point) >= len(found.point):
                    found = mount
    except OSError:
        return found
    return found


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _parse(line: str) -> Mount | None:
    left, separator, right = line.rstrip("\n").partition(" - ")
    fields, rest = left.split(" "), right.split(" ")
    if not separator or len(fields) < 5 or len(rest) < 2:
        return None
    return Mount(point=_plain(fields[4]), type=rest[0], source=_plain(rest[1]), device=fields[2])


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), text)
