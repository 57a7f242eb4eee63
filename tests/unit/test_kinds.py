"""Kinds of names."""

from __future__ import annotations

import dataclasses

import pytest

from ckptgate.model.kinds import DEFAULT_PATTERNS, NamePatterns


@pytest.mark.parametrize(
    "name",
    [
        "step-100",
        "step_100",
        "checkpoint-500",
        "checkpoint_3",
        "global_step42",
        "iter_0012000",
        "epoch=1-step=200.ckpt",
        "ep1-ba250",
        "100.orbax-checkpoint-tmp-1",
        "tmp_step_1",
        "step100-tmp",
        "step_4.tmp",
    ],
)
def test_a_framework_directory_is_a_checkpoint(name: str) -> None:
    assert DEFAULT_PATTERNS.is_checkpoint(name)


@pytest.mark.parametrize(
    "name", ["steps", "step", "Step-1", "logs", "tensorboard", "ep1", "my-step-1"]
)
def test_another_directory_is_none(name: str) -> None:
    assert not DEFAULT_PATTERNS.is_checkpoint(name)


def test_only_the_temporary_forms_wait_for_a_rename() -> None:
    assert DEFAULT_PATTERNS.is_temporary("5.orbax-checkpoint-tmp")
    assert DEFAULT_PATTERNS.is_temporary("anything.tmp")
    assert not DEFAULT_PATTERNS.is_temporary("step-5")


@pytest.mark.parametrize(
    "name",
    [
        "latest",
        "latest.txt",
        "latest_universal",
        "latest_checkpointed_iteration.txt",
        "dlrover_latest.txt",
        "LATEST",
        "last.ckpt",
        "last-v1.ckpt",
        "latest-rank0",
    ],
)
def test_a_pointer_is_known_by_its_name(name: str) -> None:
    assert DEFAULT_PATTERNS.is_pointer(name)


@pytest.mark.parametrize(
    "name", ["latest.log", "Latest", "last", "last-v1", "xlatest", "latest\nx"]
)
def test_another_name_is_no_pointer(name: str) -> None:
    assert not DEFAULT_PATTERNS.is_pointer(name)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz"])
def test_a_file_with_a_container_s_suffix_is_published_whole(suffix: str) -> None:
    assert DEFAULT_PATTERNS.is_whole("model" + suffix)
    assert not DEFAULT_PATTERNS.is_whole("model" + suffix + ".txt")


@pytest.mark.parametrize("name", [".tmp", ".step-1", ".ckptgate", ".latest", ".x.pt", ".pt", ""])
def test_a_hidden_name_is_of_no_kind(name: str) -> None:
    every = NamePatterns(
        checkpoints=("*",), temporaries=("*",), pointers=("*",), whole_suffixes=("",)
    )
    for patterns in (DEFAULT_PATTERNS, every) if name else (DEFAULT_PATTERNS,):
        assert not patterns.is_checkpoint(name)
        assert not patterns.is_temporary(name)
        assert not patterns.is_pointer(name)
        assert not patterns.is_whole(name)


def test_no_patterns_match_nothing() -> None:
    none = NamePatterns(checkpoints=(), temporaries=(), pointers=(), whole_suffixes=())
    assert not none.is_checkpoint("step-1")
    assert not none.is_pointer("latest")
    assert not none.is_whole("a.pt")


def test_configured_patterns_replace_the_defaults() -> None:
    mine = dataclasses.replace(DEFAULT_PATTERNS, checkpoints=("save[0-9]",))
    assert mine.is_checkpoint("save1")
    assert not mine.is_checkpoint("step-1")
    assert mine.is_checkpoint("step-1-tmp")
