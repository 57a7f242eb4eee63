"""What every framework's module checks, whichever framework it is."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.e2e.harness import cli
from tests.frameworks.matrix import Matrix, matrix
from tests.frameworks.trainings.known import needs

__all__ = ["SEALS", "check", "prepared"]

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


@contextlib.contextmanager
def prepared(name: str, require, tmp_path_factory) -> Iterator[Matrix]:
    """A framework's cases, on two nodes' mounts."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(platform.machine() == "x86_64", "system calls are counted on x86-64 only")
    top, _, _ = needs(name).partition(".")
    require(importlib.util.find_spec(top), f"no {top}: pip install --group frameworks")
    with matrix(name, tmp_path_factory.mktemp(name), mounted=True) as made:
        yield made


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
        assert set(seals.values()) == {SEALS[made.name]}, seals


def _seals(made: Matrix, fault: str) -> dict[str, tuple[str, str]]:
    assert made.cluster is not None
    run: Path = made.rules.run_of(made.cluster.store / f"run-{fault}")
    found = {}
    for name in made.cluster.committed(str(run.relative_to(made.cluster.store))):
        done = cli("show", run / name, "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        found[name] = (shown["format_name"], shown["event"])
    return found
