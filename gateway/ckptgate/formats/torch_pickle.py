"""What a torch.save file says beside its tensors, read as inert values.

Owns the rule that only the archive's pickle is read, never a tensor, and that nothing in it is
executed: whatever it names stays a name. What can't be read so says nothing; whether the file is
damaged is for `containers` to say. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptgate.errors import IntegrityError
from ckptgate.formats.base import FileView
from ckptgate.formats.inert import Inert, Pairs, read_inert
from ckptgate.formats.torch_zip import read_stored

__all__ = ["MAX_TORCH_PICKLE_BYTES", "number", "read_torch_pickle", "value_of"]

MAX_TORCH_PICKLE_BYTES: Final = 32 * 1024 * 1024
"""A larger one says nothing (a tensor takes about 200 bytes)."""


def read_torch_pickle(
    view: FileView, path: str, is_kept: Callable[[str], bool] = lambda _: False
) -> object:
    """The object that was saved, None where that can't be told.

    Args:
        view: the file.
        path: its name, for errors.
        is_kept: whether objects of this `module.qualname` keep arguments, state and items.
    """
    try:
        data = read_stored(view, "/data.pkl", MAX_TORCH_PICKLE_BYTES)
        return read_inert(
            data,
            is_allowed=lambda _module, _name: True,
            is_kept=is_kept,
            subject=path,
            has_persistent_ids=True,
        )
    except IntegrityError:
        return None


def value_of(saved: object, key: str) -> object:
    """The value under *key* of a dict, or the attribute of an object; None where there is none."""
    if isinstance(saved, Pairs):
        return saved.find(key)
    if isinstance(saved, Inert):
        held = None if saved.items is None else saved.items.find(key)
        return saved.field(key) if held is None else held
    return None


def number(value: object, maximum: int = 1 << 20) -> int | None:
    """*value* if it is a count from 0 to *maximum*, else None."""
    return value if type(value) is int and 0 <= value <= maximum else None
