"""The model: plain local directories for what each version holds, and who sees which version.

A version is a directory on a local disk. Somebody who changes what he sees changes that directory,
or, where it is committed, a copy of it that only his job sees from then on. Nothing here knows how
the gateway does it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.statemachine.moves import Moves

__all__ = ["Version", "World"]


@dataclass(eq=False)
class Version:
    """One version of a checkpoint.

    Attributes:
        path: its bytes, on a local disk.
        job: who writes it; "" once it is committed.
        base: the committed version that it is a revision of.
    """

    path: Path
    job: str
    base: Version | None = None


@dataclass
class World:
    """One run: its checkpoints, pointers and who sees what of them."""

    base: Path
    committed: dict[str, Version] = field(default_factory=dict)
    own: dict[tuple[str, str], Version] = field(default_factory=dict)
    removed: set[tuple[str, str, Version]] = field(default_factory=set)
    """(job, name, committed version) that the job removed."""
    latest: str = ""
    order: list[str] = field(default_factory=list)
    """Names in the order of their last commits."""
    allowed: dict[str, set[str]] = field(default_factory=dict)
    """Name -> digests of every version that was ever committed."""
    count: int = 0

    def _path(self) -> Path:
        self.count += 1
        return self.base / f"v{self.count}"

    def seen(self, job: str, name: str) -> Version | None:
        """What the name means to a job."""
        own = self.own.get((job, name))
        if own is not None:
            return own
        version = self.committed.get(name)
        if version is None or (job, name, version) in self.removed:
            return None
        return version

    def begin(self, job: str, name: str) -> Version:
        """The job makes the checkpoint's directory."""
        assert self.seen(job, name) is None
        version = self.own[job, name] = Version(self._path(), job)
        version.path.mkdir()
        return version

    def changed(self, job: str, name: str) -> Version:
        """The version that a change by the job goes to: a committed one is copied first."""
        version = self.seen(job, name)
        assert version is not None
        if version.job:
            return version
        copy = self.own[job, name] = Version(self._path(), job, version)
        shutil.copytree(version.path, copy.path, symlinks=True)
        return copy

    def commit(self, job: str, name: str) -> Version:
        """What the job writes at the name is committed: everybody sees it."""
        version = self.own.pop((job, name))
        version.job = ""
        self.committed[name] = version
        self.allowed.setdefault(name, set()).add(Moves().call("digest", str(version.path), [])[1])
        self.order = [other for other in self.order if other != name] + [name]
        self.latest = name
        return version

    def remove(self, job: str, name: str) -> None:
        """The job removes what it sees there."""
        own = self.own.pop((job, name), None)
        if own is not None and own.base is None:
            return
        version = own.base if own is not None else self.committed.get(name)
        if version is not None and self.committed.get(name) is version:
            self.removed.add((job, name, version))

    def retired(self) -> list[str]:
        """Names that somebody removed and nothing keeps: they go for everybody, soon."""
        gone: list[str] = []
        for _, name, version in list(self.removed):
            is_kept = (
                name in {self.latest, self.order[-1]} or self.committed.get(name) is not version
            )
            if not is_kept and name not in gone:
                gone.append(name)
        return sorted(gone)

    def retire(self, name: str) -> None:
        """It is gone from the store."""
        version = self.committed.pop(name)
        self.order.remove(name)
        self.removed = {item for item in self.removed if item[2] is not version}
