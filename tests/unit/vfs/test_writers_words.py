"""What writers say of a checkpoint by attributes: begun, saved how, given up; and the newest."""

from __future__ import annotations

import errno
import json

import pytest

from ckptgate.errors import CkptError, ExistsError, MissingError, UsageError
from ckptgate.model.jobkey import RankInfo
from ckptgate.model.saving import RECORD_BYTES_MAX
from ckptgate.model.states import AttemptState
from ckptgate.ports.recording import given_up, savings_of

BEGIN, SAVED_BY, COMMIT, ABORT, STATE, LATEST = (
    f"user.ckptgate.{word}" for word in ("begin", "saved_by", "commit", "abort", "state", "latest")
)
PATH = "run/step-1"


def say(world, caller, name: str, value: str | bytes, path: str = PATH) -> None:
    ino = world.walk(caller, path).attr.ino
    data = value.encode() if isinstance(value, str) else value
    world.vfs.setxattr(caller, ino, name, data, 0)


def ask(world, caller, name: str, path: str = PATH) -> dict:
    ino = world.walk(caller, path).attr.ino
    return json.loads(world.vfs.getxattr(caller, ino, name))


@pytest.fixture
def begun(world):
    world.mkdir(world.a, "run")
    world.mkdir(world.a, PATH)
    return world


def test_a_part_is_begun_once_in_a_try(begun):
    say(begun, begun.a, BEGIN, "0/2")
    say(begun, begun.a2, BEGIN, "1/2")
    found = ask(begun, begun.a, STATE)
    assert (found["ranks_begun"], found["ranks_committed"]) == ([0, 1], [])
    assert begun.attempt("step-1").world_size == 2
    for rank in ("0/2", "1/2"):
        with pytest.raises(ExistsError, match="begun before"):
            say(begun, begun.a, BEGIN, rank)


def test_who_committed_begins_a_second_try(begun):
    begun.write(begun.a, f"{PATH}/f", b"x")
    say(begun, begun.a, COMMIT, "0/2")
    with pytest.raises(ExistsError):
        say(begun, begun.a, BEGIN, "0/2")
    say(begun, begun.a, BEGIN, "1/2")


@pytest.mark.parametrize("value", ["", "2/2", "-1/2", "0", "0/0", "all!", b"\xff/2", "0/9999999"])
def test_a_part_of_no_rank_is_not_begun(begun, value):
    """I13"""
    with pytest.raises(UsageError) as caught:
        say(begun, begun.a, BEGIN, value)
    assert caught.value.errno == errno.EINVAL


def test_what_a_killed_rank_had_begun_is_hidden_and_begun_anew(begun):
    """Its files were closed in order and are of no known format: nothing else tells."""
    say(begun, begun.a, BEGIN, "0/2")
    begun.write(begun.a, f"{PATH}/f", b"x")
    say(begun, begun.a2, BEGIN, "1/2")
    say(begun, begun.a2, COMMIT, "1/2")
    begun.identify.dead.update({100})
    assert begun.exists(begun.a2, PATH)
    assert ask(begun, begun.a2, STATE)["ranks_ended"] == [0]
    begun.identify.dead.update({101})
    begun.identify.add(102, begun.identify.processes[100].job_key)
    again = begun.a.__class__(0, 0, 102, may_block=True)
    assert not begun.exists(again, PATH)
    begun.mkdir(again, PATH)
    say(begun, again, BEGIN, "0/2")
    assert begun.names(again, PATH) == []


def test_what_all_had_committed_stays_visible_when_they_end(begun):
    say(begun, begun.a, BEGIN, "0/2")
    begun.write(begun.a, f"{PATH}/f", b"x")
    say(begun, begun.a, COMMIT, "0/2")
    begun.identify.dead.update({100})
    assert begun.exists(begun.a2, PATH)


def test_a_committed_checkpoint_is_begun_as_a_revision(begun):
    begun.write(begun.a, f"{PATH}/f", b"x")
    begun.commit_own("run", "step-1")
    say(begun, begun.a, BEGIN, "0/1")
    row = begun.attempt("step-1")
    assert (row.state, row.base is None) == (AttemptState.OPEN, False)


def test_the_record_is_of_the_rank_that_it_says_else_of_the_caller_s(world):
    world.mkdir(world.s, "run")
    world.mkdir(world.s, PATH)
    say(world, world.s, SAVED_BY, '{"step": 1}')
    say(world, world.s, SAVED_BY, '{"step": 1, "rank": 1}')
    (saving,) = savings_of(world.spool, world.attempt("step-1").id)
    assert (saving.ranks, saving.record) == ((0, 1), {"step": 1})
    assert world.identify.processes[300].rank == RankInfo(0, 2)


