"""Views of runs: what is committed, how old the answer may be, what the kernel must forget."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptgate.engine.events import Events
from ckptgate.engine.runlog import RunLog
from ckptgate.errors import MissingError, TransientStoreError
from ckptgate.model.entries import Fence
from ckptgate.ports.catalog import Catalog
from ckptgate.ports.spool import ROOT_INO, LocalBytes
from ckptgate.testing.clock import ManualClock
from ckptgate.testing.faults import FaultPlan, FaultyStore


def test_a_directory_without_a_log_has_an_empty_view(make_node):
    plan = FaultPlan(at=0)
    a = make_node("a", on=FaultyStore(make_node("b").store, plan))
    view = a.catalog.view("some/where", 1.0)
    assert (view.length, dict(view.committed), view.names) == (0, {}, frozenset())
    assert plan.count == 1  # one request
    assert a.catalog.is_fresh("some/where", 1.0)
    a.catalog.view("some/where", 1.0)
    assert plan.count == 1
    a.clock.advance(2.0)
    assert not a.catalog.is_fresh("some/where", 1.0)


def test_a_view_says_what_is_committed(make_node):
    a, b = make_node("a"), make_node("b")
    a.save("step-1", {"x": b"1"})
    row = a.membership.join(a.begin("step-2"))
    a.seal(row)
    view = b.catalog.view("run", 0.0)
    assert dict(view.committed) == {"step-1": "step-1.0"}
    assert view.names == {"step-1", "step-2"}
    assert view.undecided == ("step-2.0",)
    assert view.pointers["latest"].target == "step-1"


def test_a_view_is_the_same_object_while_nothing_changes(make_node):
    a = make_node("a")
    a.save("step-1", {"x": b"1"})
    assert a.catalog.view("run", 0.0) is a.catalog.view("run", 0.0)


def test_what_a_commit_changes_is_invalidated(make_node):
    a, b = make_node("a"), make_node("b")
    a.save("step-1", {"x": b"1"})
    run_ino = b.directory(ROOT_INO, "run")
    b.catalog.view("run", 0.0)
    b.look_into("run", run_ino, "step-1")
    assert b.invalidated.names == []
    a.save("step-2", {"x": b"1"})
    b.catalog.view("run", 0.0)
    assert b.invalidated.names == [(run_ino, "latest"), (run_ino, "step-2")]


def test_with_the_store_away_the_last_view_is_given(make_node):
    a = make_node("a")
    a.save("step-1", {"x": b"1"})
    plan = FaultPlan(at=0, is_lasting=True)
    b = make_node("b", on=FaultyStore(a.store, plan))
    b.catalog.view("run", 0.0)
    plan.at = plan.count + 1
    b.clock.advance(1.0)
    assert dict(b.catalog.view("run", 0.1).committed) == {"step-1": "step-1.0"}
    asked = plan.count
    assert b.catalog.is_fresh("run", 0.1)
    b.catalog.view("run", 0.1)
    assert plan.count == asked  # not asked again at once
    b.catalog.view("run", 0.0)
    assert plan.count > asked  # but by who knows that the store answers again
    asked = plan.count
    b.clock.advance(3.0)
    b.catalog.view("run", 0.1)
    assert plan.count > asked
    with pytest.raises(TransientStoreError):
        b.catalog.view("other", 0.0)


def test_a_materialised_checkpoint_needs_no_store(make_node):
    a = make_node("a")
    saved = a.save("step-1", {"x": b"1"})
    plan = FaultPlan(at=0, is_lasting=True)
    b = make_node("b", on=FaultyStore(a.store, plan))
    run_ino = b.directory(ROOT_INO, "run")
    row = b.look_into("run", run_ino, "step-1")
    b.read(row, "x")
    plan.at = plan.count + 1
    assert b.look_into("run", run_ino, "step-1") == row
    assert b.read(row, "x") == b"1"
    assert saved.attempt == row.attempt


def test_plain_names_are_the_stores(make_node, tmp_path):
    a = make_node("a")
    source = tmp_path / "log"
    source.write_bytes(b"line\n" * 1000)
    a.store.plain_mkdir("logs", 0o755)
    a.store.plain_put("logs/log", str(source), mode=0o644, mtime_ns=1)
    assert a.catalog.plain_stat("logs/nothing") is None
    assert a.catalog.plain_list("nowhere") == []
    assert [entry.name for entry in a.catalog.plain_list("logs")] == ["log"]
    assert a.catalog.plain_stat("logs/log").size == 5000
    assert a.catalog.plain_read("logs/log", 5, 5) == b"line\n"
    file = a.spool.add_file(local=LocalBytes.NONE).file
    a.catalog.plain_fetch("logs/log", file)
    assert Path(a.spool.data_path(file)).read_bytes() == source.read_bytes()
    assert a.spool.file(file).local is LocalBytes.FULL


def test_a_plain_copy_that_fails_leaves_nothing(make_node):
    a = make_node("a")
    file = a.spool.add_file(local=LocalBytes.NONE).file
    with pytest.raises(MissingError):
        a.catalog.plain_fetch("nothing", file)
    folder = Path(a.spool.data_path(file)).parent
    assert list(folder.iterdir()) == []
    assert a.spool.file(file).local is LocalBytes.NONE


def test_the_catalog_keeps_its_contract(make_node):
    a = make_node("a")
    catalog: Catalog = a.catalog
    a.logs.get("run").append(lambda _: Fence(generation=1, job_key="run:j"))
    assert catalog.view("run", 0.0).length == 1


# Events


def test_events_are_read_back_in_order_by_another_process(tmp_path):
    path = str(tmp_path / "events.jsonl")
    mine, other = Events(path, clock=ManualClock()), Events(path, clock=ManualClock())
    for i in range(3):
        (mine if i % 2 else other).record("kind", f"subject {i}", "detail\nwith lines")
    assert [event.subject for event in mine.recent(2)] == ["subject 1", "subject 2"]
    assert mine.recent(0) == []
    assert other.recent(5)[0].at.endswith("Z")


def test_a_torn_line_of_events_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    events = Events(str(path))
    events.record("a", "s", "d")
    path.write_bytes(path.read_bytes() + b'{"at":"", \xff\n{"kind')
    assert [event.kind for event in events.recent(9)] == ["a"]


def test_an_event_that_cannot_be_written_is_kept_in_memory(tmp_path):
    events = Events(str(tmp_path / "gone" / "events.jsonl"))
    events.record("a", "s", "d")
    assert [event.kind for event in events.recent(9)] == ["a"]


def test_a_full_file_of_events_is_begun_anew(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"{}\n" * 3_000_000)
    events = Events(str(path))
    events.record("a", "s", "d")
    events.record("b", "s", "d")
    assert os.path.getsize(f"{path}.1") > 8_000_000
    assert [event.kind for event in events.recent(9)] == ["b"]


def test_what_is_known_is_told_while_somebody_waits_for_the_store(make_node):
    """Whoever may not block asks for a view only where it is known; that must then not wait."""
    node = make_node("a")
    node.save("step-1", {"f": b"1"})
    known = node.catalog.view("run", 0.0)
    entered, go_on = threading.Event(), threading.Event()
    get = node.store.get

    def slow_get(key, **more):
        entered.set()
        assert go_on.wait(10)
        return get(key, **more)

    log = node.logs.get("run")
    log._store = SimpleNamespace(get=slow_get)
    reader = threading.Thread(target=log.refresh)
    reader.start()
    try:
        assert entered.wait(10)
        assert node.catalog.is_fresh("run", 60.0)
        asked = threading.Thread(target=lambda: found.append(node.catalog.view("run", 60.0)))
        found: list[object] = []
        asked.start()
        asked.join(10)
        assert found == [known]
    finally:
        go_on.set()
        reader.join(10)


def test_what_was_read_for_a_view_is_in_it_whoever_reads_the_log_next(make_node, monkeypatch):
    """I5: who knows that the log has a newer value asks for it, and must not get the older one."""
    a, b = make_node("a"), make_node("b")
    a.save("step-1", {"f": b"1"})
    known = b.catalog.view("run", 0.0)
    a.save("step-2", {"f": b"2"})
    # Another thread is always quicker: it has the log again at once.
    monkeypatch.setattr(RunLog, "look_now", lambda *_: None)
    assert known.pointers["latest"].target == "step-1"
    assert b.catalog.view("run", 0.0).pointers["latest"].target == "step-2"


def test_a_view_is_as_old_as_its_own_reading_of_the_log(make_node, monkeypatch):
    """Another thread's newer reading doesn't make the older view fresh."""
    a, b = make_node("a"), make_node("b")
    a.save("step-1", {"f": b"1"})
    b.catalog.view("run", 0.0)
    b.clock.advance(5.0)
    a.save("step-2", {"f": b"2"})
    log = b.logs.get("run")
    log.refresh()
    monkeypatch.setattr(RunLog, "look_now", lambda *_: None)
    assert not b.catalog.is_fresh("run", 1.0)
    assert b.catalog.view("run", 1.0).pointers["latest"].target == "step-2"


def test_a_checkpoint_that_is_only_listed_costs_no_manifest(make_node, monkeypatch):
    """A run of a thousand checkpoints is listed by its log; a tree comes when somebody looks in."""
    a, b = make_node("a"), make_node("b")
    for n in range(4):
        a.save(f"step-{n}", {f"d/f{m}": b"%d" % m for m in range(450)})
    run_ino = b.begin("other").run_ino
    asked: list[str] = []
    real = b.store.get

    def get(key: str, **limits):
        asked.append(key)
        return real(key, **limits)

    monkeypatch.setattr(b.store, "get", get)
    b.catalog.view("run", 0)
    rows = [b.catalog.materialise("run", run_ino, f"step-{n}") for n in range(4)]
    assert not any("manifest" in key for key in asked)
    assert all(row.is_root_only and b.spool.tree(row.id) == [] for row in rows)
    assert b.catalog.materialise("run", run_ino, "step-1") == rows[1]
    b.catalog.fill(rows[1].id)
    filled = b.spool.attempt(rows[1].id)
    assert filled is not None
    assert not filled.is_root_only
    assert filled.root == rows[1].root
    assert len(b.spool.files_of_attempt(filled.id)) == 450
    assert sum("manifest" in key for key in asked) == 1
    assert b.read(filled, "d/f7") == b"7"
    b.catalog.fill(rows[1].id)
    assert sum("manifest" in key for key in asked) == 1


def test_a_tree_that_a_crash_left_half_made_is_made_whole(make_node, monkeypatch):
    """I8, I10: nobody sees a part of it before, and nothing is there twice after."""
    a, b = make_node("a"), make_node("b")
    a.save("step-1", {f"f{m}": b"%d" % m for m in range(450)})
    row = b.catalog.materialise("run", b.begin("other").run_ino, "step-1")
    real, left = b.spool.link, [300]

    def link(parent: int, name: str, ino: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(parent, name, ino)

    with monkeypatch.context() as patch:
        patch.setattr(b.spool, "link", link)
        with pytest.raises(KeyboardInterrupt):
            b.catalog.fill(row.id)
    now = b.spool.attempt(row.id)
    assert now is not None
    assert now.is_root_only
    assert len(b.spool.tree(row.id)) == 200
    b.catalog.fill(row.id)
    assert sorted(b.paths(row)) == sorted(f"f{m}" for m in range(450))
