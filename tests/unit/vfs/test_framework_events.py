"""What the frameworks' own markers and pointers mean here: an event, an early one, or nothing."""

from __future__ import annotations

import dataclasses
import os

import pytest
from msgspec.structs import replace
from tests.unit.formats.builders import dcp, deepspeed, hf_trainer, torch_file

from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import LocalBytes, NodeKind


def write(world, name, files):
    made = set()
    for path, data in files.items():
        for depth in range(path.count("/")):
            folder = "/".join(path.split("/")[: depth + 1])
            if folder not in made:
                made.add(folder)
                world.mkdir(world.a, f"{name}/{folder}")
        world.write(world.a, f"{name}/{path}", data)


def noted(world, name):
    row = world.attempt(name)
    return row.state, row.event, row.detail


def test_a_marker_of_one_rank_alone_is_noted_and_seals_nothing(world):
    world.mkdir(world.a, "checkpoint-4")
    write(world, "checkpoint-4", hf_trainer())
    assert noted(world, "checkpoint-4") == (AttemptState.OPEN, "", "hf-trainer-state")
    world.write(world.a, "checkpoint-4/rng_state_1.pth", torch_file({}))
    assert noted(world, "checkpoint-4")[0] is AttemptState.OPEN


def test_a_pointer_that_rank_0_writes_early_is_noted_at_its_target(world):
    for step in (6, 7):
        world.mkdir(world.a, f"global_step{step}")
        write(world, f"global_step{step}", deepspeed())
    world.write(world.a, "latest", b"global_step7")
    assert noted(world, "global_step7") == (AttemptState.OPEN, "", "deepspeed-latest")
    assert noted(world, "global_step6") == (AttemptState.OPEN, "", "")


def test_another_job_s_pointer_says_nothing_of_this_one_s_checkpoint(world):
    world.mkdir(world.a, "global_step7")
    write(world, "global_step7", deepspeed())
    world.write(world.b, "latest", b"global_step7")
    assert noted(world, "global_step7") == (AttemptState.OPEN, "", "")


def test_a_pointer_to_content_of_no_framework_is_no_event(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/weights.pt", torch_file({}))
    world.write(world.a, "latest", b"step-1")
    assert noted(world, "step-1") == (AttemptState.OPEN, "", "")


def test_a_tracker_that_follows_a_barrier_seals(world):
    """ByteCheckpoint: metadata below it came before, and was none."""
    world.mkdir(world.a, "global_step_4")
    write(world, "global_step_4", dcp("model") | dcp("optimizer"))
    assert noted(world, "global_step_4")[1] == ""
    world.write(world.a, "latest_checkpointed_iteration.txt_tmp_1", b"4")
    assert noted(world, "global_step_4")[1] == ""
    name = "latest_checkpointed_iteration.txt"
    world.rename(world.a, f"{name}_tmp_1", name)
    assert noted(world, "global_step_4") == (AttemptState.SEALED, "format", "tracker")


@pytest.mark.parametrize("name", ["epoch=0-step=2.ckpt", "iter_0000012", "checkpoint-4"])
def test_a_dcp_s_metadata_is_no_event_where_more_follows_it(world, name):
    """Lightning's `meta.pt`, Megatron's `metadata.json` and the Trainer's state come later."""
    world.mkdir(world.a, name)
    if name == "checkpoint-4":
        world.write(world.a, f"{name}/training_args.bin", torch_file({}))
    write(world, name, dcp())
    assert noted(world, name) == (AttemptState.OPEN, "", "")
    last = {"epoch=0-step=2.ckpt": "meta.pt", "iter_0000012": "metadata.json"}.get(name)
    if last is not None:
        world.write(world.a, f"{name}/{last}", b"{}")
        assert noted(world, name)[2] != ""


def test_a_checkpoint_that_its_rank_0_had_marked_is_hidden_when_a_rank_s_file_is_missing(world):
    """I8: a job that starts again in place must not resume from it."""
    world.mkdir(world.a, "checkpoint-4")
    files = hf_trainer()
    late = files.pop("rng_state_1.pth")
    write(world, "checkpoint-4", files)
    assert world.exists(world.a2, "checkpoint-4")
    world.die(world.a)
    assert not world.exists(world.a2, "checkpoint-4")
    assert late


def test_a_part_of_weights_is_not_hidden_when_its_writer_is_gone(world):
    """`cp -r` of some shards: nobody knows that they were to be all of it."""
    world.mkdir(world.outside, "step-1")
    world.write(world.outside, "step-1/model-00001-of-00002.safetensors", b"x")
    world.identify.dead.update({os.getpid()})
    assert world.exists(world.outside, "step-1")


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_new_job_waits_for_what_a_dead_one_had_finished_and_only_that(world, is_whole):
    """I11: it resumes from the newest save, though that is still on its way into the store."""
    world.mkdir(world.a, "checkpoint-4")
    files = hf_trainer()
    if not is_whole:
        del files["rng_state_1.pth"]
    write(world, "checkpoint-4", files)
    row = world.attempt("checkpoint-4")
    world.spool.update_attempt(
        row.id, attempt="checkpoint-4.0", is_joined=True, job_key="run:train-6"
    )
    world.die(world.a)
    slept = []

    def decide():
        slept.append(1)
        if len(slept) == 3:
            world.spool.update_attempt(row.id, state=AttemptState.ABANDONED)

    world.clock.on_sleep = decide
    world.names(world.s)
    assert len(slept) == (3 if is_whole else 0)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (-1,)], ids=["one", "both", "unknown"])
