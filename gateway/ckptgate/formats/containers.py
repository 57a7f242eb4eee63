"""Which container a file is, and whether it proves itself.

Owns the rule what counts as proof that a file was written to its end: its structure accounts for
the file's size exactly. Content decides, the name is a hint: a name that promises a container (not
`.pt` and its like, which hold anybody's bytes) and does not hold one is a problem; a name that
promises nothing never is. Contents of tensors are not
looked at. Hostile bytes give a problem text, never an exception. No state; any thread.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import IntegrityError
from ckptgate.formats import pickles
from ckptgate.formats.base import FileView, damaged, read_exact
from ckptgate.formats.safetensors import check_safetensors, looks_like_safetensors
from ckptgate.formats.torch_zip import ZIP_MAGICS, check_zip

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_PICKLE_OPCODES",
    "Container",
    "check_container",
    "claimed_container",
]

MAX_JSON_BYTES: Final = 64 * 1024 * 1024
"""Larger JSON is not parsed and so not proved."""
MAX_NPY_HEADER_BYTES: Final = 1024 * 1024
"""A larger npy header is refused."""
MAX_PICKLE_OPCODES: Final = 8_000_000
"""A pickle of more opcodes is not followed to its end and so not proved."""

_LEGACY_MAGIC: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_NPY_MAGIC: Final = b"\x93NUMPY"
_PICKLE_START = re.compile(rb"\x80[\x02-\x05]")
_NPY_TYPE = re.compile(r"'descr':\s*'[<>|=]?([a-zA-Z])(\d*)(?:\[\w+\])?'")
_NPY_SHAPE = re.compile(r"'shape':\s*\(([\d,\s]*)\)")

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin")
_CLAIMS: Final = (
    *((suffix, "torch-zip") for suffix in _TORCH_SUFFIXES),
    (".safetensors", "safetensors"),
    (".npz", "npz"),
    (".npy", "npy"),
    (".json", "json"),
    (".pkl", "pickle"),
    (".pickle", "pickle"),
)
# What a name of the claim may hold and still be what its readers take.
_ACCEPTED: Final = {
    "torch-zip": frozenset({"torch-zip", "torch-legacy", "pickle", "safetensors", "npz", "npy"}),
    "safetensors": frozenset({"safetensors"}),
    "npz": frozenset({"npz"}),
    "npy": frozenset({"npy"}),
    "json": frozenset({"json"}),
    "pickle": frozenset({"pickle", "torch-zip", "torch-legacy"}),
}


@dataclass(frozen=True, slots=True)
class Container:
    """What a file is.

    Attributes:
        kind: `torch-zip`, `torch-legacy`, `npz`, `zip`, `safetensors`, `npy`, `json`, `pickle`, or
            "" where neither name nor content says one.
        is_valid: the structure accounts for the whole file; False where there is none.
        problem: what contradicts the kind, and where; "" where nothing does.
    """

    kind: str = ""
    is_valid: bool = False
    problem: str = ""


def check_container(path: str, view: FileView) -> Container:
    """Say what the file *path* is. An empty file is nothing, which is no problem.

    Only errors of *view* itself (its I/O) are raised.
    """
    if view.size == 0:
        return Container()
    claim = claimed_container(path)
    kind = _kind(claim, view)
    if not kind:
        return _nothing(path, claim)
    try:
        found, is_proved = _prove(kind, view)
    except IntegrityError as exc:
        # What only looks like a container (a shard that starts with a zip) is not damaged. Where
        # any bytes may be, one file in 16,000 begins as a pickle does, with two bytes.
        is_chance = kind == "pickle" and claim == "torch-zip"
        return Container(claim, False, str(exc)) if claim and not is_chance else Container()
    if claim and found not in _ACCEPTED[claim]:
        return Container(claim, False, f"named as {claim}, its bytes are {found}")
    return Container(found, is_proved, "")


def claimed_container(path: str) -> str:
    """The container that a file's name promises, "" for none: what `check_container` goes by."""
    name = path.rpartition("/")[2].lower()
    return next((kind for suffix, kind in _CLAIMS if name.endswith(suffix)), "")


