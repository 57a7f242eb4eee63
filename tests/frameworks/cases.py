"""What every framework's module checks, whichever framework it is.

A module per framework has a class that derives from one of those here and says which trainings it
is about; each is as long as one day's share of the long tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
from tests.e2e.harness import cli
from tests.frameworks.matrix import FAULTS, Matrix, matrix
from tests.frameworks.trainings.known import needs

__all__ = ["HOOKED", "SEALS", "Disturbed", "DisturbedBesideRaw"]

SEALS: Final = {
    "dcp": ("dcp", "dcp-metadata"),
    "dcp-thread": ("dcp", "dcp-metadata"),
    "dcp-process": ("dcp", "dcp-metadata"),
    "dcp-hf": ("weights", "quiescence"),
    "dcp-hf-shards": ("dcp-hf", "quiescence"),
    "zero1": ("deepspeed", "deepspeed-latest"),
    "zero2": ("deepspeed", "deepspeed-latest"),
    "zero3": ("deepspeed", "deepspeed-latest"),
    "trainer": ("hf-trainer", "hf-trainer-state"),
    "accelerate": ("accelerate", "quiescence"),
    "orbax": ("orbax", "rename"),
    "orbax-file": ("orbax", "orbax-commit"),
    "megatron": ("megatron", "megatron-metadata"),
    "torchsnapshot": ("torchsnapshot", "torchsnapshot-metadata"),
}
"""As what its checkpoints are committed, and by which event; Lightning's are single files."""
HOOKED: Final = {
    "dcp-hook": ("dcp", "torch-dcp", {"dim0": 2}),
    "dcp-hook-thread": ("dcp", "torch-dcp", {"dim0": 2}),
    "zero2-hook": ("deepspeed", "deepspeed", {"zero_stage": 2, "data": 2, "model": 1}),
    "trainer-hook": ("hf-trainer", "transformers-trainer", {"mode": "distributed", "data": 2}),
    "lightning-hook": ("", "lightning", None),
    "accelerate-hook": ("accelerate", "accelerate", {"type": "MULTI_CPU"}),
}
"""The same with a native hook: the format, and what is recorded as framework and layout.

Which is first, the framework's marker or the commit of the last rank, is a matter of chance.
"""


class Disturbed:
    """The list of faults, of each training, on two nodes' mounts."""

    trainings: ClassVar[tuple[str, ...]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("made", self.trainings, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, request, require, tmp_path_factory) -> Iterator[Matrix]:
        """A training's cases."""
        name = request.param
        require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
        require(platform.machine() == "x86_64", "system calls are counted on x86-64 only")
        top, _, _ = needs(name).partition(".")
        require(importlib.util.find_spec(top), f"no {top}: pip install --group frameworks")
        with matrix(name, tmp_path_factory.mktemp(name), mounted=True) as made:
            yield made

    @pytest.mark.parametrize("fault", FAULTS)
    def test_only_whole_checkpoints_are_seen_and_the_training_goes_on(self, made, fault):
        """I4, I8, I12"""
        check(made, fault)


class DisturbedBesideRaw(Disturbed):
    """The same, of frameworks that a late rank misleads where there is no gateway."""

    def test_the_same_observer_finds_what_must_not_be_seen_on_a_raw_directory(self, made):
        assert made.case("raw", "late").wrong


def check(made: Matrix, fault: str) -> None:
    """Only whole checkpoints were seen, and the training ended as an undisturbed one."""
    result = made.case("ckptgate", fault)
    assert not result.wrong, "\n".join(result.wrong[:5])
    assert not result.error, result.error
    assert result.is_equal, "the training ended in another state"
    # Its second save begins before the first one is written.
    if fault.startswith("kill") and made.name != "lightning-async":
        assert result.resumed, "the second start began from nothing"
    if made.name in SEALS:
        seals = _seals(made, fault)
        usual = SEALS[made.name]
        # What a killed training left whole, but without its marker, counts as well.
        may_be = {usual, (usual[0], "quiescence")} if fault.startswith("kill") else {usual}
        assert usual in seals.values(), seals
        assert set(seals.values()) <= may_be, seals
    if made.name in HOOKED:
        _check_records(made, fault)


def _check_records(made: Matrix, fault: str) -> None:
    format_name, framework, layout = HOOKED[made.name]
    found = _shown(made, fault)
    assert found
    for name, shown in found.items():
        assert shown["format_name"] == format_name, name
        assert shown["saved_by"]["conflicts"] == [], shown["saved_by"]
        record = shown["saved_by"]["record"]
        assert (record["framework"], record.get("layout")) == (framework, layout), record
        assert (record["world_size"], record["data_version"]) == (made.rules.world, "toy")
        assert record["step"] in {int(number) for number in re.findall("[0-9]+", name)}
        assert set(record["versions"]) >= {"python", "torch"}


def _seals(made: Matrix, fault: str) -> dict[str, tuple[str, str]]:
    shown = _shown(made, fault)
    return {name: (found["format_name"], found["event"]) for name, found in shown.items()}


def _shown(made: Matrix, fault: str) -> dict[str, dict[str, Any]]:
    assert made.cluster is not None
    run: Path = made.rules.run_of(made.cluster.store / f"run-{fault}")
    found = {}
    for name in made.cluster.committed(str(run.relative_to(made.cluster.store))):
        done = cli("show", run / name, "--json")
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)
    return found