def test_what_one_rank_of_two_left_is_not_waited_for_where_each_writes(world, ranks):
    """The names of one rank's shards are complete in themselves; the decision knows better."""
    world.mkdir(world.a, "step-4")
    for rank in ranks:
        name = f"shard-{max(rank, 0) + 1:05d}-model-00001-of-00001.safetensors"
        world.write(world.a, f"step-4/{name}", b"x")
    row = world.attempt("step-4")
    world.spool.update_attempt(
        row.id, attempt="step-4.0", is_joined=True, job_key="run:train-6", world_size=2
    )
    world.die(world.a)
    files = world.spool.files_of_attempt(row.id)
    for (_, _, file), rank in zip(sorted(files), ranks, strict=True):
        world.spool.update_file(file.file, evidence=replace(file.evidence, rank=rank))
    slept = []

    def decide():
        slept.append(1)
        world.spool.update_attempt(row.id, state=AttemptState.ABANDONED)

    world.clock.on_sleep = decide
    world.names(world.s)
    assert bool(slept) == (ranks != (0,))


def left_by_a_dead_job(world):
    """A whole checkpoint of a job that is gone, joined and open."""
    world.mkdir(world.a, "checkpoint-4")
    write(world, "checkpoint-4", hf_trainer())
    row = world.attempt("checkpoint-4")
    world.spool.update_attempt(
        row.id, attempt="checkpoint-4.0", is_joined=True, job_key="run:train-6"
    )
    world.die(world.a)
    return row


def test_a_new_job_waits_for_what_is_sealed_here_and_not_yet_in_the_log(world):
    """I11: else this rank finds none, and that of a node that still waits finds it."""
    row = left_by_a_dead_job(world)
    world.spool.update_attempt(row.id, state=AttemptState.SEALED)
    slept = []

    def decide():
        slept.append(1)
        if len(slept) == 3:
            world.spool.update_attempt(row.id, state=AttemptState.ABORTED)

    world.clock.on_sleep = decide
    world.names(world.s)
    assert len(slept) == 3


def test_a_new_job_finds_what_the_publisher_has_read_in_the_log_and_the_mount_has_not(world):
    """I11: the mount's own reading is a moment old."""
    row = left_by_a_dead_job(world)
    asked = []
    old = world.catalog.view("", 0)
    new = dataclasses.replace(old, length=3, committed={"checkpoint-4": "checkpoint-4.0"})

    def view(run, max_age_s):
        asked.append(max_age_s)
        return old if max_age_s else new

    world.catalog.view = view
    world.spool.update_attempt(row.id, state=AttemptState.COMMITTED, manifest="0" * 64)
    assert world.exists(world.s, "checkpoint-4")
    assert 0.0 in asked


def test_what_is_decided_between_two_looks_of_a_new_job_is_found(world):
    """I11: its row is no longer open when the log that was read before doesn't have it."""
    row = left_by_a_dead_job(world)
    old = world.catalog.view("", 0)
    seen = {"view": old}
    world.catalog.view = lambda run, max_age_s: seen["view"] if max_age_s == 0 else old

    def decide():
        seen["view"] = dataclasses.replace(
            old, length=3, committed={"checkpoint-4": "checkpoint-4.0"}
        )
        world.spool.update_attempt(row.id, state=AttemptState.COMMITTED, manifest="0" * 64)

    world.clock.on_sleep = decide
    assert world.exists(world.s, "checkpoint-4")


@pytest.mark.parametrize("is_voted", [True, False])
def test_a_new_job_waits_for_what_other_nodes_have_of_a_dead_one_s_checkpoint(world, is_voted):
    """I11: this node has a part of it only; whether that is all, the other's vote tells."""
    world.mkdir(world.a, "checkpoint-4")
    files = hf_trainer()
    late = files.pop("rng_state_1.pth")
    write(world, "checkpoint-4", files)
    row = world.attempt("checkpoint-4")
    world.spool.update_attempt(
        row.id, attempt="checkpoint-4.0", is_joined=True, job_key="run:train-6"
    )
    world.die(world.a)
    world.catalog.is_on_several_nodes = True
    waited: list[float] = []

    def take_over():
        if is_voted and world.clock.monotonic() - began > 2 and not waited:
            waited.append(world.clock.monotonic())
            file = world.spool.add_file(state=FileState.STORED, local=LocalBytes.NONE).file
            node = world.spool.node(row.root)
            node = world.spool.add_node(
                replace(node, ino=0, kind=NodeKind.FILE, size=len(late), file=file)
            )
            world.spool.link(row.root, "rng_state_1.pth", node.ino)
        return False

    def decide():
        if waited and world.clock.monotonic() - waited[0] > 20:
            world.spool.update_attempt(row.id, state=AttemptState.ABANDONED)

    world.catalog.on_refresh = take_over
    world.clock.on_sleep = decide
    began = world.clock.monotonic()
    world.names(world.s)
    # In vain for as long as a vote may take; else until it is decided.
    assert world.clock.monotonic() - began == pytest.approx(22 if is_voted else 5, abs=1)


def test_a_partial_index_is_not_waited_for(world):
    """Nobody knows whether there is more: silence may seal it or not."""
    world.mkdir(world.a, "step-1")
    write(world, "step-1", {"model-00001-of-00001.safetensors": b"x"})
    world.write(world.a, "step-1/model.safetensors.index.json", b'{"weight_map": {}}')
    row = world.attempt("step-1")
    world.spool.update_attempt(row.id, attempt="step-1.0", is_joined=True, job_key="run:train-6")
    world.die(world.a)
    began = world.clock.monotonic()
    world.names(world.s)
    assert world.clock.monotonic() == began
