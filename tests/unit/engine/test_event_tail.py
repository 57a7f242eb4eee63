"""Incidents are read in order and at least once, over restarts, rotations and torn lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptgate.engine import events as events_module
from ckptgate.engine.event_tail import EventTail
from ckptgate.engine.events import Events
from ckptgate.model.incidents import INCIDENTS, Severity
from ckptgate.testing.clock import ManualClock


class World:
    def __init__(self, tmp: Path) -> None:
        self.path, self.place = tmp / "events.jsonl", tmp / "place"
        self.events = Events(str(self.path), clock=ManualClock())

    def tail(self) -> EventTail:
        return EventTail(str(self.path), str(self.place))

    def record(self, *subjects: str) -> None:
        for subject in subjects:
            self.events.record("aborted", subject, "why")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def subjects(tail: EventTail, limit: int = 100) -> list[str]:
    return [told.event.subject for told in tail.next(limit)]


def test_incidents_come_in_order_and_once(world: World):
    tail = world.tail()
    world.record("a", "b", "c")
    assert subjects(tail, 2) == ["a", "b"]
    assert subjects(tail) == ["c"]
    assert subjects(tail) == []
    world.record("d")
    assert subjects(tail) == ["d"]


def test_what_was_there_before_the_first_start_is_not_told(world: World):
    world.record("old")
    tail = world.tail()
    world.record("new")
    assert subjects(tail) == ["new"]


def test_what_was_not_kept_is_told_again_with_the_same_id(world: World):
    first = world.tail()
    world.record("a", "b")
    ids = [told.id for told in first.next(1)]
    first.keep()
    ids += [told.id for told in first.next(1)]
    again = world.tail().next(9)
    assert [told.event.subject for told in again] == ["b"]
    assert again[0].id == ids[1] != ids[0]


def test_two_incidents_that_say_the_same_have_two_ids(world: World):
    tail = world.tail()
    world.record("a", "a")
    one, two = tail.next(9)
    assert one.event == two.event
    assert one.id != two.id


def test_a_file_that_was_renamed_away_is_read_to_its_end_first(world: World, monkeypatch):
    monkeypatch.setattr(events_module, "FILE_BYTES_MAX", 300)
    tail = world.tail()
    seen: list[str] = []
    for number in range(20):
        world.record(f"n{number}")
        if number % 2:
            seen += subjects(tail, 1)
    while found := subjects(tail):
        seen += found
    assert Path(f"{world.path}.1").exists()
    # Only what was renamed away twice before it was read is gone, and nothing comes twice.
    assert seen == sorted(set(seen), key=lambda name: int(name[1:]))
    assert seen[-1] == "n19"


def test_a_torn_line_is_waited_for_and_an_edited_one_left_out(world: World):
    tail = world.tail()
    world.record("a")
    with open(world.path, "ab") as file:
        file.write(b'{"at": "", "kind": 7}\nnot json \xff\n{"at":"","kind":"aborted","subj')
    world_line = b'ect":"late","detail":""}\n'
    assert subjects(tail) == ["a"]
    assert subjects(tail) == []
    with open(world.path, "ab") as file:
        file.write(world_line)
    assert subjects(tail) == ["late"]


def test_an_endless_line_is_skipped(world: World):
    tail = world.tail()
    with open(world.path, "ab") as file:
        file.write(b"x" * 1_000_000 + b"\n")
    world.record("after")
    assert subjects(tail) == ["after"]


def test_a_file_that_was_cut_or_removed_is_read_from_its_beginning(world: World):
    tail = world.tail()
    world.record("a", "b")
    assert subjects(tail) == ["a", "b"]
    os.truncate(world.path, 0)
    world.record("c")
    assert subjects(tail) == ["c"]
    os.unlink(world.path)
    assert subjects(tail) == []
    world.record("d")
    assert subjects(tail) == ["d"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"inode": "x"}', b"[1,2]"])
def test_a_damaged_place_begins_at_the_end(world: World, content: bytes):
    """I13."""
    world.record("old")
    world.place.write_bytes(content)
    tail = world.tail()
    world.record("new")
    assert subjects(tail) == ["new"]


def test_every_kind_says_what_to_do_next():
    for kind, known in INCIDENTS.items():
        assert known.hint, kind
        assert known.severity in Severity


def test_subjects_that_are_no_utf8_are_recorded(world: World):
    tail = world.tail()
    world.record("x\udcff")
    assert subjects(tail) == ["x\\udcff"]
