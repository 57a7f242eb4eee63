"""The structure of pickles: their opcodes followed to STOP, nothing executed.

Owns the rule when a pickle proves itself: a pickle ends where STOP is, so one that was cut off
never scans. Strings are skipped, memory is one window. Every limit has a name; what breaks one is
an IntegrityError that says what and at which byte. `inert` builds on it. No state; any thread.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Final

from ckptgate.formats.base import FileView, damaged

__all__ = [
    "MAX_LINE_BYTES",
    "MAX_OPCODES",
    "ScannedPickle",
    "scan",
]

MAX_OPCODES: Final = 64_000_000
"""More are refused (a DCP metadata has about 70 for each chunk of a tensor)."""
MAX_LINE_BYTES: Final = 64 * 1024
"""Longest argument that ends with a newline."""

_WINDOW: Final = 1024 * 1024
_REFILL: Final = _WINDOW - 2 * MAX_LINE_BYTES - 16
"""Beyond this place a window is moved, so that an opcode and its lines always lie in one."""
_LINE, _UNKNOWN, _TWO_LINES = -1, -9, -10
_STOP: Final = ord(".")
_GET_LINE: Final = ord("g")


def _argument_sizes() -> list[int]:
    """For each opcode byte its argument: fixed size, -1 a line, -2.. as in pickletools."""
    sizes = [_UNKNOWN] * 256
    for op in pickletools.opcodes:
        sizes[ord(op.code)] = op.arg.n if op.arg is not None else 0
    sizes[ord("i")] = sizes[ord("c")] = _TWO_LINES
    return sizes


_SIZES: Final = _argument_sizes()
# Length of the length, and whether it is signed, of arguments that carry their own length.
_COUNTED: Final = {-2: (1, False), -3: (4, True), -4: (4, False), -5: (8, False)}
_GETS: Final = {ord("h"): 1, ord("j"): 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedPickle:
    """A pickle that was followed to its end.

    Attributes:
        end: the first byte after STOP.
        opcodes: how many.
        fetched: memo indexes that are ever read.
    """

    end: int
    opcodes: int
    fetched: frozenset[int]


class _Window:
    """A view read in pieces; `data[at:]` are the bytes from `base + at` on."""

    __slots__ = ("base", "data", "view")

    def __init__(self, view: FileView, base: int) -> None:
        self.view = view
        self.base = base
        self.data = view.read(base, _WINDOW)

    def move(self, at: int) -> None:
        """Make `at` the window's first byte."""
        self.base += at
        self.data = self.view.read(self.base, _WINDOW)

    def line_end(self, at: int) -> int:
        """The place after the newline that ends the line at *at*."""
        end = self.data.find(b"\n", at, at + MAX_LINE_BYTES)
        if end < 0:
            msg = f"pickle: line at byte {self.base + at} does not end"
            raise damaged(msg)
        return end + 1

    def number(self, at: int) -> int:
        """The decimal number on the line at *at*."""
        text = self.data[at : self.line_end(at) - 1]
        if not text.isdigit() or len(text) > 10:
            msg = f"pickle: no memo index at byte {self.base + at}"
            raise damaged(msg)
        return int(text)


def scan(view: FileView, offset: int = 0, *, max_opcodes: int = MAX_OPCODES) -> ScannedPickle:
    """Follow the pickle at *offset* to its STOP, reading a window at a time.

    Raises:
        IntegrityError: unknown opcode, an argument beyond the end, no STOP, or over a limit.
    """
    window = _Window(view, offset)
    at, count, fetched = 0, 0, set[int]()
    sizes = _SIZES
    while True:
        if at > _REFILL:
            window.move(at)
            at = 0
        data = window.data
        if at >= len(data):
            msg = f"pickle ends at byte {view.size} without STOP (cut off?)"
            raise damaged(msg)
        code = data[at]
        count += 1
        if code == _STOP:
            end = window.base + at + 1
            return ScannedPickle(end=end, opcodes=count, fetched=frozenset(fetched))
        if count > max_opcodes:
            msg = f"pickle has more than {max_opcodes} opcodes"
            raise damaged(msg)
        size = sizes[code]
        if size < 0:
            if code == _GET_LINE:
                fetched.add(window.number(at + 1))
            at = _after_long(window, at, size)
            continue
        if code in _GETS:
            fetched.add(int.from_bytes(data[at + 1 : at + 1 + size], "little"))
        at += 1 + size


def _after_long(window: _Window, at: int, size: int) -> int:
    """The place after an opcode whose argument has no fixed size."""
    code = window.data[at]
    if size == _UNKNOWN:
        msg = f"pickle: unknown opcode {code:#04x} at byte {window.base + at}"
        raise damaged(msg)
    if size in {_LINE, _TWO_LINES}:
        end = window.line_end(at + 1)
        return window.line_end(end) if size == _TWO_LINES else end
    width, signed = _COUNTED[size]
    length = int.from_bytes(window.data[at + 1 : at + 1 + width], "little", signed=signed)
    end = at + 1 + width + length
    if length < 0 or window.base + end > window.view.size:
        msg = f"pickle: argument at byte {window.base + at} claims {length} bytes"
        raise damaged(msg)
    if end > _REFILL:
        window.move(end)
        return 0
    return end
