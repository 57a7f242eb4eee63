"""Pickles read without executing them: a small stack machine whose objects are inert values.

Owns the rule that nothing a pickle names is ever imported, looked up, called, hashed or compared:
a global is a checked name, a call makes an `Inert`, a dict is a list of pairs. What may be named
is the caller's list. Torn or hostile input is an IntegrityError that names it. Any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, cast

from ckptgate.errors import IntegrityError
from ckptgate.formats.base import BytesView, damaged
from ckptgate.formats.pickles import scan

__all__ = ["MAX_PICKLE_BYTES", "Inert", "Pairs", "read_inert"]

MAX_PICKLE_BYTES: Final = 128 * 1024 * 1024
"""A larger pickle is refused (a DCP metadata has about 150 bytes for each chunk of a tensor)."""

_MARK: Final = object()


class Pairs(list[tuple[object, object]]):
    """A dict as a list of pairs, so that no key is ever hashed or compared but strings."""

    __slots__ = ()

    def find(self, key: str) -> object:
        """The last value under the string *key*, None where there is none."""
        for name, value in reversed(self):
            if isinstance(name, str) and name == key:
                return value
        return None


class Inert:
    """What a pickle would have built.

    Attributes:
        name: `module.qualname` of what it would have called.
        args: the call's arguments, () where they are not kept.
        state: what BUILD gave, None where there was none or it is not kept.
        items: what was set or appended on it, where kept.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None
        self.items: Pairs | None = None

    def field(self, key: str) -> object:
        """The attribute *key* of its state (a dict, or a pair of dict and slots), or None."""
        given = self.state
        states = cast("tuple[object, ...]", given) if isinstance(given, tuple) else (given,)
        for state in reversed(states):
            if isinstance(state, Pairs) and (value := state.find(key)) is not None:
                return value
        return None


