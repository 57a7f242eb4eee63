"""What a training with a framework is given, and what the matrix asks of it.

A training is deterministic: whatever happened before, its state after a step is the same, bit for
bit. It finds what to resume from by the framework's own rule, and knows nothing of ckptgate.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "digest", "files_below", "numbered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank of a start of a training.

    Attributes:
        root: the run's directory, as this rank has it.
        out: where it leaves marks.
        rank, world: as the launcher says.
        steps: how many there are.
        every: after how many steps it saves.
        keep: how many checkpoints are kept where the framework removes old ones; None: all.
    """

    root: Path
    out: Path
    rank: int
    world: int
    steps: int
    every: int
    keep: int | None

    def began(self, found: object) -> None:
        """Note what it resumes from ("" or None: nothing)."""
        (self.out / f"began-{self.rank}").write_text(str(found or ""))

    def saving(self, step: int) -> None:
        """Mark that the save after that step begins."""
        (self.out / f"saving-{step // self.every}-{self.rank}").touch()

    def is_due(self, step: int) -> bool:
        """Whether it saves after that step."""
        return step % self.every == 0


def numbered(run: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Checkpoints by the last number in their names."""
    found = [name.name for name in run.iterdir() if pattern.fullmatch(name.name)]
    return sorted((int(re.findall(r"\d+", name)[-1]), run / name) for name in found)


def digest(value: object) -> str:
    """Of any nested value with tensors and arrays."""
    state = hashlib.sha256()
    _feed(state, value)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    state.update(f"({type(value).__name__}".encode())
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            state.update(repr(key).encode())
            _feed(state, value[key])
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value if isinstance(value, (list, tuple)) else sorted(value, key=repr):
            _feed(state, item)
    elif hasattr(value, "to_local"):
        _feed(state, value.to_local())
    elif hasattr(value, "detach"):
        state.update(_bytes_of_tensor(value))
    elif hasattr(value, "__array__"):
        import numpy

        state.update(numpy.ascontiguousarray(numpy.asarray(value)).tobytes())
    elif isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        state.update(repr(value).encode())
    elif hasattr(value, "__dict__"):
        _feed(state, vars(value))
    else:
        raise TypeError(f"a {type(value)} has no digest")
    state.update(b")")


def _bytes_of_tensor(value: Any) -> bytes:
    import torch

    held = value.detach().contiguous().reshape(-1)
    return f"{value.dtype}{tuple(value.shape)}".encode() + held.view(torch.uint8).numpy().tobytes()


def files_below(path: Path) -> Iterable[str]:
    """Relative paths of all files, those of the gateway left out."""
    if path.is_file():
        return [path.name]
    found = (name.relative_to(path) for name in path.rglob("*") if name.is_file())
    return sorted(str(name) for name in found if name.parts[0] != ".ckptgate")
