"""The Hugging Face Trainer, accelerate and Lightning on a real mount, by an observer outside.

The trainings (`train_others.py`) know nothing of ckptgate. Two ranks, of which one is late or dies
where it writes its own file. Needs `pip install --group frameworks`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import FAST, Cluster, cli, cluster, until

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.slow, pytest.mark.full]

TRAINER = Path(__file__).with_name("train_others.py")
CONFIG = FAST.replace("[commit]\n", "[commit]\nquiescence_s = 4.0\ndeadline_s = 15.0\n")
RUN_S = 200.0


@pytest.fixture(autouse=True, scope="module")
def _needs(require):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    for name in ("transformers", "accelerate", "lightning"):
        try:
            importlib.import_module(name)
        except ImportError as exc:
            require(False, f"{exc}: pip install --group frameworks")


@contextlib.contextmanager
def training(
    framework: str, directory: Path, out: Path, *words: str, ranks: int = 2
) -> Iterator[subprocess.Popen[str]]:
    """One start of the job, killed with all its ranks at the end."""
    out.mkdir()
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(TRAINER), framework, str(directory), str(out), *words]
    env = dict(os.environ, OMP_NUM_THREADS="1", CKPTGATE_RUN_ID=out.name, CUDA_VISIBLE_DEVICES="")
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with (out / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(framework: str, directory: Path, out: Path, *words: str, ranks: int = 2) -> list[str]:
    """A whole training; the digests of what each rank ends with."""
    with training(framework, directory, out, *words, ranks=ranks) as process:
        code = process.wait(RUN_S)
        assert code == 0, (out / "log").read_text()[-3000:]
    return [path.read_text() for path in sorted(out.glob("final-*"))]


class Observer(threading.Thread):
    """Another user of the mount and of the store's directory: what it can see, and when.

    Attributes:
        seen: place and checkpoint -> the sets of files that it was seen with.
        dangling: pointers that named nothing.
    """

    def __init__(self, mnt: Path, store: Path) -> None:
        super().__init__(daemon=True)
        self.places = {"mount": mnt, "store": store}
        self.seen: dict[tuple[str, str], set[frozenset[str]]] = {}
        self.dangling: set[str] = set()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            for place, root in self.places.items():
                for name in sorted(os.listdir(root)) if root.is_dir() else ():
                    self.look(place, root / name)

    def look(self, place: str, path: Path) -> None:
        if path.is_symlink() and not path.exists():
            self.dangling.add(f"{place}/{path.name}")
        elif path.is_dir() and path.name.startswith("checkpoint"):
            found = frozenset(name for name in os.listdir(path) if name != ".ckptgate")
            self.seen.setdefault((place, path.name), set()).add(found)

    def end(self) -> None:
        self.done.set()
        self.join()


@contextlib.contextmanager
def observed(made: Cluster, run_name: str) -> Iterator[Observer]:
    observer = Observer(made.nodes[0].mnt / run_name, made.store / run_name)
    observer.start()
    try:
        yield observer
    finally:
        observer.end()


class Plain:
    """What each training ends with on a plain directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.known: dict[str, list[str]] = {}

    def __getitem__(self, name: str) -> list[str]:
        if name not in self.known:
            ranks = 1 if name == "lightning" else 2
            self.known[name] = run(name, self.base / name, self.base / f"out-{name}", ranks=ranks)
        return self.known[name]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plain:
    return Plain(tmp_path_factory.mktemp("plain"))


HF_FILES = {
    "config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "scheduler.pt",
    "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "training_args.bin",
}  # fmt: skip