class _Global:
    """A name in a pickle; never resolved."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def read_inert(
    data: bytes,
    *,
    is_allowed: Callable[[str, str], bool],
    is_kept: Callable[[str], bool],
    subject: str,
    has_persistent_ids: bool = False,
) -> object:
    """What the pickle *data* describes, in inert values.

    Args:
        data: all of it.
        is_allowed: whether it may name this module and qualified name.
        is_kept: whether objects of this `module.qualname` keep arguments, state and items.
        subject: whose bytes they are, for errors.
        has_persistent_ids: whether it may refer to things outside of it, as torch's pickles do to
            storages; each becomes None.

    Raises:
        IntegrityError: over a limit, cut off, malformed, or it names what is not allowed.
    """
    if len(data) > MAX_PICKLE_BYTES:
        msg = f"pickle {subject} has {len(data)} bytes, limit {MAX_PICKLE_BYTES}"
        raise IntegrityError(msg, subject=subject)
    machine: _Machine | None = None
    try:
        scanned = scan(BytesView(data))
        if scanned.end != len(data):
            msg = f"it ends at byte {scanned.end}, the file at {len(data)}"
            raise damaged(msg)
        machine = _Machine(data, scanned.fetched, is_allowed, is_kept)
        machine.table = _TORCH_TABLE if has_persistent_ids else _TABLE
        return machine.run()
    except IntegrityError as exc:
        msg = f"pickle {subject} is refused: {exc}"
        raise IntegrityError(msg, subject=subject) from exc
    except (IndexError, TypeError, ValueError, AttributeError, struct.error) as exc:
        at = machine.at if machine else 0
        msg = f"pickle {subject} is malformed before byte {at}: {exc}"
        raise IntegrityError(msg, subject=subject) from exc


class _Machine:
    """The stack machine. `scan` has checked that every argument lies inside the data."""

    def __init__(
        self,
        data: bytes,
        fetched: frozenset[int],
        is_allowed: Callable[[str, str], bool],
        is_kept: Callable[[str], bool],
    ) -> None:
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        # Only what is read again is remembered: most of a large pickle's memo never is.
        self.fetched = fetched
        self.memo_count = 0
        self.is_allowed = is_allowed
        self.is_kept = is_kept
        self.table = _TABLE

    def run(self) -> object:
        """The value at STOP."""
        table, data = self.table, self.data
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                break
            step = table[code]
            if step is None:
                msg = f"opcode {chr(code)!r} at byte {self.at - 1} is not allowed here"
                raise damaged(msg)
            step(self)
        if len(self.stack) != 1:
            msg = f"{len(self.stack)} values are left at STOP"
            raise damaged(msg)
        return self.pop()

    def pop(self) -> object:
        """The top of the stack, which must not be a mark."""
        value = self.stack.pop()
        if value is _MARK:
            msg = f"a mark where a value must be, before byte {self.at}"
            raise damaged(msg)
        return value

    def pop_mark(self) -> list[object]:
        """All values above the last mark, which goes too."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                msg = f"no mark, before byte {self.at}"
                raise damaged(msg)
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def number(self, width: int, *, signed: bool = False) -> int:
        """An argument of *width* bytes."""
        at = self.at
        self.at += width
        return int.from_bytes(self.data[at : self.at], "little", signed=signed)

    def block(self, width: int) -> bytes:
        """An argument that has its length in *width* bytes before it."""
        length = self.number(width)
        self.at += length
        return self.data[self.at - length : self.at]

    def line(self) -> str:
        """An argument that ends with a newline."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def remember(self, index: int) -> None:
        """Keep the top under *index* if it is read again."""
        self.memo_count += 1
        if index in self.fetched:
            self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push what is kept under *index*."""
        if index not in self.memo:
            msg = f"memo has no {index}, before byte {self.at}"
            raise damaged(msg)
        self.stack.append(self.memo[index])

    def name(self, module: object, name: object) -> None:
        """Push a global, if it may be named."""
        if not isinstance(module, str) or not isinstance(name, str):
            msg = f"a global without a name, before byte {self.at}"
            raise damaged(msg)
        if not self.is_allowed(module, name):
            msg = f"it names {module[:80]}.{name[:80]}, which does not belong there"
            raise damaged(msg)
        self.stack.append(_Global(f"{module}.{name}"))

    def call(self, args: object, target: object) -> None:
        """Push what calling *target* would have made."""
        if not isinstance(target, _Global) or not isinstance(args, tuple):
            msg = f"a call of something that is not a global, before byte {self.at}"
            raise damaged(msg)
        kept = cast("tuple[object, ...]", args) if self.is_kept(target.name) else ()
        self.stack.append(Inert(target.name, kept))

    def build(self) -> None:
        """Give the object its state."""
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Inert) and self.is_kept(target.name):
            target.state = state

    def set_items(self, values: list[object]) -> None:
        """Set key and value pairs on the top."""
        target = self.stack[-1]
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, Pairs):
            target.extend(pairs)
        elif isinstance(target, Inert):
            if self.is_kept(target.name):
                target.items = Pairs() if target.items is None else target.items
                target.items.extend(pairs)
        else:
            msg = f"pairs set on something that has none, before byte {self.at}"
            raise damaged(msg)

    def append(self, values: list[object]) -> None:
        """Append to the top; a set's or an object's own members are not kept."""
        target = self.stack[-1]
        if isinstance(target, list) and not isinstance(target, Pairs):
            cast("list[object]", target).extend(values)
        elif not isinstance(target, Inert):
            msg = f"values appended to something that is no list, before byte {self.at}"
            raise damaged(msg)


_Step = Callable[[_Machine], object]
_STOP: Final = ord(".")


def _pairs_of(values: list[object]) -> Pairs:
    return Pairs(zip(values[::2], values[1::2], strict=True))


def _top_tuple(count: int) -> _Step:
    def step(m: _Machine) -> None:
        values = [m.pop() for _ in range(count)]
        m.stack.append(tuple(reversed(values)))

    return step


def _push(make: Callable[[_Machine], object]) -> _Step:
    def step(m: _Machine) -> None:
        m.stack.append(make(m))

    return step


def _old_int(m: _Machine) -> object:
    text = m.line()
    return text == "01" if text in {"00", "01"} else int(text)


def _double(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "big"))[0]
    return value


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.name(module, name)


