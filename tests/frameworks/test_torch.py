"""Real PyTorch on real mounts: FSDP2 with DCP under torchrun, torch.save, safetensors.

The trainer (`train_dcp.py`) knows nothing of ckptgate. All its runs end in the same state, so each
is compared bit for bit with one on a plain directory. An observer outside of the job looks at the
store and at mounts meanwhile, with PyTorch's own reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import pytest
from tests.e2e.harness import Cluster, cluster, start_job, until

from ckptgate.app.cli import main

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow]

TRAINER = Path(__file__).with_name("train_dcp.py")
RANKS = 4
STEPS = ["step-2", "step-4", "step-6"]
RUN_S = 150.0


@pytest.fixture(autouse=True, scope="module")
def _needs(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    try:
        for name in ("safetensors.torch", "torch.distributed.checkpoint"):
            importlib.import_module(name)
    except ImportError as exc:
        require(False, str(exc))


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


@pytest.fixture(scope="module")
def nodes(_needs, tmp_path_factory) -> Iterator[Cluster]:
    """A started cluster for all tests here, each with a run of its own."""
    with cluster(tmp_path_factory.mktemp("nodes"), nodes=3) as c:
        yield c


@pytest.fixture
def run(nodes: Cluster, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A new run's directory; a failure shows the daemons' logs."""
    made = Run(nodes, hashlib.sha256(request.node.name.encode()).hexdigest()[:8])
    made.paths[0].mkdir()
    until("the run on the other nodes", lambda: all(path.is_dir() for path in made.seen))
    yield made
    print(nodes.logs())


def kill_in_saves(training_: Training, c: Cluster) -> None:
    """kill -9 the daemons of both nodes while the run saves."""
    one, two, _ = c.nodes
    victims = {
        2: [(one, "mount"), (two, "publisher")],
        4: [(two, "mount"), (one, "publisher")],
        6: [(node, kind) for node in (one, two) for kind in ("publisher", "mount")],
    }
    for step, killed in victims.items():
        mark = training_.out / f"saving-{step}-0"
        training_.until(f"save {step}", mark.exists)
        for node, kind in killed:
            node.kill(kind)
            time.sleep(0.05)


def test_dcp_save_of_two_nodes_is_committed_by_its_metadata(run: Run, plain, tmp_path: Path):
    """I1, I5, I8: two torchrun agents; visible whole, loadable without ckptgate, the same state."""
    plain_run, expected = plain
    with Observer(run.places) as observer:
        with training(tmp_path / "out", run.paths, "--pause", "0.5", agents=2) as job:
            job.ends_well()
        run.check(plain_run)
    assert job.final() == expected
    assert run.committed() == ["step-2.0", "step-4.0", "step-6.0"]
    assert sorted(observer.seen) == STEPS
    observer.check(run)


@pytest.mark.parametrize(
    ("mode", "is_killing"),
    [
        pytest.param("async", True, marks=pytest.mark.full),
        pytest.param("async", False, marks=pytest.mark.full),
        pytest.param("save", True, marks=pytest.mark.full),
    ],
)
def test_a_run_does_not_notice_killed_daemons(
    run: Run, plain, tmp_path: Path, mode: str, is_killing: bool
):
    """I8, I10, I11: kill -9 of mount and publisher on both nodes in the middle of saves."""
    plain_run, expected = plain
    words = ["--mode", mode, "--pause", "1", "--slow", "0.03"]
    with Observer(run.places) as observer:
        with training(tmp_path / "out", run.paths, *words) as job:
            if is_killing:
                kill_in_saves(job, run.c)
            job.ends_well()
        run.check(plain_run)
    assert job.final() == expected
    assert run.committed() == ["step-2.0", "step-4.0", "step-6.0"]
    observer.check(run)


