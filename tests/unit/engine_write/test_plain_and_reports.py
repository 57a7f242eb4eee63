"""Plain names on their way to the store; status and verify."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine_harness import RUN, Cluster, StagedNode

from ckptgate.engine.attempt_status import Reader
from ckptgate.engine.status import status
from ckptgate.engine.verify import verify_checkpoint
from ckptgate.errors import IntegrityError, MissingError
from ckptgate.model.documents import Evidence
from ckptgate.model.states import FileState
from ckptgate.ports.spool import (
    ROOT_INO,
    WRITERS_META,
    HandleRow,
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    PlainOpKind,
    PlainOpRow,
)
from ckptgate.testing.faults import FaultPlan, FaultyStore
from ckptgate_adapters.posix_store import PosixStore

SESSION = "session:a/1@2"


def plain_file(node: StagedNode, name: str, data: bytes, *, is_named: bool = True) -> NodeRow:
    spool = node.raw
    with spool.transaction():
        file = spool.add_file(state=FileState.QUIET)
        Path(spool.data_path(file.file)).write_bytes(data)
        made = spool.add_node(
            replace(node._node(NodeKind.FILE), file=file.file, plain_path=name, size=len(data))
        )
        if is_named:
            spool.link(ROOT_INO, name, made.ino)
    return made


def queue(node: StagedNode, op: PlainOpKind, path: str, to: str = "", ino: int | None = None):
    node.raw.add_plain_op(PlainOpRow(id=0, op=op, path=path, to=to, ino=ino, mode=0o755))


def text(cluster: Cluster, path: str) -> bytes:
    return cluster.store.plain_read(path, 0, 1000)


def reader(node: StagedNode) -> Reader:
    return Reader(spool=node.raw, membership=node.membership)


def npz() -> bytes:
    """A whole zip of arrays."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
        body = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
        archive.writestr("a.npy", header + body + bytes(4))
    return buffer.getvalue()


def test_queued_operations_happen_in_order(cluster: Cluster) -> None:
    node = cluster.node("a")
    made = plain_file(node, "log.txt", b"hello")
    queue(node, PlainOpKind.MKDIR, "dir")
    queue(node, PlainOpKind.PUT, "log.txt", ino=made.ino)
    queue(node, PlainOpKind.RENAME, "log.txt", "dir/log.txt")
    queue(node, PlainOpKind.SYMLINK, "dir/link", "log.txt")
    queue(node, PlainOpKind.RENAME, "never-there", "dir/x")
    queue(node, PlainOpKind.MKDIR, "gone")
    queue(node, PlainOpKind.RMDIR, "gone")
    node.raw.update_node(made.ino, plain_path="log.txt")
    node.step()
    assert node.raw.plain_ops() == []
    assert text(cluster, "dir/log.txt") == b"hello"
    assert {entry.name for entry in cluster.store.plain_list("dir")} == {"log.txt", "link"}


def test_what_fails_stays_queued_and_what_follows_waits(cluster: Cluster) -> None:
    """I11: a lost request of the mirror costs only time."""
    plan = FaultPlan(at=1, calls=frozenset({"plain_mkdir"}))
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    queue(node, PlainOpKind.MKDIR, "a")
    queue(node, PlainOpKind.MKDIR, "b")
    node.step()
    assert len(node.raw.plain_ops()) == 2
    assert node.kinds() == ["plain-failed"]
    cluster.clock.advance(1.0)
    node.step()
    assert {entry.name for entry in cluster.store.plain_list("")} >= {"a", "b"}


def test_a_live_file_follows_its_writer(cluster: Cluster) -> None:
    node = cluster.node("a")
    made = plain_file(node, "log.txt", b"1")
    assert made.file is not None
    handle = HandleRow(fh=node.raw.next_handle(), ino=made.ino, file=made.file, pid=1, start=1)
    node.raw.add_handle(handle)
    node.step()
    assert text(cluster, "log.txt") == b"1"
    with open(node.raw.data_path(made.file), "ab") as stream:
        stream.write(b"2")
    node.step()
    assert text(cluster, "log.txt") == b"1"
    cluster.clock.advance(2.0)
    node.step()
    assert text(cluster, "log.txt") == b"12"
    with open(node.raw.data_path(made.file), "ab") as stream:
        stream.write(b"3")
    node.raw.drop_handle(handle.fh)
    node.step()
    assert text(cluster, "log.txt") == b"123"