def _new_with_keywords(m: _Machine) -> None:
    m.pop()
    m.call(m.pop(), m.pop())


def _unread(m: _Machine) -> None:
    m.pop()


def _unread_line(m: _Machine) -> None:
    m.line()


def _one_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


_STEPS: Final[dict[str, _Step]] = {
    # constants
    "N": _push(lambda _: None),
    "\x88": _push(lambda _: True),
    "\x89": _push(lambda _: False),
    "I": _push(_old_int),
    "L": _push(lambda m: int(m.line().removesuffix("L"))),
    "F": _push(lambda m: float(m.line())),
    "K": _push(lambda m: m.number(1)),
    "M": _push(lambda m: m.number(2)),
    "J": _push(lambda m: m.number(4, signed=True)),
    "\x8a": _push(lambda m: int.from_bytes(m.block(1), "little", signed=True)),
    "\x8b": _push(lambda m: int.from_bytes(m.block(4), "little", signed=True)),
    "G": _push(lambda m: _double(m.number(8))),
    "S": _push(lambda m: m.line().strip("'\"")),
    "V": _push(lambda m: m.line()),
    "T": _push(lambda m: m.block(4)),
    "U": _push(lambda m: m.block(1)),
    "B": _push(lambda m: m.block(4)),
    "C": _push(lambda m: m.block(1)),
    "\x8e": _push(lambda m: m.block(8)),
    "\x96": _push(lambda m: m.block(8)),
    "\x8c": _push(lambda m: m.block(1).decode("utf-8", "surrogatepass")),
    "X": _push(lambda m: m.block(4).decode("utf-8", "surrogatepass")),
    "\x8d": _push(lambda m: m.block(8).decode("utf-8", "surrogatepass")),
    # collections
    "]": _push(lambda _: list[object]()),
    "}": _push(lambda _: Pairs()),
    ")": _push(lambda _: ()),
    "\x8f": _push(lambda _: Inert("builtins.set", ())),
    "l": _push(lambda m: m.pop_mark()),
    "d": _push(lambda m: _pairs_of(m.pop_mark())),
    "t": _push(lambda m: tuple(m.pop_mark())),
    "\x91": _push(lambda m: m.pop_mark() and None),
    "\x85": _top_tuple(1),
    "\x86": _top_tuple(2),
    "\x87": _top_tuple(3),
    "a": lambda m: m.append([m.pop()]),
    "e": lambda m: m.append(m.pop_mark()),
    "\x90": lambda m: m.append(m.pop_mark()),
    "s": _one_item,
    "u": lambda m: m.set_items(m.pop_mark()),
    # stack and memo
    "(": _push(lambda _: _MARK),
    "0": lambda m: m.stack.pop(),
    "1": lambda m: m.pop_mark(),
    "2": _push(lambda m: m.stack[-1]),
    "g": lambda m: m.recall(int(m.line())),
    "h": lambda m: m.recall(m.number(1)),
    "j": lambda m: m.recall(m.number(4)),
    "p": lambda m: m.remember(int(m.line())),
    "q": lambda m: m.remember(m.number(1)),
    "r": lambda m: m.remember(m.number(4)),
    "\x94": lambda m: m.remember(m.memo_count),
    # names and objects
    "c": lambda m: m.name(m.line(), m.line()),
    "\x93": _stack_global,
    "R": lambda m: m.call(m.pop(), m.pop()),
    "\x81": lambda m: m.call(m.pop(), m.pop()),
    "\x92": _new_with_keywords,
    "b": lambda m: m.build(),
    # framing
    "\x80": lambda m: m.number(1),
    "\x95": lambda m: m.number(8),
}
# Not there on purpose: persistent ids, extension codes, INST, OBJ and out-of-band buffers.
_TABLE: Final[list[_Step | None]] = [_STEPS.get(chr(code)) for code in range(256)]
_TORCH_STEPS: Final = _STEPS | {"P": _push(_unread_line), "Q": _push(_unread)}
_TORCH_TABLE: Final[list[_Step | None]] = [_TORCH_STEPS.get(chr(code)) for code in range(256)]