def _nothing(path: str, claim: str) -> Container:
    # Any program's own bytes have such names, too: only what begins as a container claims to be
    # one.
    if not claim or path.lower().endswith(_TORCH_SUFFIXES):
        return Container()
    return Container(claim, False, f"named as {claim}, byte 0 starts no such thing")


def _kind(claim: str, view: FileView) -> str:
    """What the first bytes say, "" for nothing known."""
    start = view.read(0, len(_LEGACY_MAGIC))
    if start.startswith(ZIP_MAGICS):
        return "zip"
    if start.startswith(_NPY_MAGIC):
        return "npy"
    if start == _LEGACY_MAGIC:
        return "torch-legacy"
    if claim == "json":
        return "json"
    # Protocols 0 and 1 have no magic: only the name tells.
    if _PICKLE_START.match(start) or claim == "pickle":
        return "pickle"
    if claim == "safetensors" or looks_like_safetensors(view):
        return "safetensors"
    return ""


def _prove(kind: str, view: FileView) -> tuple[str, bool]:
    """The kind in full and whether it is proved. Raises IntegrityError."""
    if kind == "zip":
        zipped = check_zip(view)
        return ("torch-zip" if zipped.has_data_pkl else "npz" if zipped.is_all_npy else "zip"), True
    if kind == "safetensors":
        check_safetensors(view)
    elif kind == "json":
        _check_json(view)
    elif kind == "pickle":
        _check_pickle(view, 0)
    elif kind == "npy":
        return kind, _check_npy(view)
    # The old torch format is pickles followed by raw storages whose sizes only the pickles know.
    return kind, kind != "torch-legacy"


def _check_json(view: FileView) -> None:
    if view.size > MAX_JSON_BYTES:
        msg = f"json has {view.size} bytes, limit {MAX_JSON_BYTES}"
        raise damaged(msg)
    data = read_exact(view, 0, view.size, "json")
    try:
        # NaN is legal here: trainers write it. Numbers and objects are dropped as they come.
        json.loads(data, object_pairs_hook=_none, parse_int=_none, parse_float=_none)
    except (ValueError, RecursionError) as exc:
        msg = f"not json: {exc}"
        raise damaged(msg) from exc


def _none(_: object) -> None:
    """Nothing is kept of a parsed value."""


def _check_pickle(view: FileView, offset: int) -> None:
    end = pickles.scan(view, offset, max_opcodes=MAX_PICKLE_OPCODES).end
    if end != view.size:
        msg = f"pickle ends at byte {end}, the file at {view.size}"
        raise damaged(msg)


def _check_npy(view: FileView) -> bool:
    """Whether the array's size is the file's; False where the element type isn't a plain one."""
    major = read_exact(view, 0, 8, "npy magic")[6]
    width = 2 if major == 1 else 4
    if not 1 <= major <= 3:
        msg = f"npy has version {major} at byte 6"
        raise damaged(msg)
    length = int.from_bytes(read_exact(view, 8, width, "npy header length"), "little")
    if length > MAX_NPY_HEADER_BYTES:
        msg = f"npy header has {length} bytes, limit {MAX_NPY_HEADER_BYTES}"
        raise damaged(msg)
    start = 8 + width + length
    header = read_exact(view, 8 + width, length, "npy header").decode("utf-8", "replace")
    shape, element = _NPY_SHAPE.search(header), _NPY_TYPE.search(header)
    if shape is None or not header.startswith("{") or not header.endswith("\n"):
        msg = f"npy header at byte {8 + width} is damaged"
        raise damaged(msg)
    if element is None:
        return False
    if element[1] == "O":
        _check_pickle(view, start)
        return True
    _check_npy_size(view.size, start, shape[1], element)
    return True


def _check_npy_size(size: int, start: int, shape: str, element: re.Match[str]) -> None:
    numbers = [text.strip() for text in shape.split(",") if text.strip()]
    if len(numbers) > 64 or any(not n.isdecimal() or len(n) > 20 for n in numbers):
        msg = "npy header has no possible shape"
        raise damaged(msg)
    bytes_each = int(element[2][:10] or "0") * (4 if element[1] == "U" else 1)
    need = start + math.prod(map(int, numbers)) * bytes_each
    if need != size:
        msg = f"npy of shape ({shape[:40]}) takes {need} bytes, the file has {size}"
        raise damaged(msg)
