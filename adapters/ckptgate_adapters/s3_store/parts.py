"""How a file is cut into the parts of a multipart upload: all alike, but the last. Pure.

Equal parts because some stores (R2) demand them, and because who reads the object part by part
can tell where each begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import RefusedError

__all__ = [
    "OBJECT_BYTES_MAX",
    "PARTS_MAX",
    "PART_BYTES_MAX",
    "PART_BYTES_MIN",
    "Part",
    "PartPlan",
    "plan_parts",
]

_MIB: Final = 1024 * 1024
PARTS_MAX: Final = 10_000
PART_BYTES_MIN: Final = 5 * _MIB
PART_BYTES_MAX: Final = 5 * 1024 * _MIB
OBJECT_BYTES_MAX: Final = PARTS_MAX * PART_BYTES_MAX
"""48.8 TiB."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its number from 1, where it begins in the file, and its bytes."""

    number: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """The parts of a file.

    Attributes:
        size: of the file, bytes.
        part_bytes: of each part but the last, which may be shorter.
        count: of parts; one for an empty file.
    """

    size: int
    part_bytes: int
    count: int

    def __iter__(self) -> Iterator[Part]:
        for index in range(self.count):
            offset = index * self.part_bytes
            yield Part(index + 1, offset, min(self.part_bytes, self.size - offset))


def plan_parts(size: int, part_bytes: int) -> PartPlan:
    """Parts of *part_bytes*, or of as many whole MiB as make at most 10,000 of them.

    Raises:
        RefusedError: more bytes than an object can have.
    """
    if size > OBJECT_BYTES_MAX:
        msg = f"a file of {size} bytes is larger than an object may be ({OBJECT_BYTES_MAX})"
        raise RefusedError(msg, hint="save it in several files")
    least = -(-size // PARTS_MAX)
    if least > part_bytes:
        part_bytes = min(-(-least // _MIB) * _MIB, PART_BYTES_MAX)
    return PartPlan(size=size, part_bytes=part_bytes, count=max(1, -(-size // part_bytes)))