def test_a_removed_file_that_is_still_open_does_not_come_back(cluster: Cluster) -> None:
    node = cluster.node("a")
    made = plain_file(node, "log.txt", b"1")
    assert made.file is not None
    handle = HandleRow(fh=node.raw.next_handle(), ino=made.ino, file=made.file, pid=1, start=1)
    node.raw.add_handle(handle)
    queue(node, PlainOpKind.PUT, "log.txt", ino=made.ino)
    node.step()
    assert text(cluster, "log.txt") == b"1"
    node.raw.unlink(ROOT_INO, "log.txt")
    queue(node, PlainOpKind.REMOVE, "log.txt")
    node.step()
    for _ in range(2):
        queue(node, PlainOpKind.PUT, "log.txt", ino=made.ino)
        with open(node.raw.data_path(made.file), "ab") as stream:
            stream.write(b"2")
        cluster.clock.advance(5.0)
        node.step()
        assert "log.txt" not in {entry.name for entry in cluster.store.plain_list("")}
        node.raw.drop_handle(handle.fh)


def test_a_restart_forgets_no_plain_file(cluster: Cluster) -> None:
    """I10."""
    node = cluster.node("a")
    plain_file(node, "config.yaml", b"lr: 1")
    node = cluster.node("a")
    node.step()
    assert text(cluster, "config.yaml") == b"lr: 1"


def test_a_restart_does_not_bring_an_old_version_back(cluster: Cluster, tmp_path: Path) -> None:
    """What the store was given once may have been replaced by another node."""
    node = cluster.node("a")
    plain_file(node, "config.yaml", b"lr: 1")
    node.step()
    (tmp_path / "new").write_bytes(b"lr: 2")
    cluster.store.plain_put("config.yaml", str(tmp_path / "new"), mode=0o644, mtime_ns=5)
    node = cluster.node("a")
    node.step()
    assert text(cluster, "config.yaml") == b"lr: 2"


def whole_file(node: StagedNode, name: str, data: bytes, *, is_torn: bool = False) -> NodeRow:
    made = plain_file(node, name, data, is_named=False)
    assert made.file is not None
    node.raw.update_node(made.ino, plain_path=None)
    node.raw.update_file(made.file, evidence=Evidence(is_torn=is_torn))
    node.raw.add_pending(
        PendingRow(
            id=0,
            parent=ROOT_INO,
            name=name,
            ino=made.ino,
            kind=PendingKind.WHOLE,
            job_key=SESSION,
        )
    )
    return made