@pytest.mark.parametrize(
    "value",
    [b"", b"[]", b"{", b'{"a":NaN}', b'{"a":"\xff"}', b'{"rank":-5}', b"x" * 65_000,
     b'{"a":"' + b"x" * RECORD_BYTES_MAX + b'"}', b"[" * 60_000],
    ids=lambda value: repr(value[:12]),
)  # fmt: skip
def test_hostile_records_change_nothing(begun, value):
    """I13"""
    say(begun, begun.a, SAVED_BY, b'{"step":1}')
    before = savings_of(begun.spool, begun.attempt("step-1").id)
    with pytest.raises(UsageError) as caught:
        say(begun, begun.a, SAVED_BY, value)
    assert caught.value.errno == errno.EINVAL
    assert savings_of(begun.spool, begun.attempt("step-1").id) == before


def test_records_of_one_node_are_bounded(begun):
    text = "x" * (RECORD_BYTES_MAX - 100)
    with pytest.raises(CkptError) as caught:
        for rank in range(1000):
            say(begun, begun.a, SAVED_BY, json.dumps({"rank": rank, "n": rank, "a": text}))
    assert caught.value.errno == errno.ENOSPC
    assert rank < 100


@pytest.mark.parametrize("name", [BEGIN, SAVED_BY, COMMIT, ABORT])
def test_what_is_said_has_no_value_and_belongs_to_checkpoints(begun, name):
    with pytest.raises(CkptError) as caught:
        ask(begun, begun.a, name)
    assert caught.value.errno == errno.ENODATA
    with pytest.raises(CkptError) as caught:
        say(begun, begun.a, name, "all", path="run")
    assert caught.value.errno == errno.ENOTSUP
    assert begun.vfs.listxattr(begun.a, begun.walk(begun.a, PATH).attr.ino) == ()


def test_what_is_given_up_takes_nothing_more(begun):
    begun.write(begun.a, f"{PATH}/f", b"x")
    say(begun, begun.a, ABORT, b"disk \xff full")
    assert given_up(begun.spool, begun.attempt("step-1").id) == "disk \\xff full"
    for name, value in ((BEGIN, "0/2"), (SAVED_BY, "{}")):
        with pytest.raises(MissingError, match="was given up"):
            say(begun, begun.a2, name, value)


def test_a_rank_s_commit_of_what_its_job_has_committed_already_is_fine(begun):
    """A framework's marker sealed it before the rank came to say so."""
    begun.write(begun.a, f"{PATH}/f", b"x")
    begun.commit_own("run", "step-1")
    say(begun, begun.a, COMMIT, "0/2")
    say(begun, begun.a, COMMIT, "all")
    assert begun.attempt("step-1").state is AttemptState.COMMITTED
    with pytest.raises(CkptError) as caught:
        say(begun, begun.a, ABORT, "too late")
    assert caught.value.errno == errno.EPERM


def test_the_newest_is_what_the_log_says(begun):
    assert ask(begun, begun.a, LATEST, "run") == {"name": None, "undecided": []}
    begun.commit("run", "step-5", {})
    begun.catalog.set_view("run", newest=("step-5",), undecided=("step-6.0",))
    begun.set_pointer("run", "latest", "step-1")
    assert ask(begun, begun.b, LATEST, "run") == {"name": "step-5", "undecided": ["step-6.0"]}
    begun.write(begun.a, f"{PATH}/f", b"x")
    say(begun, begun.a, COMMIT, "0/2")
    assert ask(begun, begun.a, LATEST, "run")["undecided"] == ["step-1", "step-6.0"]


def test_what_the_job_deleted_is_not_its_newest(begun):
    begun.commit("run", "step-4", {})
    begun.commit("run", "step-5", {})
    begun.catalog.set_view("run", newest=("step-5", "step-4"))
    begun.rmdir(begun.a, "run/step-5")
    assert ask(begun, begun.a, LATEST, "run")["name"] == "step-4"
    assert ask(begun, begun.b, LATEST, "run")["name"] == "step-5"


def test_only_a_directory_of_checkpoints_has_a_newest(begun):
    for path in (PATH,):
        with pytest.raises(MissingError) as caught:
            ask(begun, begun.a, LATEST, path)
        assert caught.value.errno == errno.ENODATA
