"""Kinds of names: which names are checkpoints, their temporary forms, pointers, whole files.

Decided from one component of a path alone; what is actually there (a directory, a symlink, a small
text) the vfs checks in addition. A name that starts with `.` is never any of them: hidden names,
and the gateway's own directory among them, stay plain. Pure; any thread.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_PATTERNS", "NamePatterns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamePatterns:
    """The configured patterns, in shell syntax (`*`, `?`, `[...]`), case-sensitive.

    Attributes:
        checkpoints: final names of checkpoint directories.
        temporaries: names under which a checkpoint is written before a rename gives it its final
            name, whatever that is.
        pointers: names beside the checkpoints that name one of them.
        whole_suffixes: endings of files that are published whole, outside of checkpoints.
    """

    checkpoints: tuple[str, ...]
    temporaries: tuple[str, ...]
    pointers: tuple[str, ...]
    whole_suffixes: tuple[str, ...]

    def is_checkpoint(self, name: str) -> bool:
        """Whether a directory *name* is a checkpoint, under its final or a temporary name."""
        return _matches(self.checkpoints, name) or self.is_temporary(name)

    def is_temporary(self, name: str) -> bool:
        """Whether a directory *name* is a checkpoint that a rename will finish."""
        return _matches(self.temporaries, name)

    def is_pointer(self, name: str) -> bool:
        """Whether a symlink or small text *name* names a checkpoint beside it."""
        return _matches(self.pointers, name)

    def is_whole(self, name: str) -> bool:
        """Whether a file *name* is published whole; a pointer's name can be one too."""
        return not name.startswith(".") and name.endswith(self.whole_suffixes)


DEFAULT_PATTERNS: Final = NamePatterns(
    checkpoints=(
        "step-*",
        "step_*",
        "checkpoint-*",
        "checkpoint_*",
        "global_step*",
        "iter_*",
        "epoch*",
        "ep*-ba*",
    ),
    temporaries=("*.orbax-checkpoint-tmp*", "tmp_*", "*-tmp", "*.tmp"),
    pointers=(
        "latest",
        "latest.txt",
        "latest_universal",
        "latest_checkpointed_iteration.txt",
        "dlrover_latest.txt",
        "LATEST",
        "last.ckpt",
        "last-v*.ckpt",
        "latest-rank*",
    ),
    whole_suffixes=(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz"),
)
"""What the frameworks use that are known today."""


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return not name.startswith(".") and _compiled(patterns).match(name) is not None


@functools.lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    # One expression for all: the vfs asks for every name that it looks up.
    if not patterns:
        return re.compile(r"(?!)")
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns))