def test_a_rank_killed_in_a_save_leaves_nothing_to_see(run: Run, plain, tmp_path: Path):
    """I4, I8: `latest` stays; the restarted job resumes from it and ends in the same state."""
    plain_run, expected = plain
    with Observer(run.places) as observer:
        words = ["--kill-rank", "2", "--kill-step", "4"]
        with training(tmp_path / "killed", run.paths, *words) as job:
            assert job.wait() != 0
        until("step-2", lambda: run.committed() == ["step-2.0"])
        for place in run.places:
            until(f"latest in {place}", partial(is_latest, place, "step-2"))
        time.sleep(1.5)  # longer than anything waits that could still commit
        for place in (run.stored, *run.seen):
            assert sorted(set(os.listdir(place)) - {".ckptgate"}) == ["latest", "step-2"]
            assert os.readlink(place / "latest") == "step-2"
        assert list(observer.seen) == ["step-2"]
        with training(tmp_path / "again", run.paths) as again:
            again.ends_well()
        run.check(plain_run)
    assert again.resumed_after() == {2}
    assert again.final() == expected
    assert run.committed() == ["step-2.0", "step-4.1", "step-6.0"]
    assert writers(load(run.stored / "step-2")) != writers(load(run.stored / "step-4"))
    observer.check(run)


@pytest.mark.full
def test_a_restarted_job_waits_for_a_sealed_checkpoint(run: Run, plain, tmp_path: Path):
    """I12: its predecessor's last one is sealed, but not committed; it is what it resumes from."""
    plain_run, expected = plain
    one, two, _ = run.c.nodes
    with Observer(run.places) as observer:
        with training(tmp_path / "first", run.paths, "--steps", "4", "--pause", "2") as job:
            job.until("step-2", lambda: (run.stored / "step-2").is_dir())
            publisher = two.child("publisher")
            os.kill(publisher, signal.SIGSTOP)
            try:
                job.ends_well()
                until("the SEAL", lambda: len(run.entries("SEAL")) == 2)
                with training(tmp_path / "second", run.paths) as again:
                    line = f"resume-waits run={run.stored.name!r} for=step-4.0"
                    again.until("the wait", lambda: line in one.log())
                    assert run.committed() == ["step-2.0"]
                    os.kill(publisher, signal.SIGCONT)
                    again.ends_well()
            finally:
                os.kill(publisher, signal.SIGCONT)
        run.check(plain_run)
    assert again.resumed_after() == {4}
    assert again.final() == expected
    assert run.committed() == ["step-2.0", "step-4.0", "step-6.0"]
    observer.check(run)


RANK_SAVE = """
import sys, torch, ckptgate, os
path, rank, world, seed = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(path, exist_ok=True)
torch.manual_seed(seed + rank)
torch.save({"weight": torch.randn(1000, 1000), "rank": rank}, f"{path}/rank{rank}.pt")
sys.stdin.readline()
ckptgate.commit(path, rank, world)
"""


def weights(seed: int) -> Any:
    import torch

    return torch.randn(1000, 1000, generator=torch.Generator().manual_seed(seed))


def save_all(run: Run, run_id: str, seed: int) -> None:
    """Each rank saves with torch.save; nothing is to be seen until the last has committed."""
    import torch

    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start_job(
                    RANK_SAVE,
                    *(run.paths[rank * 2 // RANKS] / "step-1", str(rank), str(RANKS), str(seed)),
                    run_id=run_id,
                )
            )
            for rank in range(RANKS)
        ]
        before = len(run.committed())
        for rank, process in enumerate(ranks):
            for path in run.seen:
                known = (path / "step-1").exists()
                assert known == bool(before)
                if known:
                    assert torch.load(path / "step-1/rank0.pt")["rank"] == 0
            assert len(run.committed()) == before
            _, err = process.communicate("\n", timeout=90)
            assert process.returncode == 0, (rank, err)
    until("the commit", lambda: len(run.committed()) == before + 1)


