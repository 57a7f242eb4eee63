"""Pointers: which values the log gives them, and when."""

from __future__ import annotations

import pickle

import pytest
from tests.engine_harness import RUN, Cluster
from tests.unit.engine_write.test_saves import SESSION, entries, save
from tests.unit.formats.builders import safetensors_file

from ckptgate.engine.settling import Settling
from ckptgate.model.entries import Point
from ckptgate.ports.spool import HandleRow


def test_a_pointer_moves_only_with_its_commit(cluster: Cluster) -> None:
    """I5: until then the previous value stands."""
    node = cluster.node("a")
    save(node, "step-1", {"a.txt": b"1"})
    cluster.settle()
    row = node.begin("step-2", job=SESSION)
    node.write(row, "a.txt", b"2", rank=0)
    node.point("latest", "step-2", content="step-2", job=SESSION)
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"
    assert len(node.raw.pending()) == 1
    node.commit(row)
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-2"
    assert cluster.store.plain_stat(f"{RUN}/latest").kind == "file"
    assert node.raw.pending() == []


def test_a_text_that_was_written_again_before_its_commit_is_a_text_in_it(cluster: Cluster) -> None:
    """I5: a link in its place would be followed by the next start's `open(latest, "w")`."""
    node = cluster.node("a")
    rows = [node.begin(f"step-{step}", job=SESSION) for step in (1, 2)]
    for row in rows:
        node.write(row, "a.txt", b"1", rank=0)
        node.point("latest", row.name, content=row.name, job=SESSION)
    for row in rows:
        node.commit(row)
        cluster.settle()
        assert cluster.store.pointer_content(RUN, "latest") == row.name
        assert cluster.store.plain_stat(f"{RUN}/latest").kind == "file"
    assert node.raw.pending() == []


def test_a_text_that_is_just_written_again_is_not_taken_for_the_last_one(cluster: Cluster) -> None:
    """I5: its target is still the committed one, its bytes name the next."""
    node = cluster.node("a")
    save(node, "step-1", {"a.txt": b"1"}, job=SESSION)
    cluster.settle()
    node.point("latest", "step-1", content="step-2", job=SESSION)
    (row,) = node.raw.pending()
    assert row.ino is not None
    held = node.raw.node(row.ino)
    assert held is not None
    assert held.file is not None
    handle = HandleRow(fh=node.raw.next_handle(), ino=row.ino, file=held.file, pid=1, start=1)
    node.raw.add_handle(handle)
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"
    assert cluster.state().pointers["latest"].value.content == "step-1"
    node.raw.update_handle(handle.fh, is_closed=True)
    cluster.settle()
    assert cluster.state().pointers["latest"].value.content == "step-2"


def test_beside_accelerate_s_checkpoints_there_is_no_name_of_ours(cluster: Cluster) -> None:
    """It takes the number in every name that it finds there, and fails without one."""
    node = cluster.node("a")
    files = {"random_states_0.pkl": pickle.dumps({}), "model.safetensors": safetensors_file()}
    save(node, "checkpoint_0", files)
    cluster.settle()
    assert set(cluster.state().current) == {"checkpoint_0"}
    assert cluster.state().pointers == {}
    save(node, "step-1", {"a.txt": b"1"})
    cluster.settle()
    assert set(cluster.state().pointers) == {"latest"}


def test_an_older_commit_that_comes_late_does_not_move_latest_back(cluster: Cluster) -> None:
    """I5: the pointer follows the newest SEAL, whatever is committed last."""
    a, b = cluster.node("a"), cluster.node("b")
    old = a.begin("step-1")
    late = a.write(old, "a.txt", b"1", rank=0, is_open=True)
    cluster.settle()
    a.event(old, "explicit")
    a.raw.update_attempt(old.id, committed_all=True)
    cluster.settle()
    save(b, "step-2", {"a.txt": b"2"}, job="run:job-1")
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-2"
    a.close_file(late)
    cluster.settle()
    assert set(cluster.state().current) == {"step-1", "step-2"}
    assert cluster.store.pointer_content(RUN, "latest") == "step-2"


def test_a_pointer_written_after_its_target_was_committed_is_a_decision(cluster: Cluster) -> None:
    """I5: back only by POINT."""
    node = cluster.node("a")
    for step in (1, 2):
        save(node, f"step-{step}", {"a.txt": b"%d" % step})
        cluster.settle()
    node.point("latest", "step-1", job=SESSION)
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"
    assert node.raw.pending() == []


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_pointer_written_after_its_commit_doesnt_outdo_the_next_one(
    cluster: Cluster, is_lost: bool, is_last: bool
) -> None:
    """I5: a decision of its own would be newer than the next checkpoint's SEAL.

    A slow node's `latest` of step 1 came after that was committed, and step 2 is sealed already.
    """
    a, b = cluster.node("a"), cluster.node("b")
    save(a, "step-1", {"a.txt": b"1"})
    cluster.settle()
    rows = [node.begin("step-2") for node in (a, b)]
    for number, (node, row) in enumerate(zip((a, b), rows, strict=True)):
        node.write(row, f"{number}.txt", b"2", rank=number, is_open=number == 1)
    cluster.settle(rounds=3)
    a.event(rows[0], "format", "marker")
    a.point("latest", "step-1", content="step-1")
    if is_last:
        cluster.settle()
    a.point("latest", "step-2", content="step-2")
    cluster.settle()
    assert cluster.state().attempts["step-2.0"].seal_index >= 0
    assert set(cluster.state().current) == {"step-1"}
    if is_lost:
        a.publisher.request_abort(rows[0].id, "a test")
    else:
        b.close_file(b.raw.handles_of_attempt(rows[1].id)[0].file)
    cluster.settle()
    wanted = "step-1" if is_lost else "step-2"
    assert cluster.store.pointer_content(RUN, "latest") == wanted
    assert not [row for row in a.raw.pending() if row.target == wanted]


def test_a_pointer_that_came_true_and_was_moved_on_by_another_job_is_not_taken_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: its publisher may come to its pending row only after that."""
    a, b = cluster.node("a"), cluster.node("b")
    row = a.begin("step-1", job=SESSION)
    a.write(row, "a.txt", b"1", rank=0)
    a.point("latest", "step-1", content="step-1", job=SESSION)
    a.commit(row)
    with monkeypatch.context() as patch:
        patch.setattr(Settling, "step", lambda self, log: False)
        cluster.settle()
        row = b.begin("step-2", job="session:b/1@2")
        b.write(row, "a.txt", b"2", rank=0)
        b.point("latest", "step-2", content="step-2", job="session:b/1@2")
        b.commit(row)
        cluster.settle()
    assert len(a.raw.pending()) == 1
    cluster.settle()
    assert a.raw.pending() == b.raw.pending() == []
    assert cluster.store.pointer_content(RUN, "latest") == "step-2"
    assert entries(cluster, Point) == []
    a.point("latest", "step-1", content="step-1", job=SESSION)
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"


def test_a_damaged_pointer_in_the_store_is_rebuilt_from_the_log(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(node, "step-1", {"a.txt": b"1"})
    cluster.settle()
    cluster.store.remove_pointer(RUN, "latest")
    node = cluster.node("a")
    cluster.settle()
    assert cluster.store.pointer_content(RUN, "latest") == "step-1"
