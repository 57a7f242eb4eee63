"""nanotron: `model/`, `optimizer/`, `random/` with `-R-of-N` in the names, and `latest.txt`.

Owns the rule that `latest.txt` says nothing of other ranks (every rank writes it, without waiting)
and that the names say how many files there are. No state; any thread.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ckptgate.formats.base import CommitEvent, Tree
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import PartNames, family
from ckptgate.model.closure import ExpectedSet

__all__ = ["Nanotron"]

_META: Final = "checkpoint_metadata.json"
_ALWAYS: Final[tuple[str, ...]] = (_META, "config.yaml", "model_config.json")
# Of a model's tensor, only the ranks that split it have a file; the stages hold different ones.
_TENSOR: Final = re.compile(r"(model/.+_pp-rank-[0-9]+-of-[0-9]+_)(tp-rank-.+\.safetensors)")
_STATE: Final = re.compile(r"(?:optimizer|random|lr_scheduler)/\w+-[0-9]+-of-[0-9]+.*\.pt")


class Nanotron(Layout):
    """The format as `base.Format`."""

    name = "nanotron"
    own: ClassVar[re.Pattern[str]] = re.compile(
        r"checkpoint_metadata\.json|optimizer/optimizer_pp-.*"
    )
    parts: ClassVar[PartNames] = (
        ("model", re.compile(r"model/.*\.safetensors")),
        ("optimizer", re.compile(r"optimizer/.*\.pt")),
        ("scheduler", re.compile(r"lr_scheduler/.*")),
        ("rng", re.compile(r"random/.*")),
        ("trainer", re.compile(r"checkpoint_metadata\.json")),
    )

    def pointer_event(self, pointer: str) -> CommitEvent | None:
        """`latest.txt` is written, by the fastest rank."""
        return (
            CommitEvent(name="nanotron-latest", is_early=True) if pointer == "latest.txt" else None
        )

    def expected(self, tree: Tree) -> ExpectedSet:
        """The metadata, and every file of each family whose member is there."""
        sizes = tree.files()
        files: dict[str, int] = dict.fromkeys(_ALWAYS, 1)
        for path in sizes:
            if found := _TENSOR.fullmatch(path):
                files.update((f"{found[1]}{other}", 1) for other in family(found[2]))
            elif _STATE.fullmatch(path):
                files.update((other, 1) for other in family(path))
        if any(path.startswith("optimizer/") for path in sizes):
            files["optimizer/optimizer_config.json"] = 1
            files["lr_scheduler/lr_scheduler.pt"] = 1
        return ExpectedSet(format_name=self.name, files=files, source="the names' -R-of-N")
