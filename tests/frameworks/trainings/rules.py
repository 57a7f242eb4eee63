"""By which rules each framework finds its checkpoints, as its own code has them.

No framework is imported. `newest` may name what isn't there, where a link or a text says so.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from tests.frameworks.job import Job, files_below, numbered

__all__ = [
    "AcceleratedRules", "DcpHfRules", "DcpRules", "Framework", "LitRules", "MegatronRules",
    "OrbaxRules", "Rules", "SnapshotRules", "TrainerRules", "ZeroRules", "is_served",
]  # fmt: skip


def is_served(path: Path) -> bool:
    """Whether a gateway serves that directory: a training with its hooks uses them then."""
    try:
        return bool(os.getxattr(path, "user.ckptgate.latest"))
    except OSError:
        return False


class Rules:
    """Where checkpoints are, and which one is the newest.

    Attributes:
        world: how many ranks the training has.
        nodes: on how many nodes they may be: each with the run's directory under another path.
        step: names of checkpoints.
    """

    world = 2
    nodes = 2
    step = re.compile(r"step-[0-9]+")

    def run_of(self, root: Path) -> Path:
        """The directory that holds the checkpoints."""
        return root

    def newest(self, run: Path) -> Path | None:
        """What a start would resume from: the highest number of those that count."""
        found = [path for _, path in numbered(run, self.step) if self.counts(path)]
        return found[-1] if found else None

    def counts(self, path: Path) -> bool:
        """Whether the framework takes a directory of that name for a checkpoint."""
        return path.exists()

    def files(self, path: Path) -> list[str]:
        """Relative paths of its files, without what is another in each save."""
        return list(files_below(path))


class DcpRules(Rules):
    """As torchtitan finds them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.world = 4 if mode == "sync" else 2

    def counts(self, path: Path) -> bool:
        return (path / ".metadata").is_file()


class DcpHfRules(Rules):
    """By the index, where there is one; else nothing tells."""

    def __init__(self, is_whole: bool) -> None:
        self.is_whole = is_whole

    def counts(self, path: Path) -> bool:
        return not self.is_whole or (path / "model.safetensors.index.json").is_file()


class ZeroRules(Rules):
    """What `latest` names."""

    step = re.compile(r"global_step[0-9]+")

    def __init__(self, stage: int, is_hooked: bool = False) -> None:
        self.stage = stage
        self.is_hooked = is_hooked

    def newest(self, run: Path) -> Path | None:
        latest = run / "latest"
        return run / latest.read_text().strip() if latest.is_file() else None


class TrainerRules(Rules):
    """`get_last_checkpoint`: the name alone."""

    step = re.compile(r"checkpoint-[0-9]+")

    def __init__(self, is_hooked: bool = False) -> None:
        self.is_hooked = is_hooked


class LitRules(Rules):
    """The link, where it makes one; else the file of the highest step.

    Files are published one by one: ranks on several nodes could find different ones.
    """

    nodes = 1
    step = re.compile(r"epoch=[0-9]+-step=[0-9]+\.ckpt")

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def newest(self, run: Path) -> Path | None:
        if self.mode in {"file", "hook"}:
            return super().newest(run)
        last = run / "last.ckpt"
        return last if last.is_symlink() or last.exists() else None

    def files(self, path: Path) -> list[str]:
        return [path.resolve().name]


class AcceleratedRules(Rules):
    """The highest number."""

    step = re.compile(r"checkpoint_[0-9]+")

    def __init__(self, is_hooked: bool = False) -> None:
        self.is_hooked = is_hooked

    def run_of(self, root: Path) -> Path:
        return root / "checkpoints"


class OrbaxRules(Rules):
    """A step's directory under its final name; the commit file in the other mode."""

    nodes = 1
    step = re.compile(r"step_[0-9]+")
    _data = re.compile(r"(d/)[0-9a-f]{32}")

    def __init__(self, is_file: bool) -> None:
        self.is_file = is_file

    def counts(self, path: Path) -> bool:
        return not self.is_file or (path / "commit_success.txt").is_file()

    def files(self, path: Path) -> list[str]:
        # Its data files have random names, and may be any number.
        return sorted({self._data.sub(r"\1*", name) for name in super().files(path)})


class MegatronRules(Rules):
    """What the tracker says."""

    step = re.compile(r"iter_[0-9]{7}")
    tracker = "latest_checkpointed_iteration.txt"

    def newest(self, run: Path) -> Path | None:
        tracker = run / self.tracker
        return run / f"iter_{int(tracker.read_text()):07d}" if tracker.is_file() else None


class SnapshotRules(Rules):
    """The highest step with its metadata."""

    nodes = 1
    step = re.compile(r"step_[0-9]+")

    def counts(self, path: Path) -> bool:
        return (path / ".snapshot_metadata").is_file()

    def files(self, path: Path) -> list[str]:
        # Small tensors of a rank are put together under a random name.
        return ["batched" if "batched/" in name else name for name in super().files(path)]


class Framework(Protocol):
    """A training with a framework, whose class is also its rules."""

    world: int

    def train(self, job: Job) -> object:
        """All steps; this rank's state at the end."""
        ...

    def load(self, path: Path) -> object:
        """All that is in a checkpoint, by the framework's own reader; fails if it is not whole."""
        ...

    def files(self, path: Path) -> list[str]:
        """As the rules say."""
        ...