def test_torch_save_of_each_rank_is_mapped_on_the_other_node(run: Run):
    """I8: a mapped old version stays what it was when the same name is saved again."""
    import torch

    def mapped(place: Path) -> list[Any]:
        files = [place / f"step-1/rank{rank}.pt" for rank in range(RANKS)]
        return [torch.load(file, mmap=True)["weight"] for file in files]

    def is_new(place: Path) -> bool:
        return torch.equal(mapped(place)[0], weights(200))

    save_all(run, "first", seed=100)
    old = []
    for place in run.seen:
        until("the name", (place / "step-1/rank0.pt").exists)
        old += mapped(place)
    save_all(run, "second", seed=200)
    until("both publications", lambda: len(run.entries("PUBLISHED")) == 2)
    for place in (run.stored, *run.seen):
        until(f"the new one in {place}", partial(is_new, place))
        assert all(torch.equal(new, weights(200 + rank)) for rank, new in enumerate(mapped(place)))
    for number, tensor in enumerate(old):
        assert torch.equal(tensor, weights(100 + number % RANKS))
    assert main(["verify", str(run.stored / "step-1")]) == 0


SAFETENSORS_SAVE = """
import os, sys, torch, ckptgate
from safetensors.torch import load_file, save_file
run, scale = sys.argv[1], float(sys.argv[2])
os.makedirs(f"{run}/step-1", exist_ok=True)
tensors = {"a": torch.full((512, 512), scale), "b": torch.arange(1000) * scale}
for path in (f"{run}/step-1/model.safetensors", f"{run}/model.safetensors"):
    save_file(tensors, path)
    assert torch.equal(load_file(path)["a"], tensors["a"])
assert os.listdir(f"{run}/step-1") == ["model.safetensors"]
ckptgate.commit(f"{run}/step-1", 0, 1)
"""


def test_safetensors_are_saved_and_loaded_through_the_mount(run: Run):
    """It writes a temporary file with mode 0600 and renames it before it closes it."""
    import torch
    from safetensors.torch import load_file

    for scale in (1.0, 2.0):
        with start_job(
            SAFETENSORS_SAVE, run.paths[0], str(scale), run_id=f"scale{scale}"
        ) as writer:
            _, err = writer.communicate(timeout=90)
        assert writer.returncode == 0, err
        for place in (run.stored, *run.seen):
            for name in ("step-1/model.safetensors", "model.safetensors"):
                path = place / name

                def is_new(path: Path = path, scale: float = scale) -> bool:
                    return path.exists() and float(load_file(path)["a"][0, 0]) == scale

                until(f"{path} of {scale}", is_new)
                assert torch.equal(load_file(path)["b"], torch.arange(1000) * scale)
                assert path.stat().st_mode & 0o777 == 0o600
            names = {"step-1", "latest", "model.safetensors"}
            assert set(os.listdir(place)) - {".ckptgate"} == names
    assert main(["verify", str(run.stored / "step-1")]) == 0


# The pickle is made after the file was opened and truncated.
SLOW_SAVE = """
import sys, torch
class Slow:
    def __reduce__(self):
        print("open", flush=True)
        sys.stdin.readline()
        return (int, (int(sys.argv[2]),))
torch.save({"version": Slow(), "data": torch.zeros(300_000)}, sys.argv[1])
own = torch.load(sys.argv[1], weights_only=False)["version"]
assert own == int(sys.argv[2]), own
"""


def test_a_plain_torch_file_is_replaced_as_a_whole(run: Run):
    """I8: until the new one is whole in the store, everybody else loads the old one."""
    import torch

    places = [run.stored / "best.pt", *(path / "best.pt" for path in run.seen)]

    def versions() -> set[int]:
        return {torch.load(path, weights_only=False)["version"] for path in places}

    for version in (1, 2, 3):
        path = run.paths[version % 2] / "best.pt"
        with start_job(SLOW_SAVE, path, str(version), run_id=f"v{version}") as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n", writer.stderr.read()
            for _ in range(3):
                if version == 1:
                    assert not any(path.exists() for path in places)
                else:
                    assert versions() == {version - 1}
            _, err = writer.communicate("\n", timeout=90)
            assert writer.returncode == 0, err
        until("the first one", lambda: all(path.exists() for path in places))

        def is_everywhere(version: int = version) -> bool:
            known = versions()
            assert known <= {version - 1, version}
            return known == {version}

        until("the new version everywhere", is_everywhere)
        assert set(os.listdir(run.stored)) - {".ckptgate"} == {"best.pt"}
