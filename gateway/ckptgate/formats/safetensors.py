"""Structure of safetensors files.

Owns the rule when one proves itself: the header is JSON of a bounded length, and the tensors'
`data_offsets` tile the rest of the file exactly. Contents have no checksum. No state; any thread.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from ckptgate.formats.base import FileView, damaged, read_exact

__all__ = ["MAX_HEADER_BYTES", "check_safetensors", "looks_like_safetensors"]

MAX_HEADER_BYTES: Final = 32 * 1024 * 1024
"""A larger header is refused (about 250,000 tensors; the format itself allows 100 MB)."""

_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element; an unknown type is checked by its offsets alone."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def looks_like_safetensors(view: FileView) -> bool:
    """Whether the first bytes are a plausible header length and the start of a JSON object."""
    if view.size < 10:
        return False
    start = view.read(0, 9)
    length = int.from_bytes(start[:8], "little")
    return 2 <= length <= view.size - 8 and start[8:9] == b"{"


def check_safetensors(view: FileView) -> int:
    """How many tensors the file has.

    Raises:
        IntegrityError: it does not prove itself; says what and where.
    """
    length = int.from_bytes(read_exact(view, 0, 8, "safetensors header length"), "little")
    if length > view.size - 8:
        msg = f"safetensors header claims {length} bytes, the file has {view.size}"
        raise damaged(msg)
    if length > MAX_HEADER_BYTES:
        msg = f"safetensors header has {length} bytes, limit {MAX_HEADER_BYTES}"
        raise damaged(msg)
    spans = _spans(read_exact(view, 8, length, "safetensors header"))
    _check_tiling(spans, view.size - 8 - length)
    return len(spans)


def _spans(header: bytes) -> list[tuple[int, int]]:
    """Every tensor's first byte and end, relative to the data."""
    if header[:1] != b"{":
        msg = "safetensors header at byte 8 is not a JSON object"
        raise damaged(msg)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        meta = raw.pop("__metadata__", None)
        if meta is not None:
            msgspec.json.decode(meta, type=dict[str, str] | None)
        return [_span(name, value) for name, value in raw.items()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"safetensors header at byte 8 is not what it must be: {exc}"
        raise damaged(msg) from exc


def _span(name: str, value: msgspec.Raw) -> tuple[int, int]:
    tensor = msgspec.json.decode(value, type=_Tensor)
    begin, end = tensor.data_offsets
    bits = _BITS.get(tensor.dtype)
    is_sound = 0 <= begin <= end and all(n >= 0 for n in tensor.shape) and len(tensor.shape) <= 64
    if is_sound and bits is not None:
        is_sound = math.prod(tensor.shape) * bits == (end - begin) * 8
    if not is_sound:
        msg = (
            f"safetensors tensor {name[:80]!r}: offsets {begin} to {end} contradict "
            f"its shape or type {tensor.dtype[:20]!r}"
        )
        raise damaged(msg)
    return begin, end


def _check_tiling(spans: list[tuple[int, int]], size: int) -> None:
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            what = "overlap" if begin < at else "leave a gap"
            msg = f"safetensors tensors {what} at byte {min(begin, at)} of the data"
            raise damaged(msg)
        at = end
    if at != size:
        msg = f"safetensors tensors take {at} bytes, the file has {size} for them"
        raise damaged(msg)