def test_a_whole_file_replaces_its_old_version_only_when_it_is_valid(cluster: Cluster) -> None:
    """I8: the old version stays readable until then."""
    node = cluster.node("a")
    good = npz()
    first = whole_file(node, "best.npz", good)
    cluster.settle()
    assert cluster.store.plain_read("best.npz", 0, 10_000) == good
    child = node.raw.child(ROOT_INO, "best.npz")
    assert child is not None
    assert (child.ino, child.plain_path, child.size) == (first.ino, "best.npz", len(good))
    assert (ROOT_INO, "best.npz") in node.forgotten.names
    whole_file(node, "best.npz", good[: len(good) // 2])
    cluster.settle()
    assert cluster.store.plain_read("best.npz", 0, 10_000) == good
    assert node.kinds().count("whole-file-invalid") == 1
    assert len(node.raw.pending()) == 1


def held(node: StagedNode, name: str, ino: int | None) -> None:
    node.raw.add_pending(
        PendingRow(
            id=0, parent=ROOT_INO, name=name, ino=ino, kind=PendingKind.WHOLE, job_key=SESSION
        )
    )


def link(node: StagedNode, name: str, target: str) -> None:
    root = node.raw.node(ROOT_INO)
    assert root is not None
    made = replace(root, ino=0, kind=NodeKind.SYMLINK, target=target, plain_path=name)
    held(node, name, node.raw.add_node(made).ino)


def test_a_link_to_a_file_comes_after_it_and_goes_after_the_next_one(cluster: Cluster) -> None:
    """I5: whoever reads the link in the store finds the file that it names."""
    node = cluster.node("a")

    def stored(*, is_settled: bool = True) -> set[str]:
        if is_settled:
            cluster.settle()
        else:
            for _ in range(5):
                node.step()
        found = {entry.name for entry in cluster.store.plain_list("")}
        return found & {"last.ckpt", "a.npz", "b.npz"}

    link(node, "last.ckpt", "a.npz")
    assert stored() == set()
    whole_file(node, "a.npz", npz())
    assert stored() == {"last.ckpt", "a.npz"}
    # Both are removed, and the link is made anew before the file that it names is there.
    held(node, "a.npz", None)
    held(node, "last.ckpt", None)
    assert stored(is_settled=False) == {"last.ckpt", "a.npz"}
    (removed,) = node.raw.pending(name="last.ckpt")
    node.raw.drop_pending(removed.id)
    link(node, "last.ckpt", "b.npz")
    assert stored() == {"last.ckpt", "a.npz"}
    whole_file(node, "b.npz", npz())
    # Other nodes may know the old link for a moment.
    assert stored(is_settled=False) == {"last.ckpt", "a.npz", "b.npz"}
    assert stored() == {"last.ckpt", "b.npz"}
    assert node.raw.pending() == []
    # One that isn't made anew goes after a while.
    held(node, "last.ckpt", None)
    assert stored(is_settled=False) == {"last.ckpt", "b.npz"}
    assert stored() == {"b.npz"}


def test_a_torn_whole_file_without_a_proof_is_not_published(cluster: Cluster) -> None:
    node = cluster.node("a")
    whole_file(node, "weights.bin", b"unknown bytes", is_torn=True)
    cluster.settle()
    with pytest.raises(MissingError):
        cluster.store.plain_stat("weights.bin")
    assert "whole-file-invalid" in node.kinds()


def test_status_says_what_is_owed(cluster: Cluster) -> None:
    node = cluster.node("a")
    done = node.begin("step-1", job=SESSION)
    node.write(done, "a.txt", b"x" * 10, rank=0)
    node.commit(done)
    cluster.settle()
    row = node.begin("step-2", job=SESSION)
    node.write(row, "a.txt", b"x" * 10, rank=0)
    node.write(row, "b.txt", b"y" * 5, rank=1, is_open=True)
    node.commit(row, 0, 2)
    queue(node, PlainOpKind.MKDIR, "later")
    report = status(node.raw, node.logs, node.events, reader=reader(node))
    assert report.queue.plain_ops == 1
    cluster.settle()
    report = status(node.raw, node.logs, node.events, reader=reader(node))
    found = json.loads(json.dumps(report.to_json()))
    first, second = found["attempts"]
    assert (first["state"], second["state"]) == ("committed", "open")
    assert second["files"] == {"open": 1, "quiet": 0, "digested": 0, "stored": 1}
    assert (second["size_bytes"], second["stored_bytes"]) == (15, 10)
    assert second["writers"] == [4242]
    assert any("b.txt: not closed" in line for line in second["missing"])
    (run,) = found["runs"]
    assert (run["run"], run["last_committed"]) == (RUN, "step-1")
    assert run["pointers"] == {"latest": "step-1"}
    assert found["queue"] == {
        "plain_ops": 0,
        "pending_whole": 0,
        "pending_pointers": 0,
        "tombstones": 0,
        "name_ops": 0,
    }


def test_status_says_when_an_attempt_is_hidden_from_everybody(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1", job="session:a/1@2")
    node.write(row, "log.txt", b"half", is_torn=True)
    other = node.begin("step-2", job="session:a/1@2")
    node.write(other, "log.txt", b"whole")
    node.raw.set_meta(WRITERS_META.format(attempt=row.id), "[[42, 7]]")
    hidden = "hidden: the writer of 'log.txt' died with it open; commit it explicitly or abort it"

    def reasons(**more: Any) -> list[str]:
        report = status(node.raw, node.logs, node.events, reader=Reader(spool=node.raw, **more))
        return [attempt.reason for attempt in report.attempts]

    assert reasons() == [hidden, ""]
    assert reasons(is_alive=lambda _pid, _start: False) == [hidden, ""]
    assert reasons(is_alive=lambda pid, start: (pid, start) == (42, 7)) == ["", ""]
    held = node.write(row, "data.bin", b"x", is_open=True)
    assert reasons() == ["", ""]
    node.close_file(held)
    node.raw.update_attempt(row.id, reason="the store is away")
    assert reasons() == [f"the store is away; {hidden}", ""]
    node.commit(row, None, None, is_all=True)
    assert reasons() == ["the store is away", ""]


def test_verify_sees_what_people_without_ckptgate_would_read(tmp_path: Path) -> None:
    """I13: changes of the published directory and of the run's pointers, in the store itself."""
    (tmp_path / "store").mkdir()
    cluster = Cluster(tmp_path, store=PosixStore(str(tmp_path / "store")))
    node = cluster.node("a")
    for name in ("step-1", "step-2"):
        row = node.begin(name, job=SESSION)
        node.write(row, "a.txt", b"0123456789", rank=0)
        node.write(row, "b.txt", b"0123456789", rank=0)
        node.commit(row)
        cluster.settle()

    def problems(name: str) -> list[str]:
        return list(verify_checkpoint(cluster.store, RUN, name).problems)

    place = tmp_path / "store" / RUN
    assert problems("step-1") == problems("step-2") == []
    (place / "step-2" / "a.txt").unlink()
    (place / "step-2" / "a.txt").write_bytes(b"9876543210")
    (place / "step-2" / "b.txt").unlink()
    (place / "step-2" / "new").touch()
    found = problems("step-2")
    assert [line.split(":")[0] for line in found] == [
        "step-2/a.txt", "step-2/b.txt", "step-2/new",
    ]  # fmt: skip
    assert problems("step-1") == []
    (place / "latest").unlink()
    (place / "latest").symlink_to("step-1")
    told = "latest: is the link 'step-1' in the store, the log says the link 'step-2'"
    assert problems("step-1") == [told]
    assert told in problems("step-2")
    (place / "latest").unlink()
    (place / "latest").write_text("step-2")
    assert problems("step-2")[-1].startswith("latest: is the text 'step-2' in the store")
    (place / "step-2").rename(place / "elsewhere")
    assert problems("step-2")[0] == "step-2: the published directory is not there"
    cluster.close()


def test_a_commit_that_is_not_published_yet_is_no_problem_to_verify(cluster: Cluster) -> None:
    plan = FaultPlan(at=1, is_lasting=True, calls=frozenset({"publish"}))
    node = cluster.node("a", store=FaultyStore(cluster.store, plan))
    row = node.begin("step-1", job=SESSION)
    node.write(row, "a.txt", b"0123456789", rank=0)
    node.commit(row)
    cluster.settle(rounds=15)
    assert cluster.state().current == {"step-1": "step-1.0"}
    assert verify_checkpoint(cluster.store, RUN, "step-1").is_good
    plan.end()
    cluster.settle()
    assert cluster.files("step-1") == {"a.txt": b"0123456789"}
    assert verify_checkpoint(cluster.store, RUN, "step-1").is_good


def test_verify_reads_every_byte_and_names_the_chunk(tmp_path: Path) -> None:
    """I1, I13: a flipped bit, a short file, a missing file, an unknown name."""
    (tmp_path / "store").mkdir()
    cluster = Cluster(tmp_path, store=PosixStore(str(tmp_path / "store")))
    node = cluster.node("a")
    row = node.begin("step-1", job=SESSION)
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        node.write(row, name, b"0123456789", rank=0)
    node.commit(row)
    cluster.settle()
    report = verify_checkpoint(cluster.store, RUN, "step-1")
    assert (report.files, report.size_bytes, report.problems) == (4, 40, ())
    assert report.is_good
    keys = {path: file.key for path, _, file in node.raw.files_of_attempt(row.id)}
    (tmp_path / "store" / keys["a.txt"]).write_bytes(b"0123X56789")
    os.truncate(tmp_path / "store" / keys["b.txt"], 4)
    (tmp_path / "store" / keys["c.txt"]).unlink()
    with open(tmp_path / "store" / keys["d.txt"], "ab") as stream:
        stream.write(b"!")
    report = verify_checkpoint(cluster.store, RUN, "step-1")
    problems = "\n".join(report.problems)
    assert not report.is_good
    assert "a.txt: chunk 0" in problems
    assert "b.txt: " in problems
    assert "ends at byte 4 of 10" in problems
    assert "c.txt: " in problems
    assert "longer than 10" in problems
    with pytest.raises(MissingError):
        verify_checkpoint(cluster.store, RUN, "step-9")
    log = tmp_path / "store" / RUN / ".ckptgate" / "log" / "0000000000.json"
    log.write_bytes(log.read_bytes().replace(b'"index":0', b'"index":7'))
    with pytest.raises(IntegrityError):
        verify_checkpoint(cluster.store, RUN, "step-1")
    cluster.close()


# What a long run leaves behind


def removed_pointer(node: StagedNode, target: str) -> PendingRow:
    """rm latest, while the log says that it names *target*."""
    row = PendingRow(
        id=0,
        parent=node.directory(),
        name="latest",
        ino=None,
        kind=PendingKind.POINTER,
        job_key=SESSION,
        target=target,
    )
    return node.raw.add_pending(row)


def saved(cluster: Cluster, node: StagedNode, name: str) -> None:
    row = node.begin(name, job=SESSION)
    node.write(row, "a.txt", name.encode(), rank=0)
    node.commit(row)
    cluster.settle()


def test_a_removed_pointer_comes_back_once_it_has_long_had_another_value(cluster: Cluster) -> None:
    """Not at once: who removed it may be about to make it again."""
    node = cluster.node("a")
    saved(cluster, node, "step-1")
    removed = removed_pointer(node, "step-1")
    cluster.clock.advance(1000)
    cluster.settle()
    assert node.raw.pending() == [removed]
    # It waits for nothing: neither `status` nor an unmount count it.
    report = status(node.raw, node.logs, node.events, reader=reader(node))
    assert report.queue.pending_pointers == 0
    row = node.begin("step-2", job=SESSION)
    node.write(row, "a.txt", b"2", rank=0)
    node.commit(row)
    cluster.settle(rounds=12)
    assert cluster.store.pointer_content(RUN, "latest") == "step-2"
    assert node.raw.pending() == [removed]
    cluster.clock.advance(60)
    cluster.settle()
    assert node.raw.pending() == []
    assert (removed.parent, "latest") in node.forgotten.names


def test_the_replaced_version_of_a_whole_file_is_told_to_the_mount(cluster: Cluster) -> None:
    """Only the mount knows when its bytes can go."""
    node = cluster.node("a")
    first = whole_file(node, "best.npz", npz())
    cluster.settle()
    whole_file(node, "best.npz", npz())
    cluster.settle()
    assert node.forgotten.nodes == [first.ino]
    assert [row.ino for row in node.raw.nameless_nodes()] == [first.ino]


def test_a_thousand_saves_leave_no_settings_behind(cluster: Cluster) -> None:
    node = cluster.node("a")
    before = settings(node)
    for step in range(3):
        node.point("latest", f"step-{step}", content=f"step-{step}")
        saved(cluster, node, f"step-{step}")
    # One for the run, whatever the number of its saves; and the last saves' phases.
    phases = {f"phases.{row.id}" for row in node.raw.attempts()}
    assert settings(node) - before - phases <= {
        "vfs.root", "sightings.run:run", "sightings.spool", f"settled.{node.directory()}.latest",
    }  # fmt: skip


def settings(node: StagedNode) -> set[str]:
    with sqlite3.connect(f"{node.raw.path}/spool.db") as database:
        found = {key for (key,) in database.execute("SELECT key FROM meta")}
    database.close()
    return found


def test_a_look_at_what_is_under_way_does_not_read_what_is_done(cluster: Cluster) -> None:
    """1,000 committed checkpoints cost the publisher's passes and every look-up nothing."""
    node = cluster.node("a")
    run_ino = node.directory()
    with sqlite3.connect(f"{node.raw.path}/spool.db") as database:
        for column in ("run", "run_ino"):
            plan = database.execute(
                f"EXPLAIN QUERY PLAN SELECT * FROM attempts WHERE {column} = ? AND state IN (?, ?)",
                (run_ino, "open", "sealed"),
            ).fetchall()
            assert "state=?" in plan[0][3], plan
    database.close()
