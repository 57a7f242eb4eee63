"""What accelerate's `save_state` writes: `random_states_<rank>.pkl` of every rank, and the rest.

Owns the rule that there is no commit event: each rank's file is there and nobody writes any more,
or somebody says so. Which models, optimizers and schedulers there are no file says; those below the
highest number of a row must be there. Of all that lies beside a checkpoint it takes the number in
the name, and fails where there is none: so a `latest` of the gateway's own would end the training.
No state; any thread.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ckptgate.formats.base import Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames, gaps
from ckptgate.model.closure import ExpectedSet

__all__ = ["Accelerate"]

_RANDOM: Final = re.compile(r"random_states_(?P<rank>[0-9]+)\.pkl")
_CUSTOM: Final = re.compile(r"custom_checkpoint_([0-9]{1,4})\.pkl")
_ROWS: Final = (
    ("model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("optimizer", ".bin"),
    ("scheduler", ".bin"),
    ("sampler", ".bin"),
)


class Accelerate(Layout):
    """The format as `base.Format`; shards, DCP and DeepSpeed in it are their formats' matter."""

    name = "accelerate"
    allows_latest = False
    own: ClassVar[re.Pattern[str]] = _RANDOM
    parts: ClassVar[PartNames] = (
        ("model", re.compile(r"(?:pytorch_)?model.*\.(?:safetensors|bin)|pytorch_model.*/.*")),
        ("optimizer", re.compile(r"optimizer(?:_\d+)?(?:\.bin|/.*)")),
        ("scheduler", re.compile(r"scheduler(?:_\d+)?\.bin")),
        ("scaler", re.compile(r"scaler\.pt")),
        ("rng", _RANDOM),
        ("data", re.compile(r"sampler(?:_\d+)?\.bin|dl_state_dict.*\.bin")),
        ("trainer", _CUSTOM),
    )

    def expected(self, tree: Tree) -> ExpectedSet:
        """Every rank's random state, and no gap in the numbered rows."""
        sizes = tree.files()
        files = {path: 1 for path in sizes if _RANDOM.fullmatch(path)}
        for head, tail in _ROWS:
            files.update((path, 1) for path in gaps(sizes, head, tail))
        custom = [int(match[1]) for path in sizes if (match := _CUSTOM.fullmatch(path))]
        files.update((f"custom_checkpoint_{n}.pkl", 1) for n in range(max(custom, default=-1) + 1))
        return ExpectedSet(
            format_name=self.name,
            files=files,
            rank_files=("random_states_{rank}.pkl",),
            source="random_states of the ranks",
        )
