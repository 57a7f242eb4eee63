"""Markers that a framework writes before its other ranks are done: held until the rest is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from tests.engine_harness import RUN, Cluster, StagedNode
from tests.unit.formats.builders import (
    arguments,
    deepspeed,
    hf_trainer,
    safetensors_file,
    torch_file,
)

from ckptgate.engine.pace import Pace
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import AttemptRow

DETAIL = "hf-trainer-state"
LATE = "rng_state_1.pth"


def write(node: StagedNode, row: AttemptRow, files: Mapping[str, bytes], rank: int = 0) -> None:
    for path, data in files.items():
        node.write(row, path, data, rank=rank)


def early(node: StagedNode, row: AttemptRow, detail: str = DETAIL) -> None:
    """The mount saw an early event."""
    node.raw.update_attempt(row.id, detail=detail)


def without(files: Mapping[str, bytes], *names: str) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if path not in names}


def wait(cluster: Cluster, seconds: int) -> None:
    """Let the time pass, whether anything moves or not."""
    for _ in range(seconds):
        for node in cluster.nodes.values():
            node.step()
        cluster.clock.advance(1.0)


def test_a_rank_that_is_late_on_the_same_node_is_waited_for(cluster: Cluster) -> None:
    """I1: HF Trainer's rank 0 is done, rank 1 has not opened its file yet."""
    node = cluster.node("a")
    row = node.begin("checkpoint-4", world_size=2)
    write(node, row, without(hf_trainer(), LATE))
    early(node, row)
    wait(cluster, 20)
    assert "checkpoint-4.0" not in cluster.state().attempts
    assert not node.fresh(row).is_voted, "rank 1 must still be able to write"
    assert any(LATE in line and "rank 1" in line for line in node.fresh(row).missing)
    write(node, row, {LATE: torch_file({})}, rank=1)
    cluster.settle()
    cluster.check_invariants()
    assert set(cluster.files("checkpoint-4")) >= set(hf_trainer())
    assert node.fresh(row).state is AttemptState.COMMITTED


def test_a_rank_that_is_late_on_another_node_is_waited_for(cluster: Cluster) -> None:
    """I1"""
    a, b = cluster.node("a"), cluster.node("b")
    row = a.begin("checkpoint-4", world_size=2)
    write(a, row, without(hf_trainer(), LATE))
    early(a, row)
    wait(cluster, 20)
    assert cluster.state().current == {}
    other = b.begin("checkpoint-4", world_size=2)
    write(b, other, {LATE: torch_file({})}, rank=1)
    cluster.settle()
    cluster.check_invariants()
    assert LATE in cluster.files("checkpoint-4")


