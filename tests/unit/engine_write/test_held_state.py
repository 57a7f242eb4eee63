"""Which training state a committed checkpoint holds, read from its stored files."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
from tests.engine_harness import RUN, Cluster
from tests.unit.formats.builders import dcp, hf_trainer, safetensors_file, torch_file

from ckptgate.engine.held import HeldPart, HeldState, held_state
from ckptgate.engine.manifests import load_manifest
from ckptgate.errors import TransientStoreError
from ckptgate.model.documents import Manifest
from ckptgate.testing.faults import FaultPlan, FaultyStore


def saved(cluster: Cluster, name: str, files: Mapping[str, bytes]) -> str:
    """A committed checkpoint's attempt."""
    node = cluster.node("a")
    row = node.begin(name)
    for path, data in files.items():
        node.write(row, path, data)
    node.commit(row, None, None, is_all=True)
    cluster.settle()
    return cluster.state().current[name]


def committed(cluster: Cluster, name: str, files: Mapping[str, bytes]) -> Manifest:
    attempt = saved(cluster, name, files)
    view = cluster.state().attempts[attempt]
    return load_manifest(cluster.store, RUN, attempt, view.manifest)


def held(cluster: Cluster, name: str, files: Mapping[str, bytes]) -> HeldState:
    return held_state(cluster.store, RUN, committed(cluster, name, files))


def test_parts_ranks_and_step_of_a_known_format(cluster: Cluster) -> None:
    found = held(cluster, "checkpoint-4", hf_trainer(ranks=2))
    assert found == HeldState(
        parts={
            "model": HeldPart(files=("model.safetensors",)),
            "optimizer": HeldPart(files=("optimizer.pt",)),
            "rng": HeldPart(files=("rng_state_0.pth", "rng_state_1.pth"), ranks=(0, 1)),
            "scheduler": HeldPart(files=("scheduler.pt",)),
            "trainer": HeldPart(files=("trainer_state.json",)),
        },
        step=4,
        world_size=2,
    )


def test_files_of_no_format_are_asked_themselves(cluster: Cluster) -> None:
    """One of each kind is read: the others differ by their rank only."""
    state = {"model": {}, "optimizer": {}, "lr_scheduler": {}, "rng_state": [], "step": 7}
    files = {f"rank{n}.pt": torch_file(state) for n in range(3)}
    files["notes.txt"] = b"lr 0.1"
    found = held(cluster, "step-7", files)
    each = HeldPart(files=("rank0.pt", "rank1.pt", "rank2.pt"), ranks=(0, 1, 2))
    assert found.parts == dict.fromkeys(("model", "optimizer", "rng", "scheduler", "trainer"), each)
    assert (found.step, found.problem) == (7, "")


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("model.pt", torch_file(OrderedDict([("0.weight", 1), ("0.bias", 1)])), {"model"}),
        ("optimizer.pt", torch_file({"state": {}, "param_groups": []}), {"optimizer"}),
        ("scheduler.bin", torch_file({"last_epoch": 1}), {"scheduler"}),
        ("x.safetensors", safetensors_file(), {"model"}),
        ("checkpoint.ckpt", torch_file({"state_dict": {}, "optimizer_states": []}),
         {"model", "optimizer"}),
        ("x.pt", torch_file([1, 2]), set()),
        ("x.pt", b"not a torch file", set()),
        ("x.json", json.dumps({"optimizer": 1}).encode(), set()),
    ],
)  # fmt: skip
def test_a_file_speaks_by_its_keys_or_its_name(
    cluster: Cluster, name: str, data: bytes, parts: set[str]
) -> None:
    assert set(held(cluster, "step-1", {name: data}).parts) == parts


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise AssertionError('executed')",))


def test_nothing_is_executed_to_tell_it(cluster: Cluster) -> None:
    """I13"""
    found = held(cluster, "step-1", {"x.pt": torch_file({"model": Evil(), "step": Evil()})})
    assert set(found.parts) == {"model", "trainer"}
    assert found.step is None


def test_what_cannot_be_read_is_said_and_what_is_away_is_an_error(cluster: Cluster) -> None:
    """I13: a metadata that names what doesn't belong there."""
    manifest = committed(cluster, "step-1", dcp())
    hostile = pickle.dumps(Evil())

    class Changed:
        def read(self, key: str, offset: int, length: int) -> bytes:
            return hostile.ljust(length, b".")[offset : offset + length]

    found = held_state(Changed(), RUN, manifest)  # type: ignore[arg-type]
    assert not found.parts
    assert ".metadata" in found.problem
    away = FaultyStore(cluster.store, FaultPlan(at=1, is_lasting=True))
    with pytest.raises(TransientStoreError):
        held_state(away, RUN, manifest)