def formats(made: Cluster, run_name: str) -> dict[str, tuple[str, str]]:
    """Committed checkpoint -> its format and event."""
    found = {}
    for name in made.committed(run_name):
        done = cli("show", made.store / run_name / name, "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        found[name] = (shown["format_name"], shown["event"])
    return found


def test_the_trainer_s_state_is_held_until_a_late_rank_s_file_is_there(tmp_path, plain):
    """I8, I1: rank 1 is 3 s late in every save, and nobody outside sees one without its file."""
    with cluster(tmp_path, config=CONFIG) as made:
        mnt = made.nodes[0].mnt / "run"
        with observed(made, "run") as observer:
            assert run("hf", mnt, tmp_path / "job1", "--late", "3") == plain["hf"]
            until("all saves", lambda: "checkpoint-6" in made.committed("run"), 60)
            time.sleep(1)
        assert {name for _, name in observer.seen} >= {"checkpoint-4", "checkpoint-6"}
        for seen in observer.seen.values():
            assert seen <= {frozenset(HF_FILES), frozenset()}
        assert set(formats(made, "run").values()) == {("hf-trainer", "hf-trainer-state")}


def test_a_rank_that_dies_in_its_save_leaves_no_checkpoint_and_the_next_start_resumes(
    tmp_path, plain
):
    """I8, I12: rank 0 may have written its state by then."""
    with cluster(tmp_path, config=CONFIG) as made:
        mnt = made.nodes[0].mnt / "run"
        with observed(made, "run") as observer:
            with training("hf", mnt, tmp_path / "job1", "--late", "2", "--kill", "2") as process:
                assert process.wait(RUN_S) != 0
            assert run("hf", mnt, tmp_path / "job2") == plain["hf"]
            until("the last save", lambda: "checkpoint-6" in made.committed("run"), 60)
        began = (tmp_path / "job2" / "began-0").read_text()
        assert began.endswith("checkpoint-2"), "from the last whole one"
        for seen in observer.seen.values():
            assert seen <= {frozenset(HF_FILES), frozenset()}


def test_accelerate_commits_when_every_rank_s_random_state_is_there_and_all_is_quiet(
    tmp_path, plain
):
    """I8: there is no marker at all."""
    with cluster(tmp_path, config=CONFIG) as made:
        mnt = made.nodes[0].mnt / "run"
        with observed(made, "run/checkpoints") as observer:
            found = run("accelerate", mnt, tmp_path / "job1", "--late", "6")
            assert found == plain["accelerate"]
            until("the save", lambda: made.committed("run/checkpoints"), 60)
            time.sleep(1)
        files = {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"}
        assert observer.seen
        for seen in observer.seen.values():
            assert all(names == set() or names >= files for names in seen)
        assert formats(made, "run/checkpoints") == {"checkpoint_0": ("accelerate", "quiescence")}


def test_accelerate_without_one_rank_s_random_state_is_not_committed(tmp_path):
    with cluster(tmp_path, config=CONFIG) as made:
        mnt = made.nodes[0].mnt / "run"
        with training("accelerate", mnt, tmp_path / "job1", "--kill", "1") as process:
            assert process.wait(RUN_S) != 0
        time.sleep(8)
        assert made.committed("run/checkpoints") == []
        assert not (mnt / "checkpoints" / "checkpoint_0").exists()


def test_lightning_s_files_come_whole_and_a_new_start_resumes_from_its_link(tmp_path, plain):
    """I8"""
    with cluster(tmp_path, config=CONFIG) as made:
        mnt = made.nodes[0].mnt / "run"
        mnt.mkdir()
        found = run("lightning", mnt, tmp_path / "job1", ranks=1)
        assert found == plain["lightning"]
        until("all files", lambda: len(list((made.store / "run").glob("epoch*.ckpt"))) == 3, 30)
        import torch

        for path in sorted(mnt.glob("*.ckpt")):
            assert torch.load(path, weights_only=False)["global_step"] in {2, 4, 6}
        assert os.readlink(mnt / "last.ckpt") == "epoch=0-step=6.ckpt"
        assert run("lightning", mnt, tmp_path / "job2", ranks=1) == plain["lightning"]
        assert (tmp_path / "job2" / "began-0").read_text().endswith("last.ckpt")