def test_who_decides_looks_often_however_long_the_others_take(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    row = a.begin("checkpoint-4", world_size=2)
    write(a, row, without(hf_trainer(), LATE))
    early(a, row)
    write(b, b.begin("checkpoint-4", world_size=2), {"tokenizer.json": b"{}"}, rank=1)
    cluster.settle(rounds=5)

    def longest_pause(node: StagedNode) -> float:
        stop, pauses = threading.Event(), [0.0]

        def sleep(pause_s: float) -> None:
            pauses.append(pause_s)
            cluster.clock.advance(pause_s)
            if sum(pauses) > 40:
                stop.set()

        node.publisher.run(stop, sleep)
        return max(pauses)

    assert longest_pause(a) == cluster.settings.decide_interval_s
    assert longest_pause(b) == cluster.settings.idle_interval_s


def test_held_checkpoints_are_sealed_in_the_order_of_their_saves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: the newest SEAL is what pointers follow. A look that took long delays the next one."""
    node = cluster.node("a")
    rows = [node.begin(f"global_step{n}", world_size=2) for n in (2, 4)]
    real = Pace.is_due

    def is_due(self: Pace, key: object) -> bool:
        return key != rows[0].id and real(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "is_due", is_due)
        for row in rows:
            write(node, row, deepspeed(stage=2))
            node.point("latest", row.name, content=row.name)
            early(node, row, "deepspeed-latest")
        cluster.settle()
        assert not cluster.state().attempts
    cluster.settle()
    assert list(cluster.state().current) == ["global_step2", "global_step4"]
    assert cluster.store.pointer_content(RUN, "latest") == "global_step4"


def test_a_node_tells_of_its_last_file_at_once(cluster: Cluster) -> None:
    """Between votes that aren't final there is a second, but only while more is to come."""
    node = cluster.node("a")
    row = node.begin("checkpoint-4", world_size=2)
    write(node, row, {"tokenizer.json": b"{}"})
    cluster.settle(rounds=3, tick_s=0.1)
    votes = node.fresh(row).votes_count
    file = node.write(row, "model.bin", b"x", is_open=True)
    write(node, row, {"config.json": b"{}"})
    cluster.settle(rounds=4, tick_s=0.1)
    assert node.fresh(row).votes_count == votes
    node.close_file(file)
    cluster.settle(rounds=3, tick_s=0.1)
    assert node.fresh(row).votes_count == votes + 1


def test_the_marker_of_a_whole_checkpoint_commits_at_once(cluster: Cluster) -> None:
    node = cluster.node("a")
    for number, files in enumerate((hf_trainer(ranks=1), hf_trainer(is_model_only=True))):
        row = node.begin(f"checkpoint-{number}")
        write(node, row, files)
        early(node, row)
        cluster.settle(rounds=10, tick_s=0.2)
        assert node.fresh(row).state is AttemptState.COMMITTED


def test_a_rank_that_never_comes_is_named_in_the_abort(cluster: Cluster) -> None:
    """I6: and no pointer moves."""
    node = cluster.node("a")
    row = node.begin("global_step7", world_size=2)
    files = deepspeed(stage=2)
    late = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    write(node, row, without(files, late))
    node.point("latest", "global_step7", content="global_step7")
    early(node, row, "deepspeed-latest")
    wait(cluster, 5)
    for _ in range(25):
        cluster.clock.advance(30.0)
        wait(cluster, 1)
    view = cluster.state().attempts["global_step7.0"]
    assert node.fresh(row).state is AttemptState.ABORTED
    assert "deepspeed-latest" in view.reason
    assert any(late in line for line in view.missing)
    assert cluster.state().pointers == {}


def test_a_writer_that_goes_on_keeps_the_deadline_away(cluster: Cluster) -> None:
    """I12"""
    node = cluster.node("a")
    row = node.begin("checkpoint-4", world_size=2)
    write(node, row, without(hf_trainer(), LATE))
    early(node, row)
    for minute in range(25):
        write(node, row, {f"log-{minute}.txt": b"x"}, rank=1)
        cluster.clock.advance(30.0)
        wait(cluster, 1)
    assert node.fresh(row).state is AttemptState.OPEN
    write(node, row, {LATE: torch_file({})}, rank=1)
    cluster.settle()
    assert node.fresh(row).state is AttemptState.COMMITTED


def test_without_a_world_size_only_silence_ends_the_wait(cluster: Cluster) -> None:
    """Nobody says how many ranks there are: rank 1 may be yet to begin."""
    node = cluster.node("a")
    row = node.begin("checkpoint-4")
    files = without(hf_trainer(), LATE, "training_args.bin")
    write(node, row, files)
    early(node, row)
    wait(cluster, 20)
    assert node.fresh(row).state is AttemptState.OPEN
    wait(cluster, 40)
    assert node.fresh(row).state is AttemptState.COMMITTED


def test_a_sharded_model_is_waited_for_by_its_index(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("checkpoint-4")
    shard = "model-00002-of-00002.safetensors"
    files = hf_trainer(ranks=1) | {
        "model-00001-of-00002.safetensors": safetensors_file(),
        "model.safetensors.index.json": b'{"weight_map": {"a": "%s"}}' % shard.encode(),
    }
    write(node, row, files)
    early(node, row)
    wait(cluster, 20)
    assert any(shard in line for line in node.fresh(row).missing)
    write(node, row, {shard: safetensors_file()})
    cluster.settle()
    assert node.fresh(row).state is AttemptState.COMMITTED


def test_a_save_that_says_it_is_under_way_is_waited_for(cluster: Cluster) -> None:
    """The Trainer's save at a preemption has its own mark."""
    node = cluster.node("a")
    row = node.begin("checkpoint-4")
    mark = "checkpoint-is-incomplete.txt"
    write(node, row, hf_trainer(ranks=1) | {mark: b"saving"})
    early(node, row)
    wait(cluster, 20)
    assert any(mark in line for line in node.fresh(row).missing)
    with node.raw.transaction():
        child = node.raw.child(row.root, mark)
        assert child is not None
        node.raw.unlink(row.root, mark)
        node.raw.drop_node(child.ino)
        node.raw.update_attempt(row.id, write_ns=cluster.clock.now_ns())
    cluster.settle()
    assert node.fresh(row).state is AttemptState.COMMITTED


def committed(cluster: Cluster, node: StagedNode) -> AttemptRow:
    row = node.begin("checkpoint-4", world_size=2)
    write(node, row, without(hf_trainer(), LATE))
    write(node, row, {LATE: torch_file({})}, rank=1)
    early(node, row)
    cluster.settle()
    assert node.fresh(row).state is AttemptState.COMMITTED
    return node.fresh(row)


def test_a_state_that_is_edited_in_place_is_a_revision_of_its_own(cluster: Cluster) -> None:
    """The rest of the checkpoint is not to be written anew for that."""
    node = cluster.node("a")
    base = committed(cluster, node)
    row = node.begin("checkpoint-4", base=base, world_size=2)
    write(node, row, {"trainer_state.json": b'{"global_step": 4, "best_metric": 1}'})
    early(node, row)
    cluster.settle()
    cluster.check_invariants()
    assert b"best_metric" in cluster.files("checkpoint-4")["trainer_state.json"]


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_tokenizer_that_is_added_later_is_a_revision_of_its_own(
    cluster: Cluster, is_marked: bool
) -> None:
    node = cluster.node("a")
    base = committed(cluster, node)
    row = node.begin("checkpoint-4", base=base, world_size=2)
    write(node, row, {"tokenizer.json": b"{}"})
    if is_marked:
        write(node, row, {"trainer_state.json": b'{"global_step": 5}'})
        early(node, row)
    wait(cluster, 60)
    assert "tokenizer.json" in cluster.files("checkpoint-4")


def test_a_step_that_is_saved_again_waits_for_every_rank_s_new_file(cluster: Cluster) -> None:
    """I1: the base's file is in the place of the one that is still to come."""
    node = cluster.node("a")
    base = committed(cluster, node)
    row = node.begin("checkpoint-4", base=base, world_size=2)
    anew = hf_trainer() | {"training_args.bin": arguments(), "optimizer.pt": torch_file({"a": 1})}
    write(node, row, without(anew, LATE))
    early(node, row)
    wait(cluster, 20)
    assert node.fresh(row).state is AttemptState.OPEN
    assert any(LATE in line for line in node.fresh(row).missing)
    write(node, row, {LATE: torch_file({"b": 2})}, rank=1)
    cluster.settle()
    assert cluster.files("checkpoint-4")[LATE] == torch_file({"b": 2})
    assert cluster.files("checkpoint-4")["optimizer.pt"] == torch_file({"a": 1})


@pytest.mark.parametrize("is_said", [True, False])
def test_a_step_that_is_saved_again_by_fewer_ranks_waits_for_those_only(
    cluster: Cluster, is_said: bool
) -> None:
    """Files of ranks that are no more stay behind, and nobody will write them anew."""
    node = cluster.node("a")
    row = node.begin("checkpoint-4", world_size=4)
    write(node, row, hf_trainer(ranks=4))
    early(node, row)
    cluster.settle()
    base = node.fresh(row)
    assert base.state is AttemptState.COMMITTED
    row = node.begin("checkpoint-4", base=base, world_size=2)
    states = [path for path in hf_trainer() if path.endswith((".pt", ".pth"))]
    anew = {path: torch_file({"new": path}) for path in states}
    anew["trainer_state.json"] = b'{"global_step": 5}'
    anew |= {"model.safetensors": safetensors_file(2)}
    anew["training_args.bin"] = arguments(world_size=2) if is_said else torch_file({"lost": 1})
    write(node, row, without(anew, LATE))
    early(node, row)
    wait(cluster, 20)
    assert node.fresh(row).state is AttemptState.OPEN
    write(node, row, {LATE: anew[LATE]}, rank=1)
    cluster.settle()
    cluster.check_invariants()
    assert node.fresh(row).state is AttemptState.COMMITTED, node.fresh(row).missing
    assert cluster.files("checkpoint-4")[LATE] == anew[LATE]
