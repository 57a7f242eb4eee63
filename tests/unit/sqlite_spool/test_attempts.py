"""Attempts, handles, and what waits."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.sqlite_spool.kit import attempt_row, node

from ckptgate.errors import (
    ExistsError,
    MissingError,
    RefusedError,
)
from ckptgate.model.moves import Move
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import (
    AttemptRow,
    HandleRow,
    NameOpRow,
    PendingKind,
    PendingRow,
    PlainOpKind,
    PlainOpRow,
    TombstoneRow,
)


def test_an_attempt_comes_back_as_it_was_changed(spool):
    attempt = spool.add_attempt(attempt_row())
    assert attempt.id > 0
    assert spool.attempt(attempt.id) == attempt
    changes: dict[str, Any] = {
        "run": "r",
        "run_ino": 9,
        "name": "step-2",
        "attempt": "step-2.0",
        "job_key": "slurm:1.0",
        "generation": 4,
        "state": AttemptState.SEALED,
        "root": 10,
        "base": 1,
        "event": "format",
        "detail": "dcp-metadata",
        "is_joined": True,
        "is_voted": True,
        "votes_count": 2,
        "names_count": 3,
        "world_size": 8,
        "committed_all": True,
        "seal_index": 5,
        "manifest": "cd" * 32,
        "format_name": "dcp",
        "created_ns": 6,
        "event_ns": 7,
        "write_ns": 8,
        "reason": "waits",
        "missing": ("rank 1", 'a "quoted" ü'),
    }
    changed = spool.update_attempt(attempt.id, **changes)
    assert changed == AttemptRow(id=attempt.id, **changes)
    assert spool.attempt(attempt.id) == changed
    assert spool.update_attempt(attempt.id) == changed
    assert spool.update_attempt(attempt.id, missing=()).missing == ()
    given = spool.add_attempt(attempt_row(id=77))
    assert spool.attempt(77) == given
    assert spool.add_attempt(attempt_row()).id == 78
    with pytest.raises(MissingError):
        spool.update_attempt(99, reason="x")
    with pytest.raises(TypeError, match="AttemptRow has no field 'nonsense'"):
        spool.update_attempt(attempt.id, nonsense=4)


def test_an_attempt_changes_its_state_only_along_the_table(spool):
    """I3: what is committed is never aborted."""
    attempt = spool.add_attempt(attempt_row())
    for state in (AttemptState.OPEN, AttemptState.SEALED, AttemptState.COMMITTED):
        assert spool.update_attempt(attempt.id, state=state).state is state
    with pytest.raises(RefusedError, match="committed cannot become aborted"):
        spool.update_attempt(attempt.id, state=AttemptState.ABORTED)


def test_attempts_are_found_by_every_combination_of_conditions(spool):
    rows = [
        spool.add_attempt(attempt_row(run=run, run_ino=ino, name=name, state=state, attempt=id_))
        for run, ino, name, state, id_ in [
            ("r", 1, "a", AttemptState.OPEN, "a.0"),
            ("r", 1, "b", AttemptState.COMMITTED, "b.0"),
            ("q", 2, "a", AttemptState.OPEN, "a.0"),
            ("r", 1, "a", AttemptState.SEALED, "a.1"),
        ]
    ]
    assert spool.attempts() == rows
    assert spool.attempts(run="r") == [rows[0], rows[1], rows[3]]
    assert spool.attempts(run="") == []
    assert spool.attempts(run_ino=2) == [rows[2]]
    assert spool.attempts(run_ino=1, name="a") == [rows[0], rows[3]]
    open_or_sealed = {AttemptState.OPEN, AttemptState.SEALED}
    assert spool.attempts(states=open_or_sealed) == [rows[0], rows[2], rows[3]]
    assert spool.attempts(run="r", name="a", states=[AttemptState.SEALED]) == [rows[3]]
    assert spool.attempts(states=()) == []
    assert spool.attempt_by_id("q", "a.0") == rows[2]
    assert spool.attempt_by_id("q", "a.1") is None


def test_ranks_and_counts_of_other_members(spool):
    for rank in (3, 1, 3):
        spool.add_rank_commit(1, rank)
        spool.add_writer_rank(1, rank + 10)
    assert spool.rank_commits(1) == (1, 3)
    assert spool.writer_ranks(1) == (11, 13)
    assert spool.rank_commits(2) == spool.writer_ranks(2) == ()
    assert spool.seen_count(1, "m-1", "names") == 0
    spool.set_seen_count(1, "m-1", "names", 4)
    spool.set_seen_count(1, "m-1", "votes", 5)
    spool.set_seen_count(1, "m-1", "names", 6)
    spool.set_seen_count(1, "l-1", "names", 1)
    assert spool.seen_count(1, "m-1", "names") == 6
    assert spool.seen_count(1, "m-1", "votes") == 5
    assert spool.seen_members(1) == ("l-1", "m-1")
    assert spool.seen_members(2) == ()


def test_handles(spool):
    inside = spool.add_node(node(attempt=5))
    outside = spool.add_node(node())
    first = HandleRow(fh=spool.next_handle(), ino=inside.ino, file=1, pid=10, start=1 << 40, rank=2)
    second = HandleRow(fh=spool.next_handle(), ino=outside.ino, file=2, pid=11, start=3)
    assert first.fh != second.fh
    spool.add_handle(first)
    spool.add_handle(second)
    with pytest.raises(ExistsError):
        spool.add_handle(first)
    assert spool.handle(first.fh) == first
    assert spool.handles() == [first, second]
    assert spool.handles(file=2) == [second]
    assert spool.handles_of_attempt(5) == [first]
    spool.update_handle(first.fh, is_closed=True)
    changed = spool.handle(first.fh)
    assert changed is not None
    assert changed.is_closed is True
    spool.update_handle(first.fh)
    spool.update_handle(12345, is_closed=True)
    spool.drop_handle(second.fh)
    spool.drop_handle(second.fh)
    assert spool.handle(second.fh) is None
    assert spool.clear_handles() == [changed]
    assert spool.handles() == spool.clear_handles() == []


def test_pending_values(spool):
    first = spool.add_pending(
        PendingRow(id=0, parent=1, name="latest", ino=4, kind=PendingKind.POINTER, job_key="run:x")
    )
    second = spool.add_pending(
        PendingRow(id=0, parent=2, name="latest", ino=None, kind=PendingKind.WHOLE, job_key="")
    )
    assert spool.pending() == [first, second]
    assert spool.pending(parent=1) == [first]
    assert spool.pending(parent=2, name="latest") == [second]
    assert spool.pending(name="other") == []
    spool.update_pending(first.id, target="step-1", ino=None)
    spool.update_pending(first.id)
    (changed,) = spool.pending(parent=1)
    assert (changed.target, changed.ino) == ("step-1", None)
    with pytest.raises(MissingError):
        spool.update_pending(99, target="x")
    spool.drop_pending(first.id)
    spool.drop_pending(first.id)
    assert spool.pending() == [second]


def test_tombstones(spool):
    first = spool.add_tombstone(TombstoneRow(id=0, run="r", name="a", attempt="a.0", job_key="j"))
    second = spool.add_tombstone(TombstoneRow(id=0, run="q", name="a", attempt="a.0", job_key="j"))
    assert spool.tombstones() == [first, second]
    assert spool.tombstones(run="q") == [second]
    spool.drop_tombstone(first.id)
    assert spool.tombstones(run="r") == []


def test_name_operations_keep_their_order_and_numbers(spool):
    ops = [
        spool.add_name_op(NameOpRow(id=0, attempt=1, op=op, path="p", to="t", mode=0o755))
        for op in ("mkdir", "rename", "rmdir")
    ]
    assert spool.name_ops(1) == ops
    assert spool.name_ops(2) == []
    spool.drop_name_op(ops[2].id)
    again = spool.add_name_op(ops[2].__class__(id=0, attempt=1, op="mkdir", path="", to="", mode=0))
    assert again.id > ops[2].id
    with pytest.raises(ValueError, match="not a valid NameOpKind"):
        spool.add_name_op(NameOpRow(id=0, attempt=1, op="chmod", path="", to="", mode=0))


def test_renames_keep_their_order_and_go_with_their_attempt(spool):
    row = spool.add_attempt(attempt_row())
    moves = [Move(member=m, n=n, path=f"p{n}", to="t") for m, n in (("b", 7), ("a", 0), ("b", 8))]
    for move in moves:
        spool.add_move(row.id, move)
    assert spool.moves(row.id) == moves
    assert spool.moves(row.id + 1) == []
    after = {"a": 1, "b": 9}
    op = NameOpRow(id=0, attempt=row.id, op="mkdir", path="p", to="", mode=0, after=after)
    spool.add_name_op(op)
    assert spool.name_ops(row.id)[0].after == after
    spool.drop_attempt(row.id)
    assert spool.moves(row.id) == []


def test_plain_operations_keep_their_order(spool):
    ops = [spool.add_plain_op(PlainOpRow(id=0, op=op, path="p", ino=3)) for op in PlainOpKind]
    assert list(spool.plain_ops()) == ops
    spool.drop_plain_op(ops[0].id)
    assert list(spool.plain_ops()) == ops[1:]


def test_watched_runs(spool):
    for run in ("r", "", "r"):
        spool.watch_run(run)
    assert spool.watched_runs() == ("", "r")
