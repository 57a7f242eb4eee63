"""What of the trainer's runs is to be seen in the store and at mounts, read by PyTorch."""

from __future__ import annotations

import json
import os
import re
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Final

import blake3
from tests.e2e.harness import Cluster, until
from tests.frameworks.torch_job import RANKS

from ckptgate.app.cli import main

__all__ = ["STEPS", "Observer", "Run", "is_latest", "load", "writers"]

STEPS: Final = ["step-2", "step-4", "step-6"]


def load(step: Path) -> dict[str, Any]:
    """All tensors of a DCP checkpoint, read by PyTorch; every file that it names is looked at."""
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(step)
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        size = (step / info.relative_path).stat().st_size
        assert size >= info.offset + info.length, f"{step / info.relative_path} is short"
    state = {
        key: torch.empty(said.size, dtype=said.properties.dtype)
        for key, said in metadata.state_dict_metadata.items()
        if hasattr(said, "properties")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def writers(state: dict[str, Any]) -> set[bytes]:
    """The starts of the job that the shards of all ranks come from."""
    stamps = {key: bytes(value.tolist()) for key, value in state.items() if key.startswith("job.")}
    assert len(stamps) == RANKS, sorted(stamps)
    return set(stamps.values())


def same_tensors(left: dict[str, Any], right: dict[str, Any]) -> bool:
    keys = {key for key in left if not key.startswith("job.")}
    assert len(keys) >= 12
    return keys == {key for key in right if not key.startswith("job.")} and all(
        left[key].numpy().tobytes() == right[key].numpy().tobytes() for key in keys
    )


def digests(directory: Path) -> dict[str, str]:
    """Path -> BLAKE3 of every file."""
    return {
        name: blake3.blake3((directory / name).read_bytes()).hexdigest()
        for name in os.listdir(directory)
        if name != ".ckptgate"
    }


def is_latest(run: Path, name: str) -> bool:
    return os.path.lexists(run / "latest") and os.readlink(run / "latest") == name


class Observer:
    """Looks at run directories from outside of the job, again and again.

    Attributes:
        problems: everything that must not be seen (I5, I8).
        seen: checkpoint -> every set of (path, digest) that was seen under its name anywhere.
        rounds: how often it looked everywhere.
    """

    def __init__(self, places: list[Path]) -> None:
        self.places = places
        self.problems: list[str] = []
        self.seen: dict[str, set[frozenset[tuple[str, str]]]] = {}
        self.rounds = 0
        self._loaded: set[tuple[Path, str, frozenset[tuple[str, str]]]] = set()
        self._newest: dict[Path, int] = {}
        self._known: dict[Path, set[str]] = {place: set() for place in places}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the observer hangs"

    def _run(self) -> None:
        while not self._is_over.wait(0.1):
            for place in self.places:
                try:
                    if place.is_dir():
                        self._look(place)
                except Exception:  # noqa: BLE001 - whatever it is, it must not happen
                    self.problems.append(f"{place}: {traceback.format_exc()}")
            self.rounds += 1

    def _look(self, place: Path) -> None:
        link = place / "latest"
        target = os.readlink(link) if os.path.lexists(link) else ""
        names = set(os.listdir(place)) - {".ckptgate", "latest"}
        strange = [name for name in names if not re.fullmatch(r"step-\d+", name)]
        assert not strange, f"strange names: {strange}"
        assert names >= self._known[place], f"gone: {self._known[place] - names}"
        self._known[place] = names
        for name in sorted(names):
            found = frozenset(digests(place / name).items())
            self.seen.setdefault(name, set()).add(found)
            if (place, name, found) not in self._loaded:
                who = writers(load(place / name))
                assert len(who) == 1, f"{name} mixes the files of {who}"
                self._loaded.add((place, name, found))
        if target:
            assert target in names, f"latest names {target}, there are {sorted(names)}"
            number = int(target.removeprefix("step-"))
            assert number >= self._newest.get(place, 0), f"latest went back to {target}"
            self._newest[place] = number
            assert (link / ".metadata").is_file()

    def check(self, run: Run) -> None:
        """Nothing bad was seen, and all that was seen are committed manifests."""
        assert not self.problems, "\n".join(self.problems[:5])
        assert self.rounds >= 5
        committed = run.committed_contents()
        for name, contents in self.seen.items():
            assert contents <= committed[name], f"{name} was seen with other files"


class Run:
    """A run's directory in a cluster: two nodes that train and a third that only looks."""

    def __init__(self, c: Cluster, name: str) -> None:
        self.c = c
        self.stored = c.store / name
        self.seen = [node.mnt / name for node in c.nodes]
        self.paths = self.seen[:2]
        self.places = [self.stored, *self.seen[1:]]

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """The log's entries of a kind, as they lie in the store."""
        records = sorted((self.stored / ".ckptgate/log").glob("*.json"))
        found: list[dict[str, Any]] = [json.loads(path.read_text())["entry"] for path in records]
        return [entry for entry in found if entry["type"] == kind]

    def committed(self) -> list[str]:
        """The committed attempts."""
        return [entry["attempt"] for entry in self.entries("COMMIT")]

    def committed_contents(self) -> dict[str, set[frozenset[tuple[str, str]]]]:
        """Checkpoint -> sets of (path, digest) that the log's COMMITs stand for."""
        found: dict[str, set[frozenset[tuple[str, str]]]] = {}
        for entry in self.entries("COMMIT"):
            folder = self.stored / ".ckptgate/attempts" / entry["attempt"]
            manifest = json.loads((folder / f"manifest-{entry['manifest']}.json").read_text())
            files = [item for item in manifest["entries"] if item["type"] == "file"]
            content = frozenset((item["path"], item["digest"]) for item in files)
            found.setdefault(manifest["name"], set()).add(content)
        return found

    def check(self, plain_run: Path) -> None:
        """All checkpoints were committed by DCP's event, are everywhere, and are what they must."""
        until("all commits", lambda: len(self.committed()) == len(STEPS), 60)
        until("all publications", lambda: len(self.entries("PUBLISHED")) == len(STEPS))
        seals = self.entries("SEAL")
        assert {(entry["event"], entry["detail"]) for entry in seals} == {
            ("format", "dcp-metadata")
        }
        for place in (self.stored, *self.seen):
            until(f"latest in {place}", partial(is_latest, place, "step-6"))
            assert sorted(set(os.listdir(place)) - {".ckptgate"}) == ["latest", *STEPS]
        for name in STEPS:
            assert main(["verify", str(self.stored / name)]) == 0
            files = digests(self.stored / name)
            assert sorted(files) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(RANKS))]
            assert same_tensors(load(self.stored / name), load(plain_run / name))
            for place in self.seen:
                assert digests(place / name) == files
