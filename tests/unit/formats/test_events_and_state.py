"""Which operations say that a checkpoint is whole, for whom, and what state is in it."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from tests.unit.formats.builders import (
    MemoryTree,
    arguments,
    dcp,
    dcp_metadata,
    deepspeed,
    hf_trainer,
    index_file,
    megatron_legacy,
    safetensors_file,
    torch_file,
)
from tests.unit.formats.layouts import LAYOUTS

from ckptgate.errors import IntegrityError
from ckptgate.formats import registry
from ckptgate.formats.base import BytesView
from ckptgate.formats.torch_pickle import number, read_torch_pickle, value_of

# Format: the file that is the event, its name, whether it speaks of one rank only.
EVENTS = {
    "hf-trainer": ("trainer_state.json", "hf-trainer-state", True),
    "lightning": ("meta.pt", "lightning-meta", False),
    "dcp": (".metadata", "dcp-metadata", False),
    "megatron": ("metadata.json", "megatron-metadata", True),
    "orbax": ("commit_success.txt", "orbax-commit", False),
    "torchsnapshot": (".snapshot_metadata", "torchsnapshot-metadata", False),
}
POINTERS = {
    "deepspeed": ("latest", "deepspeed-latest", True),
    "megatron": ("latest_checkpointed_iteration.txt", "tracker", True),
    "dcp": ("latest_checkpointed_iteration.txt", "tracker", False),
    "nanotron": ("latest.txt", "nanotron-latest", True),
}


@pytest.mark.parametrize("which", sorted(LAYOUTS))
def test_one_file_at_most_is_the_commit_event(which: str) -> None:
    layout = LAYOUTS[which]()
    paths = {*layout.files, "commit_success.txt"}
    found = {
        (path, event[1].name, event[1].is_early)
        for path in paths
        if (event := registry.commit_event(layout.files, "close", path, "", layout.name))
    }
    wanted = EVENTS.get(layout.format)
    assert found == ({wanted} if wanted is not None and wanted[0] in paths else set())


@pytest.mark.parametrize("which", sorted(LAYOUTS))
def test_a_pointer_is_an_event_where_the_framework_ends_a_save_so(which: str) -> None:
    layout = LAYOUTS[which]()
    pointers = ("latest", "latest.txt", "latest_checkpointed_iteration.txt", "last.ckpt", "LATEST")
    found = {
        (pointer, event[1].name, event[1].is_early)
        for pointer in pointers
        if (event := registry.pointer_event(layout.files, pointer, layout.name))
    }
    assert found == ({POINTERS[layout.format]} if layout.format in POINTERS else set())


def parts(which: str) -> set[str]:
    layout = LAYOUTS[which]()
    known = registry.recognise(layout.files, layout.name)
    assert known is not None
    found = registry.inventory(known, MemoryTree(layout.files)).parts
    assert all(set(paths) <= set(layout.files) for paths in found.values())
    return set(found)


@pytest.mark.parametrize(
    ("which", "state"),
    [
        ("hf trainer", {"model", "optimizer", "scheduler", "rng", "trainer"}),
        ("hf trainer, model only", {"model", "trainer"}),
        ("hf trainer with deepspeed", {"model", "optimizer", "rng", "trainer"}),
        ("hf trainer with fsdp", {"model", "optimizer", "scheduler", "rng", "trainer"}),
        ("deepspeed 2, bf16", {"model", "optimizer"}),
        ("accelerate", {"model", "optimizer", "scheduler", "rng", "data", "trainer"}),
        ("torchtitan", {"model", "optimizer", "scheduler", "data", "trainer"}),
        ("megatron, old layout", {"model", "optimizer", "scheduler", "rng"}),
        ("orbax", {"model", "optimizer"}),
        ("nanotron", {"model", "optimizer", "scheduler", "rng", "trainer"}),
        ("hf weights", {"model"}),
    ],
)
def test_what_state_a_checkpoint_holds_is_told_without_loading_it(
    which: str, state: set[str]
) -> None:
    assert parts(which) == state


@pytest.mark.parametrize(
    ("which", "ranks"),
    [
        ("hf trainer", {"rng": (0, 1)}),
        ("hf trainer, one rank", {"rng": (0,)}),
        ("accelerate", {"rng": (0, 1)}),
        ("composer", {"model": (0, 1)}),
        ("fairseq2", {"trainer": (0, 1)}),
        ("nvrx", {"model": (0, 1)}),
        ("olmo", {"trainer": (0, 1)}),
        ("hf weights", {}),
    ],
)
def test_whose_files_of_a_state_are_there_is_told(
    which: str, ranks: dict[str, tuple[int, ...]]
) -> None:
    layout = LAYOUTS[which]()
    known = registry.recognise(layout.files, layout.name)
    assert registry.inventory(known, MemoryTree(layout.files)).ranks == ranks


def test_the_step_is_read_where_a_file_says_it() -> None:
    for files, name, step in (
        (hf_trainer(), "checkpoint-4", 4),
        (deepspeed(), "global_step7", 7),
        (megatron_legacy(), "iter_0012000", 12000),
        (dcp(), "step-4", None),
    ):
        known = registry.recognise(files, name)
        assert known is not None
        assert registry.inventory(known, MemoryTree(files)).step == step


def expected(files: dict[str, bytes], name: str) -> set[str]:
    known = registry.recognise(files, name)
    assert known is not None
    return set(registry.expected(known, MemoryTree(files)).files)


# What is legal


def test_a_trainer_s_weights_may_have_any_name() -> None:
    files = {k: v for k, v in hf_trainer(ranks=1).items() if k != "model.safetensors"}
    assert "model.safetensors" in expected(files, "checkpoint-4")
    for own in ("ema_weights.msgpack", "adapter_model.bin", "model.ckpt", "lora/x.safetensors"):
        assert "model.safetensors" not in expected(files | {own: b"x"}, "checkpoint-4")


def test_the_arguments_say_how_many_ranks_a_trainer_had() -> None:
    files = hf_trainer(ranks=4)
    known = registry.recognise(files)
    assert known is not None
    found = registry.expected(known, MemoryTree(files))
    assert (found.world_size, found.rank_files) == (4, ("rng_state_{rank}.pth",))
    # Of a job that was resumed on fewer ranks the old files are still there.
    fewer = files | {"training_args.bin": arguments(world_size=2)}
    assert registry.expected(known, MemoryTree(fewer)).world_size == 2


def test_shards_of_an_older_number_are_not_waited_for_where_an_index_tells() -> None:
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    files = {shard: safetensors_file() for shard in shards}
    files["model.safetensors.index.json"] = index_file(shards)
    files["model-00003-of-00003.safetensors"] = safetensors_file()
    assert "model-00001-of-00003.safetensors" not in expected(files, "step-1")


def test_a_rank_of_the_hf_writer_owes_each_file_that_the_names_speak_of() -> None:
    """I8: it may have died between two of them, and nothing else would tell."""
    names = [f"shard-0000{r}-model-0000{n}-of-00002.safetensors" for r in (1, 2) for n in (1, 2)]
    for gone in names:
        rest = dict.fromkeys((name for name in names if name != gone), safetensors_file())
        assert gone in expected(rest, "step-4")
    first = dict.fromkeys(names[::2], safetensors_file())
    assert expected(first, "step-4") == set(names)
    huge = {"shard-99999-model-00001-of-99999.safetensors": b"x"}
    assert expected(huge, "step-4") == set(huge)


def test_numbered_files_of_a_data_set_are_no_weights() -> None:
    files = hf_trainer(ranks=1) | {"data/train-00000-of-00003.bin": b"x"}
    assert not any("train-" in path for path in expected(files, "checkpoint-4"))


def test_deepspeed_s_partitions_go_by_the_optimizer_s_own_count() -> None:
    """With MiCS and the like a partition is shared by fewer ranks than there are."""
    files = deepspeed(stage=2, dp=2) | {
        "mp_rank_00_model_states.pt": torch_file({"dp_world_size": 8, "mp_world_size": 1})
    }
    assert len(expected(files, "global_step7")) == 3


def test_deepspeed_without_readable_states_goes_by_its_names() -> None:
    files = dict.fromkeys(deepspeed(stage=3, dp=4), b"not a torch file")
    gone = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    rest = {path: data for path, data in files.items() if path != gone}
    assert gone in expected(rest, "global_step7")
    assert expected(files, "global_step7") == set(files)


def test_a_metadata_of_something_else_in_a_folder_is_not_a_dcp() -> None:
    files = hf_trainer(ranks=1) | {"cache/.metadata": b"{}"}
    assert "cache/.metadata" not in expected(files, "checkpoint-4")


def test_a_dcp_without_data_in_some_rank_is_whole() -> None:
    files = {".metadata": dcp_metadata({"__0_0.distcp": 4}), "__0_0.distcp": b"abcd"}
    files["__1_0.distcp"] = b""
    assert expected(files, "step-1") == {".metadata", "__0_0.distcp"}


# What is hostile


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call = (call, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("call", [os.system, eval, getattr, pickle.loads, open])
def test_nothing_in_a_torch_file_is_executed(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """I13: it becomes inert values, and what hangs on them is not believed."""

    def never(*args: object) -> object:
        raise AssertionError(args)

    data = torch_file({"dp_world_size": Evil(call, "touch /tmp/never", "w"), "mp_world_size": 1})
    monkeypatch.setattr(os, "system", never)
    monkeypatch.setattr("importlib.import_module", never)
    saved = read_torch_pickle(BytesView(data), "x")
    assert number(value_of(saved, "dp_world_size")) is None
    assert number(value_of(saved, "mp_world_size")) == 1
    assert not os.path.exists("/tmp/never")


@pytest.mark.parametrize("value", [10**9, -1, True, "8", None, 2.0])
def test_an_impossible_count_is_none(value: object) -> None:
    """I13: no huge expected set is made of it."""
    files = deepspeed(stage=2) | {
        "mp_rank_00_model_states.pt": torch_file({"dp_world_size": value, "mp_world_size": value})
    }
    assert len(expected(files, "global_step7")) == 3


def test_names_that_speak_of_too_many_files_are_not_taken_at_their_word() -> None:
    """I13"""
    files = {"optimizer/optimizer_pp-0-of-99999_dp-0-of-99999_tp-0-of-9_exp-0-of-1.pt": b"x"}
    assert len(expected(files, "10")) < 10
    shard = {"model-00001-of-99999.safetensors": b"x"}
    assert len(expected(shard, "step-1")) < 10


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", ""])
def test_no_document_refers_to_a_place_outside(path: str) -> None:
    """I13"""
    index = {"model.safetensors.index.json": index_file([path])}
    snapshot = {".snapshot_metadata": f"world_size: 1\nm:\n  location: '{path}'\n".encode()}
    for files in (index, snapshot):
        with pytest.raises(IntegrityError) as caught:
            expected(files, "step-1")
        assert caught.value.subject in files


def test_megatron_s_old_layout_goes_by_its_arguments() -> None:
    files = megatron_legacy(tp=2, pp=2)
    gone = {path for path in files if path.startswith("mp_rank_01_001")}
    rest = {path: data for path, data in files.items() if path not in gone}
    assert gone <= expected(rest, "iter_0012000")
