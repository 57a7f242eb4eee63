"""Real PyTorch on real mounts: FSDP2 with DCP under torchrun, torch.save, safetensors.

The trainer (`train_dcp.py`) knows nothing of ckptgate. All its runs end in the same state, so each is
compared bit for bit with one on a plain directory. An observer outside of the job looks at the store
and at mounts meanwhile, with PyTorch's own reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest

from tests.e2e.harness import Cluster, Gateway, cli, cluster, start_job, until

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow]

TRAINER = Path(__file__).with_name("train_dcp.py")
RANKS = 4
STEPS = ["step-2", "step-4", "step-6"]
RUN_S = 150.0


@pytest.fixture(autouse=True, scope="module")
def _needs(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    try:
        import safetensors
        import torch
    except ImportError:
        require(False, "PyTorch and safetensors are not installed")
    assert torch and safetensors


class Training:
    """One start of the job: torchrun with four ranks, the first half of them on the first path.

    Attributes:
        out: where the ranks leave marks.
        agents: torchrun's processes, one for all ranks or one a node.
    """

    def __init__(self, out: Path, runs: list[Path], *words: str, agents: int = 1) -> None:
        out.mkdir()
        self.out = out
        self.agents: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"),
            *("--nnodes", str(agents), "--nproc-per-node", str(RANKS // agents)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            # As many letters for each run, so that its shards are as long.
            *("--rdzv-id", hashlib.sha256(os.fsencode(out)).hexdigest()[:16]),
            *(str(TRAINER), *map(str, runs), "--out", str(out), *words),
        ]
        for node in range(agents):
            with (out / f"log{node}").open("w") as log:
                self.agents.append(
                    subprocess.Popen(
                        command,
                        env=dict(os.environ, OMP_NUM_THREADS="1"),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                        start_new_session=True,
                    )
                )

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.out.glob("log*")))

    def wait(self) -> int:
        """Its exit code."""
        deadline = time.monotonic() + RUN_S
        try:
            return max(abs(a.wait(max(0.1, deadline - time.monotonic()))) for a in self.agents)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {RUN_S} s:\n{self.log()}") from None

    def ends_well(self) -> None:
        assert self.wait() == 0, self.log()

    def end(self) -> None:
        """Kill what is left."""
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()

    def until(self, what: str, is_true: Callable[[], object], timeout_s: float = 60.0) -> Any:
        """Wait for a condition, while the run goes on."""

        def check() -> object:
            value = is_true()
            assert value or any(a.poll() is None for a in self.agents), f"{what}\n{self.log()}"
            return value

        return until(what, check, timeout_s)

    def final(self) -> list[str]:
        """Digest of the last state, for each rank."""
        return [(self.out / f"final-{rank}").read_text() for rank in range(RANKS)]

    def resumed_after(self) -> set[int]:
        """The steps that ranks began after."""
        return {int(n) for n in re.findall(r"starts after step (\d+)", self.log())}


@contextlib.contextmanager
def training(out: Path, runs: list[Path], *words: str, agents: int = 1) -> Iterator[Training]:
    run = Training(out, runs, *words, agents=agents)
    try:
        yield run
    finally:
        run.end()


@pytest.fixture(scope="module")
def plain(_needs, tmp_path_factory) -> tuple[Path, list[str]]:
    """The run on a plain directory, and the digests that every run must end with."""
    base = tmp_path_factory.mktemp("plain")
    (base / "run").mkdir()
    with training(base / "out", [base / "run"]) as run:
        run.ends_well()
        return base / "run", run.final()


def load(step: Path) -> dict[str, Any]:
    """All tensors of a DCP checkpoint, read by PyTorch from any directory; every file is checked."""
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
                except Exception as exc:
                    self.problems.append(f"{place}: {exc!r}")
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

    def check(self, cluster_: Cluster) -> None:
        """Nothing bad was seen, and all that was seen are committed manifests."""
        assert not self.problems, "\n".join(self.problems[:20])
        assert self.rounds >= 5
        committed = committed_contents(cluster_)
        for name, contents in self.seen.items():
            assert contents <= committed[name], f"{name} was seen with other files"


def committed_contents(c: Cluster) -> dict[str, set[frozenset[tuple[str, str]]]]:
    """Checkpoint -> sets of (path, digest) that the log's COMMITs stand for."""
    found: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for attempt in (c.store / "run/.ckptgate/attempts").iterdir():
        for path in attempt.glob("manifest-*.json"):
            manifest = json.loads(path.read_text())
            if (attempt.name, path.stem.removeprefix("manifest-")) in commits(c):
                files = [e for e in manifest["entries"] if e["type"] == "file"]
                content = frozenset((e["path"], e["digest"]) for e in files)
                found.setdefault(manifest["name"], set()).add(content)
    return found


def commits(c: Cluster) -> list[tuple[str, str]]:
    """(attempt, manifest) of each COMMIT."""
    entries = [record["entry"] for record in c.records("run")]
    return [(e["attempt"], e["manifest"]) for e in entries if e["type"] == "COMMIT"]


@contextlib.contextmanager
def watched(base: Path) -> Iterator[tuple[Cluster, list[Path], Observer]]:
    """Two nodes that train and a third that only looks, the trainer's paths, the observer."""
    with cluster(base, nodes=3) as c:
        one, two, third = c.nodes
        (one.mnt / "run").mkdir()
        until("the run on the other nodes", lambda: all((n.mnt / "run").is_dir() for n in c.nodes))
        with Observer([c.store / "run", two.mnt / "run", third.mnt / "run"]) as observer:
            yield c, [one.mnt / "run", two.mnt / "run"], observer
        observer.check(c)


def check_run(c: Cluster, plain_run: Path, seals: int = len(STEPS)) -> None:
    """All checkpoints are committed by DCP's own event, are everywhere, and hold what they must."""
    until("all commits", lambda: len(commits(c)) == len(STEPS), 60)
    until("all publications", lambda: os.path.lexists(c.store / "run/step-6"))
    records = [record["entry"] for record in c.records("run")]
    events = [entry["event"]["detail"] for entry in records if entry["type"] == "SEAL"]
    assert events == ["dcp-metadata"] * seals, records
    for place in (c.store, *(node.mnt for node in c.nodes)):
        run = place / "run"
        until(f"latest in {place}", lambda r=run: os.readlink(r / "latest") == "step-6")
        assert sorted(set(os.listdir(run)) - {".ckptgate"}) == ["latest", *STEPS]
    for name in STEPS:
        assert cli("verify", c.store / "run" / name).returncode == 0
        stored = c.store / "run" / name
        assert sorted(digests(stored)) == [".metadata", *(f"__{r}_0.distcp" for r in range(RANKS))]
        assert same_tensors(load(stored), load(plain_run / name))
        for node in c.nodes:
            assert digests(node.mnt / "run" / name) == digests(stored)


def test_dcp_save_of_two_nodes_is_committed_by_its_metadata(tmp_path: Path, plain):
    """I1, I5, I8: two torchrun agents; visible whole, loadable without ckptgate, the same state."""
    plain_run, expected = plain
    with watched(tmp_path) as (c, runs, observer):
        with training(tmp_path / "out", runs, "--pause", "0.5", agents=2) as run:
            run.ends_well()
        check_run(c, plain_run)
        assert run.final() == expected
        assert sorted(observer.seen) == STEPS
